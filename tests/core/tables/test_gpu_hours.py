"""GPU-hours of runs, from what their attempts noted."""

import json
import os
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from results import report, table
from src.runs import environment
from src.runs.run_dir import RunDir
from src.tables.gpu_hours import gpu_hours

BEGAN = datetime(2026, 1, 1, tzinfo=UTC)


def at(hours: float) -> str:
    return (BEGAN + timedelta(hours=hours)).isoformat(timespec="seconds")


def make(
    runs: Path, seed: int, events: list[tuple[str, float]], gpus: list[bool], heartbeat: float | None = None
) -> Path:
    """events: their names and hours. gpus: whether each attempt had some."""
    exp = {"recipe": "toy", "seed": seed}
    with RunDir.open(runs, exp, exp, facts={"groups": ["g"]}) as run:
        run.scores.append({"step": 1, "loss": 1.0})
        run.set_status("done")
    starts = [hours for name, hours in events if name == "start"]
    for number, (hours, has_gpus) in enumerate(zip(starts, gpus, strict=True), start=1):
        folder = run.path / "attempts" / f"{number:03d}"
        folder.mkdir(exist_ok=True)
        (folder / "env.json").write_text(json.dumps({"time": at(hours), "gpus": ["H100"] * has_gpus}))
    lines = [{"event": name, "when": at(hours), "world_size": 4} for name, hours in events]
    (run.path / "ledger.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"event": "sta')
    if heartbeat is not None:
        (run.path / "heartbeat.json").write_text("{}")
        moment = (BEGAN + timedelta(hours=heartbeat)).timestamp()
        os.utime(run.path / "heartbeat.json", (moment, moment))
    return run.path


@pytest.mark.parametrize(
    ("events", "gpus", "heartbeat", "hours"),
    [
        ([("start", 0), ("save", 1), ("stop", 2)], [True], None, 8),
        ([("start", 0), ("save", 1), ("start", 5), ("stop", 6)], [True, True], None, 8),  # killed after the checkpoint
        ([("start", 0), ("save", 1)], [True], 1.5, 6),  # killed, or alive
        ([("start", 0), ("stop", 1), ("rewind", 9)], [True], 1.5, 4),  # what a person did costs nothing
        ([("start", 0), ("stop", 1), ("start", 2), ("stop", 4)], [False, True], None, 8),  # first without a GPU
        ([("start", 0), ("stop", 1)], [False], None, 0),
        ([], [], None, 0),
    ],
)
def test_hours_of_all_attempts(
    tmp_path: Path, events: list[tuple[str, float]], gpus: list[bool], heartbeat: float | None, hours: float
):
    assert gpu_hours(make(tmp_path, 0, events, gpus, heartbeat)) == pytest.approx(hours)


def test_a_gpu_that_jobs_share_counts_once(tmp_path: Path):
    path = make(tmp_path, 0, [("start", 0), ("stop", 1), ("start", 2), ("stop", 3)], [True, True])
    env = path / "attempts" / "002" / "env.json"
    for share, hours in (("2", 2), ("2/4", 2), ("2/8", 4), ("3/1", 1 / 3)):  # of four processes
        env.write_text(json.dumps({**json.loads(env.read_text()), "variables": {environment.JOBS_PER_GPU: share}}))
        assert gpu_hours(path) == pytest.approx(4 + hours)


def test_tables_and_reports_add_them_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    for seed in range(2):
        make(tmp_path / "runs", seed, [("start", 0), ("stop", 1 + seed / 2)], [True])
    for style, text in (
        ("csv", "g,2,"),
        ("markdown", "| step | gpu_hours | loss |"),
        ("latex", r"gpu\_hours"),
        ("rich", "gpu_hours 10"),
    ):
        assert table.main([str(tmp_path / "runs"), "--by", "group", "--gpu-hours", "--format", style]) == 0
        assert text in capsys.readouterr().out
    assert table.main([str(tmp_path / "runs"), "--gpu-hours", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"][0]["gpu_hours"] == pytest.approx(10)
    assert report.main([str(tmp_path / "runs"), "-o", str(tmp_path / "a.html")]) == 0
    assert "10.0 GPU-hours over all attempts" in (tmp_path / "a.html").read_text()


def test_a_ledger_that_is_not_ours_costs_nothing(tmp_path: Path):
    path = make(tmp_path, 0, [("start", 0), ("stop", 1)], [True])
    (path / "ledger.jsonl").write_text('{"event": "start", "when": "then"}\n')
    assert gpu_hours(path) == 0
