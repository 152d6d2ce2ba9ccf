"""A save directory or a folder that one may not read, as colleagues have them in a shared folder: named, and the others
are shown."""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from results import clean, diff, lineage, plot, report, share, table
from results.pages import overview

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody who may not read")
Command = Callable[[Path, Path, list[str]], int]
COMMANDS: dict[str, Command] = {
    "table": lambda runs, out, ids: table.main([str(runs)]),
    "plot": lambda runs, out, ids: plot.main([str(runs), "--output", str(out / "a.png")]),
    "report": lambda runs, out, ids: report.main([str(runs), "-o", str(out / "a.html")]),
    "diff": lambda runs, out, ids: diff.main([*ids[:2], "--runs", str(runs)]),
    "lineage": lambda runs, out, ids: lineage.main([str(runs)]),
    "clean": lambda runs, out, ids: clean.main([str(runs)]),
    "share": lambda runs, out, ids: share.main([str(runs), "-o", str(out / "a.zip")]),
}


@pytest.fixture
def shared(finished: Path) -> Iterator[tuple[Path, Path, list[str]]]:
    """Runs that everybody may read, a folder that everybody may write, and the ids."""
    folder = Path(tempfile.mkdtemp())  # those of pytest are closed to others
    runs, out = Path(shutil.copytree(finished, folder / "runs")), folder / "out"
    out.mkdir()
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    out.chmod(0o777)
    yield runs, out, sorted(path.name for path in runs.iterdir() if len(path.name) == 32)
    os.seteuid(0)
    shutil.rmtree(folder)


@pytest.mark.parametrize("command", COMMANDS)
def test_unreadable_directory_is_named(
    shared: tuple[Path, Path, list[str]], command: str, capsys: pytest.CaptureFixture[str]
):
    runs, out, ids = shared
    assert COMMANDS[command](runs, out, ids) == 0  # what is imported late is there
    (runs / ids[0]).chmod(0o700)
    capsys.readouterr()
    os.seteuid(65534)
    assert COMMANDS[command](runs, out, ids) == 0
    message = (out / "a.html").read_text() if command == "report" else capsys.readouterr().err
    assert f"{ids[0]}" in message
    assert "Permission denied" in message


@pytest.mark.parametrize("command", COMMANDS)
def test_unreadable_folder_is_one_line(
    shared: tuple[Path, Path, list[str]], command: str, capsys: pytest.CaptureFixture[str]
):
    runs, out, ids = shared
    runs.chmod(0o700)
    os.seteuid(65534)
    assert COMMANDS[command](runs, out, ids) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"error: {runs}")
    assert "cannot read: Permission denied." in error
    assert error.count("\n") == 1


def test_dashboard_lists_unreadable_runs(shared: tuple[Path, Path, list[str]]):
    runs, _, ids = shared
    (runs / ids[0]).chmod(0o700)
    os.seteuid(65534)
    loaded_runs = overview.load(runs)
    assert len(loaded_runs.rows) == 5
    (job,) = [job for job in loaded_runs.jobs if job.exp_id == ids[0]]
    assert job.state == "unknown"
    assert "Permission denied" in job.reason
