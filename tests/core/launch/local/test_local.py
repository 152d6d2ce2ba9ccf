"""Jobs on this machine: slots, devices, retries, logs, interruptions, and a scheduler that is killed. Real processes
throughout."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from src.errors import ConfigError, LaunchError, RunError
from src.experiments.config import load
from src.launch.command import STOPPED_EXIT, Processes
from src.launch.job import Job, SchedulerState
from src.launch.local import launcher
from src.launch.local.scheduler import _QUICK_SECONDS, _Entry, _Scheduler
from src.launch.local.state import Queue

ROOT = Path(__file__).resolve().parents[4]


class World:
    """A runs folder with submissions."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.submissions = folder / "submissions"

    def config(self, **values: Any) -> launcher.Config:
        return launcher.Config(**{"submissions": str(self.submissions), "grace_seconds": 300.0, **values})

    def job(self, name: str, code: str, **values: Any) -> Job:
        words = ("-c", textwrap.dedent(code), name)
        return Job(
            name, words, **{"cwd": self.folder, "run": self.folder / name, "log_dir": self.folder / "logs", **values}
        )

    def submit(self, config: launcher.Config, jobs: list[Job], name: str = "one") -> list[str]:
        folder = self.submissions / name
        folder.mkdir(parents=True)
        noted_ids: dict[str, str] = {}
        ids = config.submit(jobs, folder, noted_ids.update)
        assert noted_ids == dict(zip([job.exp_id for job in jobs], ids, strict=True))
        return ids

    def run(self, config: launcher.Config, jobs: list[Job], name: str = "one") -> dict[str, SchedulerState]:
        """Submit, wait for the end of all, and what is known of each, by experiment."""
        ids = self.submit(config, jobs, name)
        wait_until(lambda: all(seen.state not in ("queued", "running") for seen in config.states(ids).values()))
        states = config.states(ids)
        return {job.exp_id: states[job_id] for job, job_id in zip(jobs, ids, strict=True)}

    def out(self, name: str) -> str:
        return (self.folder / "logs" / f"{name}.out.log").read_text()

    def scheduler(self, name: str = "one") -> int:
        """Its process id."""
        command_line = f"local.scheduler\0{self.submissions / name}\0".encode()
        pids = [
            int(p.name) for p in Path("/proc").iterdir() if p.name.isdecimal() and command_line in read(p / "cmdline")
        ]
        assert len(pids) == 1
        return pids[0]


def read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def wait_until(condition: Callable[[], object], seconds: float = 300) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"waited {seconds} seconds in vain"
        time.sleep(0.02)


def is_gone(pid: int) -> bool:
    """True once the process has ended; a zombie that nobody has reaped yet has ended too."""
    stat = read(Path("/proc", str(pid), "stat"))
    return not stat or stat.rpartition(b")")[2].split()[0] == b"Z"


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    """Nothing of it is left running."""
    world = World(tmp_path)
    yield world
    for folder in world.submissions.glob("*"):
        if (folder / "queue.json").exists():
            jobs = Queue(folder).content["jobs"]
            world.config(grace_seconds=0.0).kill([f"{folder.name}.{index}" for index in range(len(jobs))])


def state_names(states_by_id: dict[str, SchedulerState]) -> dict[str, str]:
    return {name: seen.state for name, seen in states_by_id.items()}


def test_each_job_has_its_logs_and_its_folder(world: World):
    code = "import os, sys; print(os.getcwd()); print('warned', file=sys.stderr)"
    states = world.run(world.config(), [world.job("a", code), world.job("b", code, cwd=Path("/"))])
    assert state_names(states) == {"a": "completed", "b": "completed"}
    assert world.out("a") == f"{world.folder}\n"
    assert world.out("b") == "/\n"
    assert (world.folder / "logs" / "a.err.log").read_text() == "warned\n"
    assert world.run(world.config(), [world.job("a", "print('more')")], "two")["a"].seconds is not None
    assert world.out("a") == f"{world.folder}\nmore\n"


def test_a_job_is_no_rank_of_the_torchrun_around_the_launcher(world: World, monkeypatch: pytest.MonkeyPatch):
    for name in ("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_NAME", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE"):
        monkeypatch.setenv(name, "1")
    for name in ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "RANKED", "MY_RANK"):
        monkeypatch.setenv(name, "kept")
    code = (
        "import os; print(*sorted(n for n, "
        "v in os.environ.items() if v == 'kept' or 'RANK' in n or 'WORLD' in n or 'ROLE' in n))"
    )
    world.run(world.config(environment={"OTHER_RANK": "kept"}), [world.job("a", code)])
    assert world.out("a") == "MY_RANK OTHER_RANK RANKED\n"


def test_no_jobs_no_work(world: World):
    assert world.run(world.config(), []) == {}


def test_one_failure_does_not_stop_the_rest(world: World):
    jobs = [
        world.job("good", "print('done')"),
        world.job("bad", "raise SystemExit(3)"),
        world.job("worse", "import os; os.kill(os.getpid(), 9)"),
        world.job("late", "print('done')"),
        world.job("nowhere", "pass", cwd=world.folder / "missing"),
    ]
    states = world.run(world.config(slots=2), jobs)
    assert state_names(states) == {
        "good": "completed",
        "bad": "failed",
        "worse": "failed",
        "late": "completed",
        "nowhere": "failed",
    }
    assert re.fullmatch(r"exit code 3\. See .*/bad\.err\.log", states["bad"].reason)
    assert states["worse"].reason.startswith("exit code 137 (SIGKILL). See")
    assert re.match(r"could not be started: .*missing", states["nowhere"].reason)
    assert world.out("late") == "done\n"


MEET = """
    import sys, time
    from pathlib import Path
    me, room = sys.argv[1], Path("room")
    other = {"a": "b", "b": "a", "c": "d", "d": "c"}[me]
    def both(what):
        Path(f"{me}.{what}").touch()
        end = time.monotonic() + 300
        while not Path(f"{other}.{what}").exists() and time.monotonic() < end:
            time.sleep(0.01)
    (room / me).touch()
    both("here")
    time.sleep(0.2)  # a third would be here by now
    seen = len(list(room.iterdir()))
    both("counted")
    (room / me).unlink()
    print(seen)
"""


def test_as_many_run_at_a_time_as_there_are_slots_over_all_submissions(world: World):
    """With two slots two jobs can meet, each waiting for the other; no third may be there, of whichever submission."""
    (world.folder / "room").mkdir()
    config = world.config(slots=2)
    ids = world.submit(config, [world.job(n, MEET) for n in "ab"], "one")
    ids += world.submit(config, [world.job(n, MEET) for n in "cd"], "two")
    wait_until(lambda: {seen.state for seen in config.states(ids).values()} == {"completed"})
    assert [int(world.out(name)) for name in "abcd"] == [2, 2, 2, 2]


def test_one_slot_runs_in_the_order_given(world: World):
    code = "import sys; open('order', 'a').write(sys.argv[1])"
    world.run(world.config(), [world.job(n, code) for n in "dacb"])
    assert (world.folder / "order").read_text() == "dacb"


def test_each_job_has_devices_of_its_own(world: World):
    code = MEET.replace("print(seen)", "import os; print(os.environ['CUDA_VISIBLE_DEVICES'])")
    (world.folder / "room").mkdir()
    config = world.config(slots=2, gpus=[4, 5, "GPU-ab", 7], gpus_per_job=2)
    wide = config.model_copy(update={"gpus_per_job": 4})
    print_devices = "import os; print(os.environ['CUDA_VISIBLE_DEVICES'])"
    jobs = [world.job("a", code), world.job("b", code), world.job("wide", print_devices, resources=wide)]
    assert set(state_names(world.run(config, jobs)).values()) == {"completed"}
    assert {world.out("a"), world.out("b")} == {"4,5\n", "GPU-ab,7\n"}
    assert world.out("wide") == "4,5,GPU-ab,7\n"


def test_jobs_share_a_device_unless_one_has_it_exclusively(world: World):
    (world.folder / "room").mkdir()
    config = world.config(slots=4, gpus=[4], gpus_per_job=0.5)
    whole = config.model_copy(update={"gpus_per_job": 1})
    code = MEET.replace("print(seen)", "import os; print(seen, os.environ['CUDA_VISIBLE_DEVICES'])")
    alone = "import os; print(len(os.listdir('room')), os.environ['CUDA_VISIBLE_DEVICES'])"
    ids = world.submit(
        config, [world.job("a", code), world.job("b", code), world.job("whole", alone, resources=whole)], "one"
    )
    ids += world.submit(config, [world.job(n, code) for n in "cd"], "two")
    wait_until(lambda: {seen.state for seen in config.states(ids).values()} == {"completed"})
    assert [world.out(name) for name in "abcd"] == ["2 4\n"] * 4
    assert world.out("whole") == "0 4\n"


@pytest.mark.parametrize(("quick", "num_ended"), [(3, 3), (0, 6)])
def test_quick_failures_in_a_row_stop_the_queue(world: World, quick: int, num_ended: int):
    """All experiments of a group have the same mistake. A job that ends well in between shows that it is another's."""
    config = world.config(stop_after_failures=quick)
    jobs = [
        world.job("one", "raise SystemExit(1)"),
        world.job("well", "pass"),
        *(world.job(f"bad{n}", "1 / 0") for n in range(6)),
    ]
    states = world.run(config, jobs)
    assert [states[name].state for name in ("one", "well")] == ["failed", "completed"]
    rest = [states[f"bad{n}"] for n in range(6)]
    assert [seen.state for seen in rest] == ["failed"] * num_ended + ["cancelled"] * (6 - num_ended)
    if quick:
        assert (
            rest[-1].reason
            == "not started: 3 in a row failed within 60 s of their start. See why, then --job_option retry"
        )


def test_a_child_of_a_skipped_job_ends_once(world: World):
    """The failures of one round end jobs, whose children end in the same round."""
    bad = [world.job(f"bad{n}", "1 / 0") for n in range(4)]
    states = world.run(
        world.config(stop_after_failures=2, slots=2), [*bad, world.job("child", "pass", after=("bad3",))]
    )
    assert states["child"].state == "cancelled"
    assert states["child"].reason.startswith("not started: 2 in a row failed")
    assert all(seen.state in ("failed", "cancelled") for seen in states.values())
    wait_until(lambda: not Queue(world.submissions / "one").scheduler_is_alive())
    assert (world.submissions / "one" / "scheduler.log").read_text() == ""


def test_slow_failures_do_not_stop_the_queue():
    queue = SimpleNamespace(content={"scheduler": {"stop_after_failures": 1}}, write_end=lambda *_: None)
    for seconds, num_left in ((_QUICK_SECONDS, 1), (_QUICK_SECONDS - 1, 0)):
        scheduler = _Scheduler(queue, entries=[_Entry(0, {})])  # type: ignore[arg-type]
        scheduler._count_quick_failure(seconds)
        assert len(scheduler.entries) == num_left


def test_failed_jobs_are_retried_and_stopped_jobs_resume(world: World):
    """Exit code 75 is no failure: it does not use up the one retry that there is. 130 is a person's stop, after which
    nothing starts."""
    code = f"""
        import sys
        from pathlib import Path
        starts = Path("starts-" + sys.argv[1])
        starts.write_text(starts.read_text() + "x" if starts.exists() else "x")
        ends = {{
            "stops": [{STOPPED_EXIT}, {STOPPED_EXIT}, 1, {STOPPED_EXIT}, 0],
            "fails": [1, 2, 0], "mends": [1, 0], "person": [130, 0]
        }}
        raise SystemExit(ends[sys.argv[1]][len(starts.read_text()) - 1])
    """
    states = world.run(
        world.config(retries=1), [world.job(name, code) for name in ("stops", "fails", "mends", "person")]
    )
    assert state_names(states) == {"stops": "completed", "fails": "failed", "mends": "completed", "person": "cancelled"}
    assert {name: seen.restarts for name, seen in states.items()} == {"stops": 4, "fails": 1, "mends": 1, "person": 0}
    assert states["fails"].reason.startswith("exit code 2")


def test_a_child_waits_for_its_parent(world: World):
    """Three slots are free, yet the child starts only when the parent has written its file, and the orphan not at
    all."""
    late = "import time; time.sleep(0.3); open('weights', 'w').close()"
    jobs = [
        world.job("parent", late),
        world.job("bad", "raise SystemExit(1)"),
        world.job("child", "open('weights')", after=("parent", "done long ago")),
        world.job("orphan", "open('orphan', 'w')", after=("parent", "bad")),
        world.job("grandchild", "", after=("orphan",)),
        world.job("first", "", after=("second",)),
        world.job("second", ""),
    ]
    states = world.run(world.config(slots=3), jobs)
    end_times = {
        "parent": "completed",
        "bad": "failed",
        "child": "completed",
        "orphan": "cancelled",
        "grandchild": "cancelled",
    }
    assert state_names(states) == end_times | {"first": "completed", "second": "completed"}
    assert states["orphan"].reason == "not started, because bad did not complete"
    assert states["grandchild"].reason == "not started, because orphan did not complete"
    assert not (world.folder / "orphan").exists()


@pytest.mark.slow
def test_a_child_waits_for_a_job_of_an_earlier_submission(world: World):
    config = world.config(slots=2)
    hold = "import time\nfrom pathlib import Path\nwhile not Path('go').exists(): time.sleep(0.02)\n"
    parent = world.submit(config, [world.job("parent", hold), world.job("bad", hold + "raise SystemExit(1)")], "one")
    children = [
        world.job("child", "", after_jobs=(parent[0],)),
        world.job("orphan", "", after_jobs=(parent[1],)),
        world.job("lost", "", after_jobs=("no-such.0",)),
    ]
    ids = world.submit(config, children, "two")
    wait_until(lambda: config.states(ids)["two.2"].state == "cancelled")
    assert config.states(ids)["two.0"].state == "queued"
    (world.folder / "go").touch()
    wait_until(lambda: config.states(ids)["two.0"].state == "completed")
    wait_until(lambda: config.states(ids)["two.1"].state == "cancelled")
    assert config.states(ids)["two.1"].reason == "not started, because job one.1 did not complete"


@pytest.mark.parametrize("content", ["{", "[]", '{"jobs": [{}]}'])
def test_a_damaged_submission_ends_no_other(world: World, content: str):
    """Its children are told what is wrong; the others of their submission run."""
    parent = world.submit(world.config(), [world.job("parent", "import time\ntime.sleep(600)")], "one")
    queue = world.submissions / "one" / "queue.json"
    whole = queue.read_text()
    queue.write_text(content)
    states = world.run(
        world.config(slots=2), [world.job("child", "", after_jobs=tuple(parent)), world.job("other", "pass")], "two"
    )
    assert state_names(states) == {"child": "cancelled", "other": "completed"}
    assert states["child"].reason.startswith(f"not started, because the state of job one.0 is unknown: {queue}")
    assert "\n" not in states["child"].reason
    wait_until(lambda: not Queue(world.submissions / "two").scheduler_is_alive())
    assert (world.submissions / "two" / "scheduler.log").read_text() == ""
    queue.write_text(whole)


HOLD = """
    import os, signal, subprocess, sys, time
    from pathlib import Path
    def save(*_):
        # A second one would wait for the lock of helper.wait, which this one holds.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(0.3)
        Path(sys.argv[1] + ".saved").touch()
        helper.terminate(); helper.wait(); raise SystemExit(143)
    signal.signal(signal.SIGTERM, save)
    helper = subprocess.Popen(["sleep", "300"], start_new_session=True)  # as torchrun starts its ranks
    Path(sys.argv[1] + ".tmp").write_text(f"{os.getpid()} {helper.pid}")
    Path(sys.argv[1] + ".tmp").rename(sys.argv[1] + ".pids")
    while True:
        time.sleep(0.05)  # a signal that comes just before a long sleep would be heard after it
"""
DEAF = HOLD.replace("helper.terminate(); helper.wait(); raise SystemExit(143)", "")


def pids(world: World, name: str) -> list[int]:
    path = world.folder / f"{name}.pids"
    wait_until(path.exists)
    return [int(word) for word in path.read_text().split()]


def test_kill_lets_a_job_save_and_leaves_nothing_of_it(world: World):
    config = world.config(slots=2)
    ids = world.submit(config, [world.job(name, HOLD) for name in "abc"])
    processes = pids(world, "a") + pids(world, "b")
    config.kill([ids[0], ids[2]])
    states = config.states(ids)
    assert [states[i].state for i in ids] == ["cancelled", "running", "cancelled"]
    assert (world.folder / "a.saved").exists()
    assert not (world.folder / "c.pids").exists()
    assert all(map(is_gone, processes[:2]))
    assert not any(map(is_gone, processes[2:]))
    config.kill(ids)
    config.kill([*ids, "unheard-of.3", "one.99"])
    assert {seen.state for seen in config.states(ids).values()} == {"cancelled"}
    assert all(map(is_gone, processes))


@pytest.mark.slow
def test_a_deaf_job_is_killed_after_the_grace(world: World):
    config = world.config(grace_seconds=5)
    ids = world.submit(config, [world.job("a", DEAF)])
    processes = pids(world, "a")
    config.kill(ids)
    assert (world.folder / "a.saved").exists()
    assert all(map(is_gone, processes))


def test_processes_left_in_the_group_end_with_the_job(world: World):
    code = HOLD.replace("while True:", "if False:").replace(", start_new_session=True", "")
    assert state_names(world.run(world.config(), [world.job("a", code)])) == {"a": "completed"}
    wait_until(lambda: is_gone(pids(world, "a")[1]))


def test_a_scheduler_that_is_killed_leaves_no_orphans(world: World):
    """What ran is found, ends by itself or can be killed; what waited is told as never started."""
    config = world.config(slots=2)
    hold = "import time\nfrom pathlib import Path\nwhile not Path('go').exists(): time.sleep(0.02)\n"
    ids = world.submit(config, [world.job("a", hold), world.job("b", HOLD), world.job("c", "open('c', 'w')")])
    processes = pids(world, "b")
    wait_until(lambda: config.states(ids)[ids[0]].state == "running")
    os.kill(world.scheduler(), signal.SIGKILL)
    wait_until(lambda: config.states(ids)[ids[2]].state == "cancelled")
    states = config.states(ids)
    assert [states[i].state for i in ids] == ["running", "running", "cancelled"]
    assert states[ids[2]].reason == "its scheduler on this machine has ended; it was never started"
    assert state_names(world.run(world.config(slots=3), [world.job("d", "")], "two")) == {
        "d": "completed"
    }  # their two slots are still theirs
    config.kill([ids[1]])
    assert config.states(ids)[ids[1]].state == "cancelled"
    assert all(map(is_gone, processes))
    (world.folder / "go").touch()
    wait_until(lambda: config.states(ids)[ids[0]].state == "completed")
    assert not (world.folder / "c").exists()


def test_slots_of_living_jobs_stay_taken_when_their_scheduler_is_killed(world: World):
    config = world.config()
    ids = world.submit(config, [world.job("a", HOLD)])
    pids(world, "a")
    os.kill(world.scheduler(), signal.SIGKILL)
    later = world.submit(config, [world.job("b", "")], "two")
    time.sleep(0.5)  # long enough for a start, were the slot free
    assert config.states(later)["two.0"].state == "queued"
    config.kill(ids)
    wait_until(lambda: config.states(later)["two.0"].state == "completed")


def test_a_stopped_scheduler_stops_its_jobs(world: World):
    config = world.config()
    ids = world.submit(config, [world.job("a", HOLD), world.job("b", HOLD)])
    processes = pids(world, "a")
    os.kill(world.scheduler(), signal.SIGTERM)
    wait_until(lambda: {seen.state for seen in config.states(ids).values()} == {"cancelled"})
    assert (world.folder / "a.saved").exists()
    assert all(map(is_gone, processes))


def test_after_a_restart_of_the_machine_nothing_is_taken_for_alive(world: World):
    """The number of a process may be in use again: only with the same start, in the same boot, it is the job."""
    config = world.config()
    ids = world.submit(config, [world.job("a", HOLD)])
    pids(world, "a")
    os.kill(world.scheduler(), signal.SIGKILL)
    wait_until(lambda: not Queue(world.submissions / "one").scheduler_is_alive())
    file = world.submissions / "one" / "jobs" / "0.1.pid"
    original = file.read_text()
    pid, start, boot = original.split()
    for other in (f"{pid} {int(start) + 1} {boot}", f"{pid} {start} {boot[:-1]}x", "torn"):
        file.write_text(other)
        assert config.states(ids)[ids[0]].state == "failed"
    file.write_text(original)
    assert config.states(ids)[ids[0]].state == "running"


def test_after_a_crash_jobs_are_found_or_never_start(world: World):
    """The submitter died after the queue was written: the scheduler runs, has not begun, or was never started."""
    config = world.config()
    ids = world.submit(config, [world.job("a", HOLD), world.job("b", "")])
    assert config.find(world.submissions / "one", ["a", "b", "z"]) == {"a": ids[0], "b": ids[1]}
    config.kill(ids)
    assert config.find(world.submissions / "one", ["b"]) == {"b": ids[1]}
    late = world.submissions / "late"
    shutil.copytree(
        world.submissions / "one", late, ignore=shutil.ignore_patterns("started", "*.end", "*.pid", "*.code", "cancel")
    )
    assert config.find(late, ["a", "b"]) == {}
    done = subprocess.run(
        [sys.executable, "-m", "src.launch.local.scheduler", str(late)], cwd=ROOT, timeout=300, check=False
    )
    assert done.returncode == 1
    assert not list((late / "jobs").iterdir())
    assert config.find(world.submissions / "nothing", ["a"]) == {}


def test_a_scheduler_that_does_not_start_is_reported(world: World, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PYTHONHOME", "/nowhere")
    with pytest.raises(LaunchError, match=r"submissions/one: the scheduler of the launcher local did not start: .+"):
        world.submit(world.config(), [world.job("a", "open('a', 'w')")])
    monkeypatch.delenv("PYTHONHOME")
    assert world.config().find(world.submissions / "one", ["a"]) == {}


def test_a_folder_that_cannot_be_written(world: World):
    (world.folder / "logs").write_text("")
    with pytest.raises(RunError, match=r"cannot write: File exists"):
        world.submit(world.config(), [world.job("a", "")])


def test_jobs_of_another_machine_and_damaged_folders(world: World):
    config = world.config()
    ids = world.submit(config, [world.job("a", "")])
    others = world.submit(config, [world.job("b", "")], "two")
    assert config.states(["gone.0", *ids, "no id"]).keys() == {ids[0]}
    wait_until(lambda: {seen.state for seen in config.states([*ids, *others]).values()} == {"completed"})
    queue = world.submissions / "one" / "queue.json"
    content = queue.read_text()
    queue.write_text(json.dumps({**json.loads(content), "host": "elsewhere"}))
    assert "submissions/one: its jobs run on elsewhere" in config.states(ids)[ids[0]].reason
    with pytest.raises(LaunchError, match=r"submissions/one: its jobs run on elsewhere"):
        config.kill(ids)
    queue.write_text(content[:20])
    assert "queue.json:1: not valid JSON" in config.states(ids)[ids[0]].reason
    assert [seen.state for seen in config.states([*ids, *others]).values()] == ["unknown", "completed"]
    with pytest.raises(LaunchError, match=r"queue\.json:1: not valid JSON"):
        config.kill(ids)
    queue.write_text(content)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"slots": 0}, r"x\.slots: expected a number >= 1"),
        (
            {"gpus": [0], "gpus_per_job": 0.7},
            r"x: gpus_per_job: expected an integer, or 1/2, 1/3, 1/4, 1/6 or 1/12, got 0\.7",
        ),
        ({"gpus": [0, 1], "gpus_per_job": 1.5}, r"x: gpus_per_job: expected an integer above 1, got 1\.5"),
        ({"gpus": [0, 1], "gpus_per_job": 3}, r"x: gpus_per_job: 3, but gpus lists only 2\."),
        ({"gpus": [0, "0"]}, r"x: gpus: duplicate device in \[0, '0'\]"),
        ({"processes": {"starter": "torchrun", "nodes": 2}}, r"x: processes\.nodes: this machine is one node"),
    ],
)
def test_mistakes_in_the_config(values: dict, message: str):
    with pytest.raises(ConfigError, match=message):
        load(launcher.Config, values, "x")


def test_overrides_that_one_scheduler_cannot_follow(world: World):
    config = world.config()
    with pytest.raises(LaunchError, match=r"a: overrides cannot change slots of the launcher local"):
        world.submit(config, [world.job("a", "", resources=config.model_copy(update={"slots": 2}))])


def test_each_job_has_its_own_processes_and_environment(world: World):
    config = world.config(environment={"X": "own"}, processes=Processes(arguments=["-X", "utf8"]))
    code = "import os, sys; print(os.environ['X'], sys.flags.utf8_mode)"
    world.run(world.config(environment={"X": "all"}), [world.job("a", code), world.job("b", code, resources=config)])
    assert (world.out("a").split()[0], world.out("b")) == ("all", "own 1\n")


PARENT = """
    import json, signal, sys
    from pathlib import Path
    from src.launch.local import launcher as local
    from src.launch.job import Job
    here = Path(sys.argv[1])
    # A shell that runs the tests in the background has it ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    config = local.Config(slots=2, grace_seconds=float(sys.argv[3]), submissions=str(here / "submissions"))
    folder = here / "submissions" / "one"
    folder.mkdir(parents=True)
    jobs = [Job(n, (sys.argv[2], n), here, here / n, here / "logs") for n in "abc"]
    config.wait_for(config.submit(jobs, folder, lambda ids: None))
"""


def interrupt(world: World, child: str, number: signal.Signals, grace: float, twice: bool = False) -> int:
    """Start and wait in a process of its own, send it a signal once two jobs run, and give its exit code.

    `twice`: send it again once both jobs have heard of the first one.
    """
    script = world.folder / "child.py"
    script.write_text(textwrap.dedent(child))
    command = [sys.executable, "-c", textwrap.dedent(PARENT), world.folder, script, str(grace)]
    parent = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL)
    try:
        wait_until(lambda: all((world.folder / f"{n}.pids").exists() for n in "ab"))
        parent.send_signal(number)
        if twice:
            wait_until(lambda: all((world.folder / f"{n}.saved").exists() for n in "ab"))
            parent.send_signal(number)
        return parent.wait(timeout=300)
    finally:
        parent.kill()
        parent.wait()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGINT, -2)])
def test_interrupting_the_waiter_lets_jobs_save_and_end(world: World, number: signal.Signals, code: int):
    assert interrupt(world, HOLD, number, grace=300) == code
    assert (world.folder / "a.saved").exists()
    assert (world.folder / "b.saved").exists()
    assert not (world.folder / "c.pids").exists()
    assert all(map(is_gone, pids(world, "a") + pids(world, "b")))


def test_a_second_interruption_does_not_wait(world: World):
    assert interrupt(world, DEAF, signal.SIGTERM, grace=300, twice=True) == 143
    assert all(map(is_gone, pids(world, "a") + pids(world, "b")))


def test_waiting_reports_each_failure(world: World):
    config = world.config()
    before = signal.getsignal(signal.SIGTERM)
    ids = world.submit(
        config, [world.job("a", ""), world.job("b", "raise SystemExit(3)"), world.job("c", "", after=("b",))]
    )
    message = (
        r"^2 of 3 jobs did not complete:\nb: exit code 3\. See .*/b\.err\.log\.\nc: not started, because b did "
        r"not complete\.$"
    )
    with pytest.raises(LaunchError, match=message):
        config.wait_for(ids)
    assert signal.getsignal(signal.SIGTERM) is before


def test_detached_jobs_outlive_the_submitter(world: World):
    """The terminal goes away: its session is ended with SIGHUP, then killed."""
    code = (
        textwrap.dedent(PARENT).replace("slots=2", "slots=2, wait=False")
        + "\nimport time; print('ready', flush=True); time.sleep(300)"
    )
    script = world.folder / "child.py"
    script.write_text(textwrap.dedent(HOLD))
    command = [sys.executable, "-c", code, world.folder, script, "5"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, start_new_session=True) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"ready\n"
        processes = pids(world, "a")
        os.killpg(parent.pid, signal.SIGHUP)
        os.killpg(parent.pid, signal.SIGKILL)
    config = world.config(grace_seconds=5)
    assert config.states(["one.0"])["one.0"].state == "running"
    assert not any(map(is_gone, processes))
