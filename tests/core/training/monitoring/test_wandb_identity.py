"""The wandb id of a restarted run is new, also after older runs were deleted."""

import shutil
from pathlib import Path

from src.experiments.config import Places
from src.runs import context
from src.runs.run_dir import RunDir
from src.training.monitoring.wandb import _identity
from tests import toy


def start(folder: Path, reset: int) -> str:
    with RunDir.open(folder, toy.BASE, {}, reset=reset) as run_dir:
        return _identity(context.Run(run_dir, Places(folder, folder), context.Options()))


def test_each_restart_has_a_new_id(tmp_path: Path):
    identities = [start(tmp_path, 0), start(tmp_path, 0), start(tmp_path, 1), start(tmp_path, 1)]
    shutil.rmtree(tmp_path / "deleted")
    identities += [start(tmp_path, 0), start(tmp_path, 1), start(tmp_path, 1)]
    first = identities[0]
    assert identities == [first, first, f"{first}-1", f"{first}-2", f"{first}-2", f"{first}-3", f"{first}-4"]
    assert len({path.name for path in (tmp_path / "deleted").iterdir()}) == 2


def test_a_damaged_id_of_a_deleted_run_is_ignored(tmp_path: Path):
    start(tmp_path, 0)
    (name,) = [path.name for path in tmp_path.iterdir() if len(path.name) == 32]
    (tmp_path / name / "wandb.json").write_text("{")
    assert start(tmp_path, 1) == f"{name}-1"
