"""Every command on runs with a damaged file: one line or a result, never a traceback and never a hang.

tests/results/test_damaged_files.py has more damages for the results commands.
"""

import copy
import itertools
import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import trainval
from results import clean, diff, lineage, overview, plot, report, run_page, share, table
from src.operations import interventions, watchdog
from tests import toy

pytestmark = pytest.mark.slow
EXP = copy.deepcopy(toy.BASE)
EXP["loop"]["steps"] = 8
GROUPS = {"base": [EXP]}
SECONDS = 120
DAMAGE: dict[str, bytes] = {
    "empty": b"",
    "truncated": b'{"step": 1, "sta',
    "binary": bytes(range(256)) * 40,
    "types": b'{"step": "x", "state": 3, "files": 1}\n',
    "deep": b"[" * 100_000 + b"\n",
}
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


@pytest.fixture(autouse=True)
def _limit() -> Iterator[None]:
    def fail(*_: object) -> None:
        raise TimeoutError(f"no answer in {SECONDS} s")

    before = signal.signal(signal.SIGALRM, fail)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize(
    ("damage", "command"),
    [*itertools.product(DAMAGE, ("status", "watchdog", "rewind", "resume")), *itertools.product(SPECIAL, COMMANDS)],
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
        write_damage(run / name, damage)
        capfd.readouterr()
        signal.alarm(SECONDS)
        code = COMMANDS[command](tmp_path, run)
        signal.alarm(0)
        error = capfd.readouterr().err
        assert code in (0, 1, 3), name
        assert "Traceback" not in error, name
        assert code != 1 or "error: " in error, name


def write_damage(path: Path, damage: str) -> None:
    """Replace a file."""
    path.unlink(missing_ok=True)
    if damage == "FIFO":
        os.mkfifo(path)
    else:
        path.write_bytes(DAMAGE[damage])
