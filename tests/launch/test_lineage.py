"""A lineage whose parent failed is repaired by one retry, whoever the launcher is."""

import contextlib
import os
from pathlib import Path

import pytest

from src.launch import actions, resources
from tests.launch.fake_ray.server import FakeRay
from tests.launch.fake_slurm.cluster import Cluster
from tests.launch.test_status import World, planned

FAKE_EAI = Path(__file__).parent / "fake_eai"
LAUNCHERS = {
    "local": {"launcher": "local", "wait": False, "slots": 4},
    "slurm": {"launcher": "slurm"},
    "toolkit": {"launcher": "toolkit", "account": "a", "image": "b:1", "max_run_seconds": 3600, "timeout_seconds": 300.0}
    # A parent that failed before this submission must not count: a child would give up at once.
    | {"parent_poll_seconds": 0.05, "parent_patience_seconds": 0, "calls_at_a_time": 1},
    "ray": {"launcher": "ray", "parent_poll_seconds": 0.05, "patience_seconds": 300.0},
}


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_one_retry_repairs_a_lineage(launcher: str, tmp_path: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch):
    """Children and grandchildren with their parent, nobody else, and nothing twice."""
    (tmp_path / "service").mkdir()
    monkeypatch.setenv("PATH", f"{FAKE_EAI}:{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_EAI_STATE", str(tmp_path / "service"))
    cluster.configure(run=True)
    with contextlib.closing(FakeRay()) as ray:
        ray.release()
        monkeypatch.setenv("RAY_ADDRESS", ray.address)
        _repair(tmp_path, launcher)


def _repair(tmp_path: Path, launcher: str) -> None:
    world = World(tmp_path)
    raw = LAUNCHERS[launcher] | ({"data": [f"a:{tmp_path}"]} if launcher == "toolkit" else {})
    given = resources.load("here", raw, world.runs)
    parent = planned("fail", "parent")
    child = planned("end", "child", parent.exp_id)
    grandchild = planned("end", "grandchild", child.exp_id)
    well = planned("end", "well")
    heir = planned("end", "heir", well.exp_id)
    items = [parent, well, child, heir, grandchild]
    actions.run(world.request(items), given)
    assert world.ended(items)[:2] == ["failed", "done"]
    assert set(world.states([child, grandchild])) <= {"stopped", "failed"}, "failed where the job itself waits for the parent"
    assert world.states([heir]) == ["done"]
    (world.runs / "mended").touch()
    before = world.started()
    actions.run(world.request(items), given, "retry")
    assert world.ended(items) == ["done"] * 5
    assert world.started()[len(before) :] == [item.exp_id for item in (parent, child, grandchild)]
    actions.run(world.request(items), given, "retry")
    assert len(world.submissions()) == 2


def test_one_retry_repairs_what_a_stopped_queue_left_out(tmp_path: Path):
    world = World(tmp_path)
    items = [planned("fail", str(n)) for n in range(3)]
    world.run(items, slots=1, stop_after_failures=1)
    assert world.ended(items) == ["failed", "stopped", "stopped"]
    (world.runs / "mended").touch()
    world.run(items, "retry")
    assert world.ended(items) == ["done"] * 3


def test_a_child_that_a_person_stopped_is_not_retried_without_its_parent(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    caplog.set_level("INFO")
    world = World(tmp_path)
    parent = planned("fail", "parent")
    child = planned("end", "child", parent.exp_id)
    world.run([parent, child])
    assert world.ended([parent, child]) == ["failed", "stopped"]
    world.run([child], "retry")
    assert f"{child.exp_id}: it is stopped, not failed: run starts it again, and so does a retry of its parents" in caplog.text
    assert f"its parent {parent.exp_id} has failed" in caplog.text or f"because {parent.exp_id} did not end well" in caplog.text
    assert len(world.submissions()) == 1
