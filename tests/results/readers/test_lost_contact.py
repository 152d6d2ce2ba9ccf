"""A run that was started by hand on another machine and went silent."""

import json
import os
import time
from pathlib import Path

import pytest

from results import clean, lineage, report, table
from results.pages import overview, run_page
from src.launch import status
from src.operations import watchdog
from src.runs import lease
from src.runs.store import RunStore, SavedRun

TEXT = "lost contact 49 min ago"


@pytest.fixture
def silent(runs: Path) -> Path:
    """The first of six runs: running on another machine, its last heartbeat 49 minutes ago."""
    run = min(path for path in runs.iterdir() if len(path.name) == 32)
    (run / "status.json").write_text(json.dumps({"state": "running"}))
    facts = {
        "host": "far",
        "boot_id": "other",
        "pid_namespace": "x",
        "pid": 1,
        "started": 1,
        "token": "t",
        "since": "2026-01-01",
        "beat": 3,
    }
    (run / lease.LEASE).write_text(json.dumps(facts))
    set_age(run, 49 * 60 + 10)
    return run


def set_age(run: Path, seconds: float) -> None:
    then = time.time() - seconds
    os.utime(run / lease.LEASE, (then, then))


def test_every_reader_shows_it(
    silent: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
):
    runs = silent.parent
    assert SavedRun(silent).state == "lost"
    (row,) = status.table(RunStore(runs), [silent.name])
    assert (row.state, row.node) == ("lost", "far")
    assert TEXT in "\n".join(status.format_table([row]))
    assert table.main([str(runs)]) == 0
    assert TEXT in capsys.readouterr().out
    assert table.main([str(runs), "--where", "state == 'lost'", "--unfinished"]) == 0
    assert TEXT in capsys.readouterr().out
    assert report.main([str(runs), "-o", str(tmp_path / "a.html")]) == 0
    assert TEXT in (tmp_path / "a.html").read_text()
    content = overview.load(runs)
    assert content.counts() == {"done": 5, "lost": 1}
    assert any(TEXT in job.reason for job in content.jobs)
    assert run_page.main([str(silent), "-o", str(tmp_path / "p.html")]) == 0
    assert TEXT in (tmp_path / "p.html").read_text()
    assert lineage.main([str(runs)]) == 0
    assert "lost" in capsys.readouterr().out
    caplog.clear()
    assert watchdog.main([str(runs), "--once"]) == 3
    assert TEXT in caplog.text


def test_clean_reports_it_and_deletes_nothing_of_it(silent: Path, capsys: pytest.CaptureFixture[str]):
    """Silence does not prove that the process is dead."""
    (silent / "checkpoints" / "step-00000001").mkdir(parents=True)
    assert clean.main([str(silent.parent)]) == 0
    assert TEXT in capsys.readouterr().err
    assert (silent / "checkpoints" / "step-00000001").is_dir()
    assert clean.main([str(silent), "--delete", "--yes"]) == 0
    error = capsys.readouterr().err
    assert f"{silent}: not deleted: {TEXT}" in error
    assert str(silent / lease.LEASE) in error
    assert lease.holder_of(silent).is_dead is None
    (silent / lease.LEASE).unlink()  # the advice
    assert clean.main([str(silent), "--delete", "--yes"]) == 0
    assert not silent.exists()


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, ""), (lease.SILENT_SECONDS - 5, ""), (lease.SILENT_SECONDS + 5, "5 min"), (7300, "2 h"), (200_000, "2 d")],
)
def test_contact_is_lost_after_many_heartbeats(silent: Path, seconds: float, text: str):
    set_age(silent, seconds)
    assert lease.holder_of(silent).lost_contact == (f"lost contact {text} ago" if text else "")
    assert SavedRun(silent).state == ("lost" if text else "running")


def test_a_living_process_of_this_machine_is_running(silent: Path):
    """However old its heartbeat is: its process can be stopped, or its disk full."""
    (silent / lease.LEASE).write_text(json.dumps({**lease.this_process(), "beat": 3}))
    set_age(silent, 100_000)
    assert (SavedRun(silent).state, lease.holder_of(silent).lost_contact) == ("running", "")
