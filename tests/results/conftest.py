"""A folder of finished runs: two strides, three seeds, one more run that failed."""

import shutil
from pathlib import Path

import pytest

from src.runs.run_dir import RunDir


def loss(stride: int, seed: int, step: int) -> float:
    return stride / step + 0.1 * seed + 1 / 3


@pytest.fixture
def runs(finished: Path, tmp_path: Path) -> Path:
    """Six runs of group "tiny", which all have val_loss at steps 1 to 4 and em at the last; this test's own."""
    return Path(shutil.copytree(finished, tmp_path / "runs"))


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `runs` is a copy of."""
    folder = tmp_path_factory.mktemp("finished")
    for stride in (2, 1):
        for seed in range(3):
            exp = {"recipe": "toy", "seed": seed, "model": {"name": "m", "stride": stride, "kind": "a_b & 50%"}}
            with RunDir.open(folder, exp, exp, facts={"groups": ["tiny"]}) as run:
                for step in range(1, 5):
                    row = {"step": step, "val_loss": loss(stride, seed, step), "train_loss": 1.0}
                    run.scores.append(row | ({"em": stride / 4} if step == 4 else {}))
                run.scores.export_haven()
                run.set_status("done")
    return folder
