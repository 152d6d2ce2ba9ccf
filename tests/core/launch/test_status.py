"""Submitting, looking, ending, repairing: scheduler and save directory together, and nothing twice. Real jobs on this
machine."""

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import job_configs
import trainval
from src.errors import ConfigError, LaunchError
from src.experiments import registry
from src.experiments.config import Places
from src.experiments.identity import exp_id
from src.experiments.interfaces import RecipeConfig
from src.files import write_json
from src.launch import actions, arguments, logs, resources, status, submissions, tracking
from src.launch.job import SchedulerState
from src.runs import lease
from src.runs.plan import PlannedExperiment
from src.runs.store import RunStore, SavedRun
from src.support import documents

ROOT = Path(__file__).resolve().parents[3]
# A program in the place of trainval.py: it does what its experiment says, once the file `go` is there.
PROGRAM = """
import json, os, signal, sys, time
from pathlib import Path
run = Path(sys.argv[1])
exp = json.loads((run / "exp_dict.json").read_text())
with open(run.parent / "started", "a") as file:
    file.write(run.name + "\\n")
def say(state, **facts):
    (run / "new").write_text(json.dumps({"state": state, "at": time.time(), **facts}, indent=4, sort_keys=True))
    (run / "new").rename(run / "status.json")
def stop(*_):
    say("stopped", reason="SIGTERM: stopped at step 1; start it again to continue")
    sys.exit(75)
signal.signal(signal.SIGTERM, stop)
if exp["does"] == "refuse":
    sys.exit("error: the data are not there")
print("begins", flush=True)
while exp.get("waits") and not (run.parent / "go").exists():
    time.sleep(0.02)
mended = (run.parent / "mended").exists()
if exp["does"] == "fail" and not mended:
    say("failed", reason="out of luck")
    sys.exit(1)
if exp["does"] == "forget" and not mended:
    sys.exit(0)
(run / "scores.jsonl").write_text('{"step": 3, "train_loss": 0.5}\\n')
say("done", step=3)
print("ends", flush=True)
"""


class NoRecipe(RecipeConfig):
    """Nothing to check, nothing to run."""

    def checks(self, places: Places) -> list[Callable[[], object]]:
        return []

    def run(self, run: Any) -> None:
        raise AssertionError


def make_item(does: str, name: str = "x", parent: str | None = None, **values: Any) -> PlannedExperiment:
    exp = {"does": does, "name_": name, "loop": {"steps": 3}, **values}
    if parent:
        exp["model"] = {"name": "experiment", "exp_id": parent}
    return PlannedExperiment(exp_id(exp), exp, NoRecipe(), ("g",), f"g[{name}]")


class World:
    """A project whose trainval.py is PROGRAM, and its runs."""

    def __init__(self, folder: Path) -> None:
        self.root, self.runs = folder / "project", folder / "runs"
        self.root.mkdir()
        (self.root / "trainval.py").write_text(PROGRAM)

    def resources_with(self, **values: Any) -> resources.Resources:
        return resources.load(
            "here", {"launcher": "local", "wait": False, "slots": 8, "grace_seconds": 10.0, **values}, self.runs
        )

    def request(
        self, items: Sequence[PlannedExperiment], selected_ids: set[str] | None = None, reset: int = 0
    ) -> actions.Request:
        ids = {item.exp_id for item in items} if selected_ids is None else selected_ids
        return actions.Request(
            self.runs, items, ids, self.root, lambda i: ["trainval.py", str(self.runs / i)], reset=reset
        )

    def run(self, items: Sequence[PlannedExperiment], option: str = "run", reset: int = 0, **values: Any) -> None:
        actions.run(self.request(items, reset=reset), self.resources_with(**values), option)

    def rows(self, items: Sequence[PlannedExperiment]) -> list[status.Row]:
        return status.table(RunStore(self.runs), [item.exp_id for item in items])

    def states(self, items: Sequence[PlannedExperiment]) -> list[str]:
        return [row.state for row in self.rows(items)]

    def final_states(self, items: Sequence[PlannedExperiment]) -> list[str]:
        wait_until(lambda: not {"queued", "running"} & set(self.states(items)))
        return self.states(items)

    def start_log(self) -> list[str]:
        return (self.runs / "started").read_text().split() if (self.runs / "started").exists() else []

    def go(self) -> None:
        (self.runs / "go").touch()

    def submissions(self) -> list[Path]:
        return sorted(path for path in (self.runs / "submissions").iterdir() if (path / "submission.json").exists())


def wait_until(condition: Callable[[], object], seconds: float = 300) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"waited {seconds} seconds in vain"
        time.sleep(0.02)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path)
    yield world
    world.runs.mkdir(exist_ok=True)
    ids = [path.name for path in world.runs.iterdir() if (path / "job_dict.json").exists()]
    with contextlib.suppress(LaunchError):
        actions.kill(world.runs, ids)


def test_the_life_of_a_group(world: World):
    """Queued, run, told of, failed, repaired; the same command again submits nothing."""
    items = [make_item("end"), make_item("fail"), make_item("forget"), make_item("end", "y")]
    assert world.states(items) == ["never"] * 4
    world.run(items)
    assert world.final_states(items) == ["done", "failed", "failed", "done"]
    rows = world.rows(items)
    assert (rows[0].step, rows[0].steps, rows[0].loss, rows[0].group) == (3, 3, 0.5, "g")
    assert rows[0].log == world.runs / "logs" / f"{items[0].exp_id}.err.log"
    assert rows[1].reason.startswith("out of luck (exit code 1. See ")
    assert rows[2].reason == "the scheduler reports COMPLETED, but the run is new, not done"
    before = world.start_log()
    for option in ("run", "run"):
        world.run(items, option)
    assert world.start_log() == before
    (world.runs / "mended").touch()
    world.run(items, "retry")
    assert world.final_states(items) == ["done"] * 4
    assert sorted(world.start_log()) == sorted([*before, *(item.exp_id for item in items[1:3])])
    world.run(items, "retry")
    assert len(world.submissions()) == 2
    assert len(list((world.runs / "snapshots").iterdir())) == 1


def test_live_jobs_are_skipped_killed_and_resumed(world: World):
    items = [make_item("end", waits=True), make_item("end", "y", waits=True), make_item("fail")]
    world.run(items, slots=1)
    wait_until(world.start_log)
    assert world.states(items) == ["running", "queued", "queued"]
    world.run(items, slots=1)
    world.run(items, "retry")
    assert len(world.submissions()) == 1
    actions.kill(world.runs, [item.exp_id for item in items[:2]])
    assert world.states(items)[:2] == ["stopped", "stopped"]
    assert "SIGTERM: stopped at step 1" in world.rows(items)[0].reason
    assert world.final_states(items) == ["stopped", "stopped", "failed"]
    actions.kill(world.runs, [item.exp_id for item in items])
    world.go()
    world.run(items)
    assert world.final_states(items) == ["done", "done", "failed"]


def test_reset_kills_and_starts_over(world: World):
    item = make_item("end", waits=True)
    world.run([item])
    wait_until(world.start_log)
    (world.runs / item.exp_id / "old").touch()
    world.run([item], "reset")
    wait_until(lambda: len(world.start_log()) == 2)
    assert world.states([item]) == ["running"]
    assert (world.runs / "deleted" / item.exp_id / "old").exists()
    assert not (world.runs / item.exp_id / "old").exists()
    world.go()
    assert world.final_states([item]) == ["done"]
    world.run([item], reset=1)
    assert world.final_states([item]) == ["done"]
    assert len(world.start_log()) == 3
    assert (world.runs / "deleted" / f"{item.exp_id}.1" / "scores.jsonl").exists()


def test_an_edit_while_jobs_wait_changes_none_of_them(world: World):
    first, second = make_item("end", waits=True), make_item("end", "y")
    world.run([first, second], slots=1)
    (world.root / "trainval.py").write_text("raise SystemExit('edited')")
    world.go()
    assert world.final_states([first, second]) == ["done", "done"]
    late = make_item("end", "late")
    world.run([late])
    assert world.final_states([late]) == ["failed"]
    assert "edited" in logs.tail(world.runs / "logs" / f"{late.exp_id}.err.log", 1)
    assert len(list((world.runs / "snapshots").iterdir())) == 2


@pytest.mark.slow
def test_children_wait_for_parents_of_this_and_of_earlier_submissions(world: World):
    parent = make_item("end", "parent", waits=True)
    child, grandchild = make_item("end", "child", parent.exp_id), make_item("end", "early", parent.exp_id)
    world.run([parent, grandchild])
    world.run([child])
    assert actions.pending_parents(world.runs, [child]) == {parent.exp_id}
    wait_until(lambda: world.states([parent]) == ["running"])
    assert world.states([child, grandchild]) == ["queued", "queued"]
    world.go()
    assert world.final_states([parent, child, grandchild]) == ["done"] * 3
    assert world.start_log()[0] == parent.exp_id


def test_a_failed_parent_is_named(world: World):
    parent = make_item("fail", "parent")
    child = make_item("end", "child", parent.exp_id)
    world.run([parent, child])
    assert world.final_states([parent, child]) == ["failed", "stopped"]
    assert f"not started, because {parent.exp_id} did not complete" in world.rows([child])[0].reason
    assert f"its parent {parent.exp_id} has failed" in world.rows([make_item("end", "child", parent.exp_id)])[0].reason
    message = (
        rf"^g\[child\]: it starts from experiment {parent.exp_id}, which is failed, not done \(out of "
        rf"luck.*Repair it first"
    )
    with pytest.raises(LaunchError, match=message):
        world.run([parent, child])
    assert len(world.submissions()) == 1


def test_an_interrupted_submission_is_cleared_up_first(world: World):
    """The submitter died between queueing and noting: the jobs are there, but nothing here says so."""
    items = [make_item("end", str(n), waits=True) for n in range(3)]
    world.run(items)
    (folder,) = world.submissions()
    (folder / "jobs.json").unlink()
    for item in items:
        (world.runs / item.exp_id / "job_dict.json").unlink()
    world.run(items)
    assert len(world.submissions()) == 1
    (folder / "jobs.json").write_text('{"jobs": {"torn')
    (world.runs / items[0].exp_id / "job_dict.json").unlink()
    wait_until(lambda: world.states(items) == ["running"] * 3)
    world.go()
    assert world.final_states(items) == ["done"] * 3
    assert sorted(world.start_log()) == sorted(item.exp_id for item in items)


def test_an_old_note_that_is_damaged_hides_no_later_job(world: World):
    item = make_item("end", waits=True)
    world.run([item])
    wait_until(world.start_log)
    actions.kill(world.runs, [item.exp_id])
    (first,) = world.submissions()
    world.run([item])
    last = max(world.submissions())
    assert last > first
    (first / "jobs.json").write_text('{"jobs": {"torn')
    wait_until(lambda: world.states([item]) == ["running"])
    assert SavedRun(world.runs / item.exp_id).job == {
        **SavedRun(world.runs / item.exp_id).job,
        "submission": last.name,
    }  # type: ignore[dict-item]
    world.run([item])
    assert len(world.submissions()) == 2
    world.go()
    assert world.final_states([item]) == ["done"]


def test_a_damaged_list_of_jobs_is_rewritten(world: World):
    """Also the jobs that their save directories still name: they may be removed tomorrow."""
    items = [make_item("end", str(n)) for n in range(2)]
    world.run(items)
    assert world.final_states(items) == ["done", "done"]
    (folder,) = world.submissions()
    before = json.loads((folder / "jobs.json").read_text())
    (folder / "jobs.json").write_text('{"jobs": {"torn')
    world.states(items)
    assert json.loads((folder / "jobs.json").read_text()) == before


def test_an_unclear_submission_blocks_only_its_experiments(world: World, caplog: pytest.LogCaptureFixture):
    one, other = make_item("end", "one"), make_item("end", "other")
    toolkit = {"launcher": "toolkit", "account": "$NOT_SET_HERE", "image": "a:b", "max_run_seconds": 600}
    world.run([])
    submissions.create(world.runs, toolkit, "there", "x", {one.exp_id: ["trainval.py"]})
    for _ in range(2):
        with pytest.raises(
            LaunchError, match=r"(?s)NOT_SET_HERE is not set.*nothing is submitted until its jobs are known"
        ):
            world.run([one])
    world.run([other])
    assert "was interrupted, and its jobs are unknown" in caplog.text
    assert world.final_states([other]) == ["done"]
    assert world.states([one]) == ["unknown"]
    with pytest.raises(LaunchError, match="NOT_SET_HERE is not set"):
        actions.kill(world.runs, [one.exp_id])
    actions.kill(world.runs, [other.exp_id])


def test_a_damaged_run_does_not_prevent_kills_of_the_rest(world: World):
    items = [make_item("end", str(n), waits=True) for n in range(4)]
    world.run(items[:3])
    wait_until(lambda: len(world.start_log()) == 3)
    (world.runs / items[0].exp_id / "job_dict.json").write_text("{")
    (world.runs / items[3].exp_id).mkdir()
    (world.runs / items[3].exp_id / "status.json").write_text("{")
    (world.runs / items[3].exp_id / "job_dict.json").write_text("{")
    damaged_folder = world.runs / "submissions" / "20260101-000000-00000000"
    damaged_folder.mkdir()
    (damaged_folder / "submission.json").write_text("{")
    with pytest.raises(LaunchError, match=rf"{items[3].exp_id}/job_dict\.json:1: not valid JSON.* Delete it once"):
        actions.kill(world.runs, [item.exp_id for item in items])
    assert world.states(items[1:3]) == ["stopped", "stopped"]
    assert world.states([items[0]]) == ["unknown"], "its job has ended, too"
    (world.runs / items[0].exp_id / "job_dict.json").unlink()
    assert world.states([items[0]]) == ["stopped"]
    with pytest.raises(
        LaunchError, match=r"(?s)submission\.json:1: not valid JSON.*find its jobs by hand.*move the folder away"
    ):
        world.run(items[1:3])
    damaged_folder.rename(world.runs / "put aside")
    world.go()
    world.run(items[1:3])
    assert world.final_states(items[1:3]) == ["done", "done"]


def test_a_submission_that_queued_nothing_is_made_again(world: World):
    """The submitter died after it wrote what it wanted to submit."""
    item = make_item("end")
    world.run([])
    resources_with = world.resources_with()
    submissions.create(
        world.runs,
        registry.resolved_dict(resources_with.launcher, key="launcher"),
        "here",
        "x",
        {item.exp_id: ["trainval.py"]},
    )
    (world.runs / "submissions" / "20260101-000000-00000000").mkdir()
    world.run([item])
    assert world.final_states([item]) == ["done"]
    assert submissions.interrupted_names(world.runs) == ["20260101-000000-00000000"]


SUBMIT = """
    import sys
    from pathlib import Path
    from tests.core.launch.test_status import World, make_item
    world = World.__new__(World)
    world.root, world.runs = Path(sys.argv[1]), Path(sys.argv[2])
    world.run([make_item("end", str(n)) for n in range(5)])
"""


def test_two_submitters_at_once_submit_once(world: World):
    items = [make_item("end", str(n)) for n in range(5)]
    command = [sys.executable, "-c", textwrap.dedent(SUBMIT), str(world.root), str(world.runs)]
    both = [subprocess.Popen(command, cwd=ROOT) for _ in range(2)]
    assert [one.wait(timeout=300) for one in both] == [0, 0]
    assert world.final_states(items) == ["done"] * 5
    assert sorted(world.start_log()) == sorted(item.exp_id for item in items)
    assert len(world.submissions()) == 1


@pytest.mark.slow
def test_a_submitter_killed_at_any_moment_leaves_no_duplicates_and_no_orphans(world: World):
    items = [make_item("end", str(n)) for n in range(5)]
    command = [sys.executable, "-c", textwrap.dedent(SUBMIT), str(world.root), str(world.runs)]
    for delay in [0.2 + 0.05 * n for n in range(12)]:
        one = subprocess.Popen(command, cwd=ROOT, start_new_session=True)
        time.sleep(delay)
        os.killpg(one.pid, signal.SIGKILL)
        one.wait()
    world.run(items)
    assert world.final_states(items) == ["done"] * 5
    assert sorted(world.start_log()) == sorted(item.exp_id for item in items)


def test_a_lock_that_is_held_too_long(world: World):
    message = r"another submission has held the lock for 0\.1 s"
    with (
        submissions.lock(world.runs),
        pytest.raises(LaunchError, match=message),
        submissions.lock(world.runs, wait_seconds=0.1),
    ):
        pass


def test_an_unreachable_scheduler_makes_no_run_failed(world: World):
    item = make_item("end", waits=True)
    world.run([item])
    wait_until(lambda: world.states([item]) == ["running"])
    queue = world.submissions()[0] / "queue.json"
    content = queue.read_text()
    queue.write_text(json.dumps({**json.loads(content), "host": "elsewhere"}))
    (row,) = world.rows([item])
    assert row.state == "unknown"
    assert "its jobs run on elsewhere" in row.reason
    for option in ("run", "retry"):
        world.run([item], option)
    assert len(world.submissions()) == 1
    with pytest.raises(LaunchError, match="its jobs run on elsewhere"):
        actions.kill(world.runs, [item.exp_id])
    queue.write_text(content)
    world.go()
    assert world.final_states([item]) == ["done"]


@pytest.mark.parametrize(
    ("damage", "doubt"),
    [('{"host": "elsewhere", "jobs": [{}, {}]}', "its jobs run on elsewhere"), ("{", "not valid JSON")],
)
def test_an_unreadable_queue_makes_only_its_jobs_doubtful(world: World, damage: str, doubt: str):
    lost_item, gone_item, other = (
        make_item("end", "lost", waits=True),
        make_item("end", "gone", waits=True),
        make_item("end", "other", waits=True),
    )
    done = make_item("end", "done")
    world.run([done, lost_item])
    world.run([gone_item])
    world.run([other])
    wait_until(lambda: world.states([lost_item, gone_item, other, done]) == ["running"] * 3 + ["done"])
    queues = [folder / "queue.json" for folder in world.submissions()[:2]]
    sound = [queue.read_text() for queue in queues]
    for queue in queues:
        queue.write_text(damage)
    (world.runs / gone_item.exp_id).rename(world.runs / "moved")
    assert world.states([lost_item, gone_item, other]) == ["unknown", "unknown", "running"]
    assert doubt in world.rows([lost_item])[0].reason
    world.run([lost_item, gone_item, other])
    assert len(world.submissions()) == 3, "nothing is submitted twice"
    with pytest.raises(LaunchError, match=doubt):
        actions.kill(world.runs, [lost_item.exp_id, other.exp_id])
    assert world.states([other]) == ["stopped"], "what can be killed is"
    actions.kill(world.runs, [done.exp_id])
    for queue, text in zip(queues, sound, strict=True):
        queue.write_text(text)


def test_damaged_files_are_named_and_hurt_nobody_else(world: World):
    items = [make_item("end", str(n)) for n in range(6)]
    world.run(items)
    assert world.final_states(items) == ["done"] * 6
    runs = [world.runs / item.exp_id for item in items]
    (runs[0] / "status.json").write_text('{"state": ')
    (runs[1] / "job_dict.json").write_text("[]")
    (runs[1] / "status.json").unlink()
    (runs[2] / "scores.jsonl").write_text("garbage\n")
    (runs[3] / "exp_dict.json").write_text("{")
    (runs[3] / "status.json").unlink()
    for path in sorted(runs[4].rglob("*"), reverse=True):
        path.unlink() if path.is_file() else path.rmdir()
    runs[4].rmdir()
    wait_until(
        lambda: world.states(items) == ["unknown", "unknown", "done", "unknown", "never", "done"]
    )  # the processes are gone, too
    rows = world.rows(items)
    for row, name in zip(rows, ("status.json", "job_dict.json", "scores.jsonl", "exp_dict.json"), strict=False):
        assert f"{row.exp_id}/{name}" in row.reason
    lines = status.format_table(rows)
    assert len(lines) == 7
    assert lines[0].split()[:3] == ["id", "group", "state"]
    assert "beat" not in lines[0], "no process is alive, and a column without a word is left out"
    (world.submissions()[0] / "submission.json").write_text("{}")
    (runs[5] / "status.json").unlink()
    assert "submission.json" in world.rows(items)[5].reason


def test_long_differences_are_shortened_in_the_table_only():
    row = status.Row("1" * 32, "g", "failed", "no such data set", "", None, 1, None, None, None, None, None, None)
    text = ", ".join(f"loop.setting_{number}={number}" for number in range(40))
    _, line = status.format_table([row], {row.exp_id: text})
    assert line.endswith(f"  {text[:77]}...  no such data set")
    assert status.to_dicts([row], {row.exp_id: text})[0]["differs"] == text
    _, line = status.format_table([row], {row.exp_id: text[:80]})
    assert line.endswith(f"  {text[:80]}  no such data set")


def test_a_run_directory_removed_under_a_living_job(world: World):
    item = make_item("end", waits=True)
    world.run([item])
    wait_until(world.start_log)
    run = world.runs / item.exp_id
    run.rename(world.runs / "elsewhere")
    assert world.states([item]) == ["running"]
    world.run([item])
    assert len(world.submissions()) == 1
    actions.kill(world.runs, [item.exp_id])
    assert world.states([item]) == ["never"]
    world.run([item])
    world.go()
    assert world.final_states([item]) == ["done"]


def scheduler_state(state: str, word: str = "", reason: str = "") -> SchedulerState:
    return SchedulerState(state, word, reason)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("run_state", "queue_state", "expected"),
    [
        ("done", scheduler_state("running"), ("done", "")),
        ("done", scheduler_state("failed", "NODE_FAIL"), ("done", "")),
        ("new", scheduler_state("queued", "PENDING", "Priority"), ("queued", "Priority")),
        ("stopped", scheduler_state("queued", "REQUEUED"), ("queued", "")),
        ("lost", scheduler_state("running"), ("running", "")),
        (
            "running",
            scheduler_state("completed", "COMPLETED"),
            ("failed", "the scheduler reports COMPLETED, but the run is running, not done"),
        ),
        ("lost", scheduler_state("failed", "NODE_FAIL", "node3 died"), ("failed", "NODE_FAIL: node3 died")),
        ("failed", scheduler_state("failed", "FAILED", "exit code 1"), ("failed", "it broke (exit code 1)")),
        ("lost", scheduler_state("cancelled", "CANCELLED"), ("stopped", "")),
        ("lost", scheduler_state("unknown", "?", "cannot say"), ("unknown", "cannot say")),
        ("new", None, ("lost", "submitted as job 7, which the scheduler no longer knows")),
        ("lost", None, ("lost", "job 7 is no longer known to the scheduler, and its process is gone")),
        ("failed", None, ("failed", "it broke")),
    ],
)
def test_scheduler_and_directory_together(
    tmp_path: Path, run_state: str, queue_state: SchedulerState | None, expected: tuple[str, str]
):
    run = saved(tmp_path, run_state, "it broke" if run_state == "failed" else "")
    assert status._resolve_state(run, tracking.TrackedJob("7", "s", None, queue_state)) == expected


def saved(path: Path, state: str, reason: str = "") -> SavedRun:
    """A run that was found in this state."""
    run = SavedRun(path)
    run.state, run.status = state, {"state": state, "reason": reason}
    return run


def test_without_a_job_the_directory_speaks(tmp_path: Path):
    assert status._resolve_state(saved(tmp_path, "new"), None) == ("never", "")
    assert status._resolve_state(saved(tmp_path, "lost"), None) == ("lost", "")
    assert status._resolve_state(saved(tmp_path, "failed", "r"), None) == ("failed", "r")


@pytest.mark.parametrize(("age", "state"), [(5.0, "running"), (-3600.0, "running"), (900.0, "lost")])
def test_a_forgotten_job_on_another_machine_counts_as_running_while_it_beats(tmp_path: Path, age: float, state: str):
    """A clock that was set back makes no heartbeat younger than new."""
    write_json(tmp_path / "lease", {**lease.this_process(), "boot_id": "another", "host": "far", "beat": 3})
    then = time.time() - age
    os.utime(tmp_path / "lease", (then, then))
    beat = lease.holder_of(tmp_path).seconds
    assert beat is not None
    assert max(0.0, age) <= beat < max(0.0, age) + 5
    assert status._resolve_state(saved(tmp_path, "running"), tracking.TrackedJob("7", "s", None, None))[0] == state


def test_a_training_by_hand_is_seen_though_its_old_job_failed(tmp_path: Path):
    write_json(tmp_path / "lease", {**lease.this_process(), "beat": 3})
    job = tracking.TrackedJob("7", "s", None, scheduler_state("failed", "FAILED"))
    assert status._resolve_state(saved(tmp_path, "running"), job) == ("running", "")


@pytest.mark.slow
def test_logs_are_followed_to_the_end(world: World, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO)
    items = [make_item("end", waits=True), make_item("end", "y", waits=True)]
    world.run(items)
    wait_until(lambda: len(world.start_log()) == 2)
    wait_until(lambda: all((world.runs / "logs" / f"{item.exp_id}.out.log").read_text() for item in items))
    lines: list[str] = []
    for line in logs.follow(world.runs, [item.exp_id for item in items], sleep=lambda seconds: time.sleep(0.05)):
        lines.append(line)
        if len(lines) == 2:
            world.go()
    assert sorted(lines) == sorted(f"{item.exp_id[:8]} {word}" for item in items for word in ("begins", "ends"))
    assert list(logs.follow(world.runs, [items[0].exp_id])) == ["begins", "ends"]
    assert "no output" not in caplog.text
    assert list(logs.follow(world.runs, ["0" * 32])) == []
    assert f"{'0' * 32}: no output; its state is never" in caplog.text


def look(world: World, items: Sequence[PlannedExperiment], *words: str) -> int:
    with documents.scope():
        args = arguments.parse(["-e", "g", "--job_option", "status", *words], "", ROOT)
        arguments.check(args, 1)
        return trainval.look(args, items, Places(world.runs, world.runs, {}))


def test_the_status_as_json_of_some_states_and_again(
    world: World, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """--watch ends when nothing is alive."""
    items = [make_item("end", waits=True, size=1), make_item("end", "y", waits=True, size=2), make_item("fail", "z")]
    world.run(items)
    wait_until(lambda: world.states(items) == ["running", "running", "failed"])

    def sleep(seconds: float) -> None:
        assert seconds == 7
        world.go()
        world.final_states(items)

    monkeypatch.setattr(trainval, "time", SimpleNamespace(sleep=sleep))
    assert look(world, items, "--json", "--state", "failed", "done", "--watch", "7") == 0
    first, end = json.JSONDecoder().raw_decode(out := capsys.readouterr().out)
    first, second = first["experiments"], json.loads(out[end:])["experiments"]
    assert [(row["exp_id"], row["state"]) for row in first] == [(items[2].exp_id, "failed")]
    assert [row["state"] for row in second] == ["done", "done", "failed"]
    assert "size=2" in second[1]["differs"]
    assert second[0]["log"] == f"{world.runs}/logs/{items[0].exp_id}.err.log"
    look(world, items, "--state", "failed")
    assert capsys.readouterr().out.splitlines()[-1] == "1 experiment: 1 failed"
    for words in (["--state", "done"], ["--watch"]):
        with pytest.raises(ConfigError, match="only for --job_option status"):
            arguments.check(arguments.make_parser("", ROOT).parse_args(["-e", "g", *words]), 1)


def test_a_watch_continues_while_a_job_is_unknown(
    world: World, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """But not for what is damaged and has no job, which nobody will ever know more of."""
    item, damaged_item = make_item("end", waits=True), make_item("end", "damaged")
    (world.runs / damaged_item.exp_id).mkdir(parents=True)
    (world.runs / damaged_item.exp_id / "status.json").write_text("{")
    world.run([item])
    wait_until(lambda: world.states([item]) == ["running"])
    queue = world.submissions()[0] / "queue.json"
    content = queue.read_text()
    queue.write_text("{")
    sleeps: list[float] = []

    def sleep(seconds: float) -> None:
        assert not sleeps, "it ends"
        sleeps.append(seconds)
        queue.write_text(content)
        world.go()
        world.final_states([item])

    monkeypatch.setattr(trainval, "time", SimpleNamespace(sleep=sleep))
    assert look(world, [item, damaged_item], "--watch") == 0
    assert sleeps == [30]
    queue_state = [line for line in capsys.readouterr().out.splitlines() if line.startswith("2 experiments")]
    assert queue_state == ["2 experiments: 2 unknown", "2 experiments: 1 done, 1 unknown"]


@pytest.mark.slow
def test_a_line_written_while_the_last_ones_are_shown_is_shown_once(world: World):
    item = make_item("end", waits=True)
    world.run([item])
    wait_until(world.start_log)
    log = world.runs / "logs" / f"{item.exp_id}.out.log"
    wait_until(lambda: log.read_text() == "begins\n")
    lines = logs.follow(world.runs, [item.exp_id], sleep=lambda seconds: time.sleep(0.05))
    shown_lines = [next(lines)]
    with open(log, "a") as file:
        file.write("in between\n")
    world.go()
    assert [*shown_lines, *lines] == ["begins", "in between", "ends"]
    assert logs.tail(log, 2, end=len("begins\nin between\n")) == "begins\nin between"


def test_logs_are_followed_while_the_scheduler_does_not_answer(world: World, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(logs, "STATES_SECONDS", 0.0)
    item = make_item("end", waits=True)
    world.run([item])
    wait_until(lambda: world.states([item]) == ["running"])
    queue = world.submissions()[0] / "queue.json"
    content = queue.read_text()
    looks: list[float] = []

    def sleep(seconds: float) -> None:
        looks.append(seconds)
        if len(looks) == 1:
            queue.write_text(json.dumps({**json.loads(content), "host": "elsewhere"}))
        if len(looks) == 3:
            assert world.states([item]) == ["unknown"]
            queue.write_text(content)
            world.go()
        time.sleep(0.05)

    assert list(logs.follow(world.runs, [item.exp_id], sleep=sleep)) == ["begins", "ends"]


def test_the_tail_of_a_long_log(tmp_path: Path):
    log = tmp_path / "log"
    log.write_text("".join(f"line {n} é\n" for n in range(30_000)))
    assert logs.tail(log, 2) == "line 29998 é\nline 29999 é"
    assert len(logs.tail(log, 20_000).splitlines()) == 20_000
    assert logs.tail(log, 10**6).startswith("line 0 é\n")
    assert logs.tail(log, 0) == logs.tail(tmp_path / "missing", 3) == ""


def test_overrides_give_single_experiments_other_resources(world: World):
    overrides = [
        {"where": "size > 4", "retries": 1, "processes": {"arguments": ["-u"]}},
        {"where": "does == 'end' and size >= 8", "retries": 2},
    ]
    resources_with = world.resources_with(overrides=overrides, processes={"stop_seconds": 7})
    configs = [resources_with.config_for(make_item("end", size=size).exp) for size in (1, 5, 8)]
    assert configs[0] is None
    assert [(c.retries, c.processes.arguments, c.processes.stop_seconds) for c in configs[1:]] == [
        (1, ["-u"], 7),
        (2, ["-u"], 7),
    ]  # type: ignore[union-attr]
    item = make_item("end", size=5)
    world.run([item], overrides=overrides)
    assert world.final_states([item]) == ["done"]
    content = json.loads((world.submissions()[0] / "queue.json").read_text())
    assert [job["retries"] for job in content["jobs"]] == [1]


HERE = r"JOB_CONFIGS\['here'\]"


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (
            {"overrides": [{"where": "size > 4", "retris": 1}]},
            HERE + r"\.overrides\[0\]: unknown key 'retris'\. Did you mean 'retries'\?",
        ),
        (
            {"overrides": [{"where": "size > 4", "slots": "two"}]},
            HERE + r"\.overrides\[0\]\.slots: expected int, got 'two'",
        ),
        ({"overrides": [{"where": "size >", "slots": 2}]}, HERE + r"\.overrides\[0\]\.where: "),
        ({"overrides": [{"retries": 2}]}, HERE + r"\.overrides\[0\]: expected a dict with 'where'"),
        ({"overrides": [{"where": "size > 4"}]}, HERE + r"\.overrides\[0\]: changes nothing"),
        ({"overrides": {"where": "size > 4"}}, HERE + r"\.overrides: expected a list"),
        (
            {"overrides": [{"where": "size > 4", "launcher": "slurm"}]},
            HERE + r"\.overrides\[0\]\.launcher: is the same for all jobs",
        ),
        ({"submissions": "x"}, HERE + r"\.submissions: filled in when jobs are submitted"),
        ({"sltos": 1}, HERE + r": unknown key 'sltos'\. Did you mean 'slots'\?"),
    ],
)
def test_mistakes_in_a_job_config(world: World, raw: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        world.resources_with(**raw)


def test_an_override_with_an_unknown_name(world: World, monkeypatch: pytest.MonkeyPatch):
    entry = {"launcher": "local", "overrides": [{"where": "loop.step > 4", "retries": 1}]}
    monkeypatch.setattr(job_configs, "JOB_CONFIGS", {"here": entry})
    message = HERE + r"\.overrides\[0\]\.where: unknown name 'loop\.step'\. Did you mean 'loop\.steps'\?"
    with pytest.raises(ConfigError, match=message):
        resources.load_named("here", world.runs, [make_item("end").exp])


def test_the_environment_of_the_jobs_comes_from_env_path(world: World, tmp_path: Path):
    raw = {"launcher": "local", "processes": {"stop_seconds": 9}}
    config = resources.load("x", raw, tmp_path, "/envs/p2").launcher
    assert (config.processes.env_path, config.processes.stop_seconds) == ("/envs/p2", 9)  # type: ignore[attr-defined]
    run_state = {"launcher": "local", "processes": {"env_path": "/own"}}
    assert resources.load("x", run_state, tmp_path, "/envs/p2").launcher.processes.env_path == "/own"  # type: ignore[attr-defined]


def test_the_variables_of_jobs_are_in_no_readable_file(world: World):
    """Others need the log of submissions, to submit nothing twice; one of an older version may hold what is refused
    today."""
    item = make_item("end")
    world.run([item], environment={"COLOUR": "mauve"})
    assert world.final_states([item]) == ["done"]
    (folder,) = world.submissions()
    readable = [path for path in folder.rglob("*") if path.is_file() and path.stat().st_mode & 0o077]
    assert {"submission.json", "jobs.json"} <= {path.name for path in readable}
    assert not any("mauve" in path.read_text() for path in readable)
    (world.runs / item.exp_id / "status.json").unlink()
    intent = json.loads((folder / "submission.json").read_text())
    write_json(
        folder / "submission.json", intent | {"launcher": intent["launcher"] | {"environment": {"HF_TOKEN": "xyzzy"}}}
    )
    wait_until(lambda: world.rows([item])[0].reason.startswith("the scheduler reports COMPLETED"))


def test_the_job_is_noted_for_haven_too(world: World):
    item = make_item("end")
    world.run([item])
    job = json.loads((world.runs / item.exp_id / "job_dict.json").read_text())
    assert job == {
        "job_id": f"{world.submissions()[0].name}.0",
        "command": f"trainval.py {world.runs / item.exp_id}",
        "submission": world.submissions()[0].name,
    }
    assert SavedRun(world.runs / item.exp_id).job == job
    intent = json.loads((world.submissions()[0] / "submission.json").read_text())
    assert intent["launcher"]["launcher"] == "local"
    assert (intent["job_config"], intent["experiments"]) == ("here", [item.exp_id])
    assert (world.runs / "snapshots" / intent["snapshot"] / "trainval.py").exists()
