"""The head of a real Ray dies, and with it all that the cluster knew. The last file, as starting another takes long."""

import csv
import io
from pathlib import Path

import pytest

from results import report, table
from results.pages import overview
from src.launch import actions, tracking
from src.runs.store import SavedRun
from tests.core.launch.test_status import make_item
from tests.ray.real import Cluster, wait_until
from tests.ray.test_cluster import Grid, processes

pytestmark = [pytest.mark.ray, pytest.mark.slow]


def test_ended_jobs_are_known_without_the_cluster(
    cluster: Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """It takes its running job with it. A test after this one would start a new one."""
    monkeypatch.setattr(tracking, "_memory", tracking._Memory())
    grid = Grid(cluster, tmp_path)
    done, failed = make_item("end", "done"), make_item("fail", "failed")
    stopped_item, running = (make_item("end", name, waits="nothing") for name in ("stopped", "running"))
    items = [done, failed, stopped_item, running]
    grid.run(items)
    wait_until(lambda: {stopped_item.exp_id, running.exp_id} <= set(grid.start_log()), "their start")
    wait_until(lambda: not list(processes(done.exp_id)) and not list(processes(failed.exp_id)), "the others to end")
    actions.kill(grid.runs, [stopped_item.exp_id])
    wait_until(lambda: SavedRun(grid.runs / stopped_item.exp_id).status["state"] == "stopped", "its orderly end")
    for item, value in ((failed, 7.0), (stopped_item, 0.1), (running, 0.2)):
        (grid.runs / item.exp_id / "scores.jsonl").write_text(f'{{"step": 1, "train_loss": {value}}}\n')
    cluster.lose("head")
    wait_until(lambda: not list(processes(running.exp_id)), "its job to die with it")

    expected_states = {
        done.exp_id: "done",
        failed.exp_id: "failed",
        stopped_item.exp_id: "stopped",
        running.exp_id: "unknown",
    }
    rows = {row.exp_id: row for row in grid.rows(items)}
    assert {name: row.state for name, row in rows.items()} == expected_states
    assert "not answer" in rows[running.exp_id].doubt
    content = overview.load(grid.runs)
    assert (
        {job.exp_id: job.state for job in content.jobs}
        == {row["exp_id"]: row["state"] for row in content.rows}
        == expected_states
    )
    assert overview.tabulate(content, ["loop.steps"]).lines[0][0] == "0.5 (1 of 4)"
    assert report.main([str(grid.runs), "-o", str(tmp_path / "report.html")]) == 0
    page = (tmp_path / "report.html").read_text()
    assert all(text in page for text in ("1 done", "1 failed", "1 stopped", "1 unknown", "out of luck"))
    capsys.readouterr()
    assert table.main([str(grid.runs), "--format", "csv", "--by", "loop.steps"]) == 0
    (line,) = csv.DictReader(io.StringIO(capsys.readouterr().out))
    assert (line["train_loss"], line["train_loss_n"], line["runs"]) == ("0.5", "1", "4")
