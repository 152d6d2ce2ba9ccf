"""Whom a look at experiments asks, how often and for how long; and what is known where nobody answers."""

import dataclasses
import json
import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from src.errors import LaunchError
from src.experiments.identity import exp_id
from src.files import write_json
from src.launch import actions, logs, resources, status, tracking
from src.launch.slurm import launcher
from src.launch.tracking import LOOK, REFRESH, QueryPolicy
from src.runs import lease
from src.runs.plan import PlannedExperiment
from src.runs.store import RunStore
from src.support import read_cache
from src.support.read_cache import ReadCache
from tests.core.launch.fakes.fake_slurm.cluster import Cluster
from tests.core.launch.test_status import World, make_item

DOWN = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)"
HANGS_SECONDS = 30
"""So that who waits for a scheduler that hangs sees a wrong answer, and not the end of the test run."""
PATIENT_LOOK, PATIENT_REFRESH = (dataclasses.replace(question, seconds=300.0) for question in (LOOK, REFRESH))
"""However busy the machine, the stand-in has the time to answer."""


@pytest.fixture
def world(tmp_path: Path, cluster: Cluster) -> World:
    return World(tmp_path)


@pytest.fixture(autouse=True)
def _no_memories(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracking, "_memory", tracking._Memory())


def submit(world: World, count: int, option: str = "run") -> list[PlannedExperiment]:
    items = [make_item("end", str(n)) for n in range(count)]
    actions.run(world.request(items), resources.load("there", {"launcher": "slurm"}, world.runs), option)
    return items


def say(world: World, item: PlannedExperiment, state: str, **facts: Any) -> None:
    write_json(world.runs / item.exp_id / "status.json", {"state": state, **facts})


def hold(world: World, item: PlannedExperiment, **other: Any) -> None:
    write_json(world.runs / item.exp_id / "lease", {**lease.this_process(), "beat": 3, **other})


def look(world: World, items: list[PlannedExperiment], question: QueryPolicy = PATIENT_LOOK) -> list[status.Row]:
    return status.table(RunStore(world.runs), [item.exp_id for item in items], question)


def test_no_query_for_finished_or_local_runs(world: World, cluster: Cluster):
    items = submit(world, 12)
    for item in items[:11]:
        say(world, item, "done")
    say(world, items[11], "running")
    hold(world, items[11])
    cluster.fail("squeue", "say", DOWN, times=1000)
    cluster.forget_calls()
    rows = look(world, items)
    assert [(row.state, row.reason) for row in rows] == [("done", "")] * 11 + [("running", "")]
    assert rows[0].job_id == "1_0"
    assert cluster.calls() == []


@pytest.mark.slow
def test_the_last_known_state_is_shown_during_an_outage(world: World, cluster: Cluster):
    items = submit(world, 5)
    say(world, items[0], "failed", reason="out of luck")
    say(world, items[1], "stopped", reason="time is up")
    for item, host in ((items[2], "far"), (items[3], "")):
        say(world, item, "running")
        if host:
            hold(world, item, boot_id="another", host=host)
    cluster.fail("squeue", "say", DOWN, times=1000)
    rows = look(world, items)
    assert [row.state for row in rows] == ["failed", "stopped", "running", "unknown", "unknown"]
    assert all("Unable to contact slurm controller" in row.reason for row in rows)
    assert [row.reason.partition(";")[0] for row in rows[:2]] == ["out of luck", "time is up"]
    num_queued = len(cluster.alive())
    for option in ("run", "retry"):  # what is not known is not submitted again
        submit(world, 5, option)
    assert len(cluster.alive()) == num_queued


def test_a_job_that_failed_before_its_training_is_known_to_have_failed(world: World, cluster: Cluster):
    cluster.configure(run=True)
    items = [make_item("refuse"), make_item("fail"), make_item("end")]
    actions.run(world.request(items), resources.load("there", {"launcher": "slurm"}, world.runs))
    cluster.fail("squeue", "say", DOWN, times=1000)
    rows = look(world, items)
    assert [row.state for row in rows] == ["failed", "failed", "done"]
    assert rows[0].reason.startswith("exit code 1 before its training began; its log says why")
    assert rows[1].reason.startswith("out of luck")


def test_one_query_serves_all_readers(world: World, cluster: Cluster, monkeypatch: pytest.MonkeyPatch):
    """Any number of runs, readers and times; anew for a job that nobody asked about, and when the answer is 30 seconds
    old."""
    monkeypatch.setattr(tracking, "time", cluster.clock)
    monkeypatch.setattr(status, "time", cluster.clock)
    items = submit(world, 6)
    for item in items[:3]:
        say(world, item, "done")
    cluster.forget_calls()
    with ThreadPoolExecutor(3) as pool:
        tables = list(pool.map(lambda _: look(world, items, PATIENT_REFRESH), range(12)))
    assert [row.state for row in tables[-1]] == ["done"] * 3 + ["queued"] * 3
    assert len(cluster.calls("squeue")) == 1
    cluster.set("1_4", state="RUNNING", node="n1")
    cluster.clock.now += REFRESH.max_age_seconds
    assert [row.state for row in look(world, items[3:5], PATIENT_REFRESH)] == ["queued", "queued"]
    assert [row.state for row in look(world, items[3:5])] == ["queued", "running"], (
        "who does not ask for an old answer gets none"
    )
    assert len(cluster.calls("squeue")) == 2
    cluster.clock.now += 1
    assert [row.state for row in look(world, items, PATIENT_REFRESH)][3:] == ["queued", "running", "queued"]
    submit(world, 7)
    cluster.forget_calls()
    look(world, [*items, make_item("end", "6")], PATIENT_REFRESH)
    assert len(cluster.calls("squeue")) == 1
    assert LOOK.seconds == REFRESH.seconds == 5
    assert REFRESH.max_age_seconds <= 30


def test_a_scheduler_that_hangs_is_not_waited_for(world: World, monkeypatch: pytest.MonkeyPatch):
    items = submit(world, 2)
    say(world, items[0], "failed", reason="out of luck")
    release, queries = threading.Event(), []

    def hang(self: launcher.Config, job_ids: list[str]) -> dict[str, Any]:
        queries.append(job_ids)
        release.wait(HANGS_SECONDS)
        return {}

    monkeypatch.setattr(launcher.Config, "states", hang)
    try:
        rows = look(world, items, QueryPolicy(seconds=0.2, max_age_seconds=30.0))
        assert [row.state for row in rows] == ["failed", "unknown"]
        assert all("the scheduler did not answer in 0.2 s" in row.reason for row in rows)
        look(world, items, QueryPolicy(seconds=300.0, max_age_seconds=30.0))
        assert len(queries) == 1, "that it hangs is remembered, too"
    finally:
        release.set()


@pytest.mark.parametrize("jobs_per_task", [1, 2])
@pytest.mark.parametrize(("most", "num_started"), [(3, 5), (0, 8)])
def test_quick_failures_in_a_row_stop_what_waits(
    world: World, cluster: Cluster, most: int, num_started: int, jobs_per_task: int
):
    """As on this machine: see test_local.py."""
    cluster.configure(run=True)
    items = [make_item("fail", "one"), make_item("end", "well"), *(make_item("fail", str(n)) for n in range(6))]
    config = {"launcher": "slurm", "stop_after_failures": most, "jobs_per_task": jobs_per_task}
    actions.run(world.request(items), resources.load("there", config, world.runs))
    rows = look(world, items)
    ran = len(world.start_log())
    assert ran == num_started if jobs_per_task == 1 or not most else 4 <= ran < 8, "side by side the order is not known"
    stopped_rows = [row for row in rows if row.state == "stopped"]
    assert sorted(row.state for row in rows) == ["done"] + ["failed"] * (ran - 1) + ["stopped"] * (8 - ran)
    assert bool(stopped_rows) == bool(most)
    for row in stopped_rows:
        assert row.exp_id not in world.start_log()
        assert (
            row.reason == "not started: 3 in a row failed within 60 s of their start. See why, then --job_option retry"
        )
        assert row.reason in logs.tail(world.runs / "logs" / f"{row.exp_id}.err.log", 1)
    (world.runs / "mended").touch()
    actions.run(world.request(items), resources.load("there", {"launcher": "slurm"}, world.runs), "retry")
    assert {row.state for row in look(world, items)} == {"done"}, "one command repairs all"


def test_notes_of_a_reinstalled_cluster_are_ignored(world: World, cluster: Cluster):
    cluster.configure(run=True)
    (world.runs / "submissions" / "shared_tasks").mkdir(parents=True)
    (world.runs / "submissions" / "shared_tasks" / "1_0.why").write_text("not started")
    item = make_item("fail")
    actions.run(world.request([item]), resources.load("there", {"launcher": "slurm"}, world.runs))
    assert [row.state for row in look(world, [item])] == ["failed"]


def test_notes_of_a_reinstalled_cluster_hide_no_failure(world: World, cluster: Cluster):
    notes = world.runs / "submissions" / "shared_tasks"
    notes.mkdir(parents=True)
    for name in ("1_0.20200101-000000.why", "1_1.why", "1_2.20200101-000000.why"):
        (notes / name).write_text("not started")
    items = submit(world, 3)
    cluster.set("1_0", state="NODE_FAIL", exit="0:0")
    cluster.set("1_1", state="FAILED", exit="1:0")
    cluster.set("1_2", state="FAILED", exit="1:0")
    (notes / f"1_2.{world.submissions()[0].name}.why").write_text("not started, by its own script")
    (notes / f"1_0.{world.submissions()[0].name}.why").write_text("not started, before the node failed")
    rows = look(world, items)
    assert [row.state for row in rows] == ["failed", "failed", "stopped"]
    assert rows[2].reason == "not started, by its own script"


def test_a_reset_that_is_refused_kills_nobody(world: World, cluster: Cluster):
    items = submit(world, 2)
    cluster.set("1_0", state="RUNNING")
    cluster.set("1_1", state="WONDERING")
    with pytest.raises(LaunchError, match=r"the state of job 1_1 is unknown(.|\n)*Nothing was killed"):
        submit(world, 2, "reset")
    assert [row.state for row in look(world, items)] == ["running", "unknown"]
    assert not cluster.calls("scancel")


def test_setup_commands_are_in_private_files_only(world: World, cluster: Cluster):
    """One of an older version may hold what is refused today."""
    item = make_item("end")
    actions.run(
        world.request([item]), resources.load("there", {"launcher": "slurm", "setup": ["echo mauve"]}, world.runs)
    )
    (folder,) = world.submissions()
    assert [path for path in folder.iterdir() if b"mauve" in path.read_bytes() and path.stat().st_mode & 0o077] == []
    assert any(b"mauve" in path.read_bytes() for path in folder.iterdir())
    intent = json.loads((folder / "submission.json").read_text())
    write_json(
        folder / "submission.json",
        intent | {"launcher": intent["launcher"] | {"setup": ["export A=hf_xyzzyxyzzyxyzzy"]}},
    )
    assert [row.state for row in look(world, [item])] == ["queued"]


def test_the_throttle_of_queued_jobs_is_changed(world: World, cluster: Cluster, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO)
    items = submit(world, 3)
    ids = [item.exp_id for item in items]
    actions.throttle(world.runs, ids, 2)
    assert cluster.state["arrays"]["1"]["throttle"] == "2"
    actions.throttle(world.runs, ids, 0)
    assert [line for line in caplog.messages if "throttled" in line] == [
        "throttled: 3 queued, at most 2 at a time",
        "throttled: 3 queued, any number at a time",
    ]
    for item in items:
        say(world, item, "done")
    cluster.configure(arrays={})
    with pytest.raises(LaunchError, match="none of these experiments is queued"):
        actions.throttle(world.runs, ids, 2)
    world.run([make_item("end", "here", waits=True)], slots=1)
    later = make_item("end", "later")
    world.run([later], slots=1)
    with pytest.raises(LaunchError, match="launcher local: cannot change how many"):
        actions.throttle(world.runs, [later.exp_id], 2)
    actions.kill(world.runs, [later.exp_id, make_item("end", "here", waits=True).exp_id])


def test_an_interrupted_submission_delays_no_look(world: World, monkeypatch: pytest.MonkeyPatch):
    items = submit(world, 2)
    (folder,) = world.submissions()
    (folder / "jobs.json").unlink()
    release = threading.Event()

    def hang(*_: object) -> dict[str, str]:
        release.wait(HANGS_SECONDS)
        return {}

    monkeypatch.setattr(launcher.Config, "find", hang)
    try:
        rows = look(world, items, QueryPolicy(seconds=0.2))
        assert [row.state for row in rows] == ["unknown", "unknown"]
        assert "was interrupted, and its jobs are unknown" in rows[0].reason
    finally:
        release.set()


def test_a_saved_row_follows_its_job_into_the_queue_again(
    world: World, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
):
    """A requeued job of a stopped run changes nothing in the save directory until it starts."""
    monkeypatch.setattr(read_cache, "SETTLED_SECONDS", 0.0)
    (item,) = submit(world, 1)
    say(world, item, "stopped", reason="SIGTERM")
    cluster.set("1_0", state="CANCELLED")
    saved: status.RowCache = ReadCache(world.runs)
    for state, expected in (
        ("CANCELLED", "stopped"),
        ("CANCELLED", "stopped"),
        ("PENDING", "queued"),
        ("CANCELLED", "stopped"),
    ):
        cluster.set("1_0", state=state)
        (row,) = status.table(RunStore(world.runs), [item.exp_id], PATIENT_LOOK, saved)
        assert row.state == expected


def test_a_saved_row_names_its_failed_parent_only_while_it_is_failed(world: World, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(read_cache, "SETTLED_SECONDS", 0.0)
    parent = exp_id({"recipe": "toy"})
    of_child = {"recipe": "toy", "model": {"name": "experiment", "exp_id": parent, "checkpoint": "last"}}
    child = exp_id(of_child)
    for name, exp in ((parent, {"recipe": "toy"}), (child, of_child)):
        (world.runs / name).mkdir(parents=True)
        write_json(world.runs / name / "exp_dict.json", exp)
        write_json(world.runs / name / "status.json", {"state": "failed"})
    saved: status.RowCache = ReadCache(world.runs)
    for state in ("failed", "failed", "done"):
        write_json(world.runs / parent / "status.json", {"state": state})
        row = status.table(RunStore(world.runs), [parent, child], PATIENT_LOOK, saved)[1]
        assert (parent in row.reason) == (state == "failed")
