"""A lineage whose parent failed is repaired by one retry, whoever the launcher is."""

import contextlib
import subprocess
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from src.launch import actions, logs, resources
from src.runs.store import SavedRun
from tests.core.launch.fakes.fake_ray.server import FakeRay
from tests.core.launch.fakes.fake_slurm.cluster import Cluster
from tests.core.launch.test_status import World, make_item

LAUNCHERS = {
    "local": {"launcher": "local", "wait": False, "slots": 4},
    "slurm": {"launcher": "slurm"},
    "toolkit": {
        "launcher": "toolkit",
        "account": "a",
        "image": "b:1",
        "max_run_seconds": 3600,
    }
    # A parent that failed before this submission must not count: a child would give up at once.
    | {"parent_poll_seconds": 0.05, "parent_patience_seconds": 0, "max_parallel_calls": 1},
    "ray": {"launcher": "ray", "parent_poll_seconds": 0.05, "patience_seconds": 300.0},
}


def patient(raw: dict[str, Any]) -> dict[str, Any]:
    """Let children wait while a retried parent still has its old state, before its job starts."""
    return raw | ({"parent_patience_seconds": 60} if "parent_patience_seconds" in raw else {})


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.usefixtures("client")
def test_one_retry_repairs_a_lineage(launcher: str, tmp_path: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch):
    """Children and grandchildren with their parent, nobody else, and nothing twice."""
    cluster.configure(run=True)
    with contextlib.closing(FakeRay()) as ray:
        ray.release()
        monkeypatch.setenv("RAY_ADDRESS", ray.address)
        _repair(tmp_path, launcher)


def _repair(tmp_path: Path, launcher: str) -> None:
    world = World(tmp_path)
    raw = LAUNCHERS[launcher] | ({"data": [f"a:{tmp_path}"]} if launcher == "toolkit" else {})
    target = resources.load("here", raw, world.runs)
    parent = make_item("fail", "parent")
    child = make_item("end", "child", parent.exp_id)
    grandchild = make_item("end", "grandchild", child.exp_id)
    well = make_item("end", "well")
    heir = make_item("end", "heir", well.exp_id)
    items = [parent, well, child, heir, grandchild]
    actions.run(world.request(items), target)
    assert world.final_states(items)[:2] == ["failed", "done"]
    assert set(world.states([child, grandchild])) <= {"stopped", "failed"}, (
        "failed where the job itself waits for the parent"
    )
    assert world.states([heir]) == ["done"]
    (world.runs / "mended").touch()
    before = world.start_log()
    actions.run(world.request(items), resources.load("here", patient(raw), world.runs), "retry")
    assert world.final_states(items) == ["done"] * 5
    assert world.start_log()[len(before) :] == [item.exp_id for item in (parent, child, grandchild)]
    actions.run(world.request(items), resources.load("here", patient(raw), world.runs), "retry")
    assert len(world.submissions()) == 2


class OneByOne:
    """A scheduler that gives resources to one job after the other."""

    def __init__(
        self, launcher: str, client: ModuleType, monkeypatch: pytest.MonkeyPatch, stack: contextlib.ExitStack
    ) -> None:
        monkeypatch.setenv("FAKE_TOOLKIT_HOLD", "1")
        self.client = client
        self.ray = stack.enter_context(contextlib.closing(FakeRay())) if launcher == "ray" else None
        if self.ray:
            monkeypatch.setenv("RAY_ADDRESS", self.ray.address)
        self.runners: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, job_id: str) -> None:
        if self.ray:
            self.ray.start(job_id)
        else:
            self.runners[job_id] = self.client.jobs.start(job_id)

    def wait_for(self, job_id: str) -> None:
        """Until it has ended."""
        if self.ray:
            self.ray.wait_for(job_id)
        else:
            self.runners[job_id].wait(300)

    def give_all(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """There are resources for all from now on."""
        monkeypatch.delenv("FAKE_TOOLKIT_HOLD")
        if self.ray:
            self.ray.is_held = False


@pytest.mark.slow
@pytest.mark.parametrize(("most", "num_started"), [(3, 5), (0, 8)])
@pytest.mark.parametrize("launcher", ["toolkit", "ray"])
def test_quick_failures_in_a_row_stop_what_waits(
    launcher: str, most: int, num_started: int, tmp_path: Path, client: ModuleType, monkeypatch: pytest.MonkeyPatch
):
    """As on this machine and on Slurm: see test_local.py and test_tracking.py. A child that waits holds resources, and
    gives them back."""
    world = World(tmp_path)
    raw = LAUNCHERS[launcher] | ({"data": [f"a:{tmp_path}"]} if launcher == "toolkit" else {})
    items = [make_item("fail", "one"), make_item("end", "well"), *(make_item("fail", str(n)) for n in range(6))]
    heir = make_item("end", "heir", items[-1].exp_id)
    with contextlib.ExitStack() as stack:
        scheduler = OneByOne(launcher, client, monkeypatch, stack)
        actions.run(
            world.request([*items, heir]), resources.load("here", raw | {"stop_after_failures": most}, world.runs)
        )
        ids = {item.exp_id: (SavedRun(world.runs / item.exp_id).job or {})["job_id"] for item in [*items, heir]}
        scheduler.start(ids[heir.exp_id])
        for item in items:
            scheduler.start(ids[item.exp_id])
            scheduler.wait_for(ids[item.exp_id])
        scheduler.wait_for(ids[heir.exp_id])
        assert world.start_log() == [item.exp_id for item in items[:num_started]]
        expected_reason = "not started: 3 in a row failed within 60 s of their start. See why, then --job_option retry"
        for item, row in zip(items, rows := world.rows(items), strict=True):
            if item.exp_id not in world.start_log():
                assert row.state == "stopped"
                assert row.reason.removeprefix("JOB_ENTRYPOINT_COMMAND_ERROR: ") == expected_reason
                assert expected_reason in logs.tail(world.runs / "logs" / f"{item.exp_id}.err.log", 1)
        assert [row.state for row in rows] == [
            "failed",
            "done",
            *["failed"] * (num_started - 2),
            *["stopped"] * (8 - num_started),
        ]
        assert expected_reason in world.rows([heir])[0].reason or not most
        scheduler.give_all(monkeypatch)
        (world.runs / "mended").touch()
        actions.run(world.request([*items, heir]), resources.load("here", patient(raw), world.runs), "retry")
        assert world.final_states([*items, heir]) == ["done"] * 9, "one command repairs all"


def test_one_retry_runs_jobs_that_a_stopped_queue_skipped(tmp_path: Path):
    world = World(tmp_path)
    items = [make_item("fail", str(n)) for n in range(3)]
    world.run(items, slots=1, stop_after_failures=1)
    assert world.final_states(items) == ["failed", "stopped", "stopped"]
    (world.runs / "mended").touch()
    world.run(items, "retry")
    assert world.final_states(items) == ["done"] * 3


def test_a_child_that_a_person_stopped_is_not_retried_without_its_parent(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    caplog.set_level("INFO")
    world = World(tmp_path)
    parent = make_item("fail", "parent")
    child = make_item("end", "child", parent.exp_id)
    world.run([parent, child])
    assert world.final_states([parent, child]) == ["failed", "stopped"]
    world.run([child], "retry")
    assert (
        f"{child.exp_id}: it is stopped, not failed: run restarts it, and so does a retry of its parents" in caplog.text
    )
    assert (
        f"its parent {parent.exp_id} has failed" in caplog.text
        or f"because {parent.exp_id} did not complete" in caplog.text
    )
    assert len(world.submissions()) == 1
