"""Every command on runs with a damaged file: one line or a result, never a traceback and never a hang.

tests/results/readers/test_damaged_files.py has more damages for the results commands,
tests/core/serving/test_damaged_models.py those of commands that load a model.
"""

import copy
import itertools
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import trainval
from results import clean, diff, lineage, plot, report, share, table
from results.pages import overview, run_page
from src.files import MANIFEST
from src.operations import interventions, watchdog
from tests import damages, toy

pytestmark = pytest.mark.slow
EXP = copy.deepcopy(toy.BASE)
EXP["loop"]["steps"] = 8
GROUPS = {"base": [EXP]}
SPECIAL = ("FIFO",)
MORE = [
    "heartbeat.json",
    "remarks.json",
    "job_dict.json",
    "events.jsonl",
    "lease.guard",
    "status.json",
    "../index.sqlite",
]
Command = Callable[[Path, Path], int]
COMMANDS: dict[str, Command] = {
    "table": lambda folder, run: table.main([str(run.parent)]),
    "report": lambda folder, run: report.main([str(run.parent), "-o", str(folder / "a.html")]),
    "plot": lambda folder, run: plot.main([str(run.parent), "--output", str(folder / "a.png")]),
    "diff": lambda folder, run: diff.main([run.name, run.name, "--runs", str(run.parent)]),
    "lineage": lambda folder, run: lineage.main([str(run.parent)]),
    "clean": lambda folder, run: clean.main([str(run.parent)]),
    "share": lambda folder, run: share.main([str(run.parent), "-o", str(folder / "a.zip")]),
    "run_page": lambda folder, run: run_page.main([str(run), "-o", str(folder / "p.html")]),
    "dashboard": lambda folder, run: len(overview.load(run.parent).rows) * 0,
    "status": lambda folder, run: trainval.main(
        ["--job_option", "status", "-sb", str(run.parent), "--exp_id", run.name]
    ),
    "watchdog": lambda folder, run: watchdog.main([str(run.parent), "--once"]),
    "rewind": lambda folder, run: interventions.main(["rewind", str(run), "--to", "4", "--why", "x"]),
    "resume": lambda folder, run: toy.main(["-e", "base"], GROUPS, folder),
}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished toy training, and its data."""
    folder = tmp_path_factory.mktemp("world")
    toy.write_data(folder / "data")
    assert toy.main(["-e", "base"], GROUPS, folder) == 0
    return folder


@pytest.mark.parametrize(
    ("damage", "command"),
    [
        *itertools.product(damages.DAMAGE, ("status", "watchdog", "rewind", "resume")),
        *itertools.product(SPECIAL, COMMANDS),
    ],
)
def test_a_damaged_file_is_one_line(
    world: Path, damage: str, command: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    (tmp_path / "data").symlink_to(world / "data")
    source = next(path for path in (world / "runs").iterdir() if len(path.name) == 32)
    names = {path.relative_to(source).as_posix() for path in source.rglob("*") if path.is_file()}
    for name in sorted({*names, *MORE}):
        shutil.rmtree(tmp_path / "runs", ignore_errors=True)
        run = Path(shutil.copytree(world / "runs", tmp_path / "runs")) / source.name
        status = json.loads((run / "status.json").read_text())
        state = {"resume": "failed", "watchdog": "running"}.get(command, "done")
        (run / "status.json").write_text(json.dumps({**status, "state": state}))
        damages.write(run / name, damage)
        damages.check(lambda run=run: COMMANDS[command](tmp_path, run), name, capfd)


@pytest.mark.parametrize("damage", damages.DAMAGE)
def test_resume_from_a_checkpoint_that_was_written_damaged(
    world: Path, damage: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    (tmp_path / "data").symlink_to(world / "data")
    source = next(path for path in (world / "runs").iterdir() if len(path.name) == 32)
    checkpoint = max(source.glob("checkpoints/step-*"))
    for path in (path for path in checkpoint.rglob("*") if path.is_file() and path.name != MANIFEST):
        shutil.rmtree(tmp_path / "runs", ignore_errors=True)
        run = Path(shutil.copytree(world / "runs", tmp_path / "runs")) / source.name
        status = json.loads((run / "status.json").read_text())
        (run / "status.json").write_text(json.dumps({**status, "state": "failed"}))
        file = run / path.relative_to(source)
        damages.write(file, damage)
        damages.list_in_manifest(run / checkpoint.relative_to(source))
        code = damages.check(lambda run=run: COMMANDS["resume"](tmp_path, run), str(file), capfd)
        assert code == 1 or file.suffix != ".safetensors", file
