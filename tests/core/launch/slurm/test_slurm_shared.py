"""Several experiments in one task of Slurm: each ends, fails, is killed and is repaired by itself."""

import signal
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from src.errors import ConfigError, LaunchError
from src.experiments.config import load
from src.launch import actions, resources
from src.launch.job import Job
from src.launch.slurm import launcher, script, shared_tasks
from src.runs.plan import PlannedExperiment
from tests.core.launch.fakes.fake_slurm.cluster import Cluster, job, submit
from tests.core.launch.local.test_local import is_gone
from tests.core.launch.slurm.test_slurm import option
from tests.core.launch.test_status import World, make_item, wait_until

# Ends as the file OUTCOME says, once it is there; stops in order when it is told to.
STOPPABLE = """
import os, signal, sys, time
name = sys.argv[1]
open("started", "a").write(name)
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
while not os.path.exists(name):
    time.sleep(0.02)
sys.exit(int(open(name).read()))
"""


@pytest.fixture
def config(folder: Path) -> launcher.Config:
    return launcher.Config(patience_seconds=300.0, jobs_per_task=2, submissions=str(folder.parent))


@pytest.fixture
def start(cluster: Cluster, folder: Path, config: launcher.Config) -> Callable[[], list[str]]:
    """Submit a and b, start their task, and return their ids once both run."""

    def start() -> list[str]:
        ids, _ = submit(
            [Job(name, ("-c", STOPPABLE, name), folder, folder / name, folder / "logs") for name in "ab"],
            folder,
            config,
        )
        cluster.start("1_0")
        wait_until(lambda: sorted(start_log(folder)) == ["a", "b"])
        return ids

    return start


def start_log(folder: Path) -> str:
    return (folder / "started").read_text() if (folder / "started").exists() else ""


def end(folder: Path, name: str, code: int) -> None:
    (folder / "new").write_text(str(code))
    (folder / "new").rename(folder / name)


def code_write_times(submissions: Path) -> dict[str, int]:
    """When the exit code of each experiment that has ended was written."""
    return {
        path.name.removesuffix(".code"): path.stat().st_mtime_ns
        for path in (submissions / "shared_tasks").glob("*.code")
    }


def states(config: launcher.Config, cluster: Cluster, ids: list[str]) -> list[str]:
    cluster.reap()
    result = config.states(ids)
    return [f"{result[job_id].state} {result[job_id].reason}".strip() for job_id in ids]


def test_parents_do_not_share_a_task(cluster: Cluster, folder: Path, config: launcher.Config):
    """Those with equal resources and parents, but nobody that another waits for."""
    jobs = [
        job(folder, "p"),
        *(job(folder, f"c{n}", after=("p",)) for n in range(5)),
        *(job(folder, f"x{n}") for n in range(2)),
    ]
    ids, _ = submit(jobs, folder, config)
    shared = ["2_0+0of2", "2_0+1of2", "2_1+0of2", "2_1+1of2", "2_2+0of1", "3_0+0of2", "3_0+1of2"]
    assert ids == ["1_0", *(f"{job_id}.{folder.name}" for job_id in shared)]
    assert [(option(call, "array"), option(call, "dependency")) for call in cluster.calls("sbatch")] == [
        ("0-0", None),
        ("0-2", "afterok:1_0"),
        ("0-0", None),
    ]
    assert config.find(folder, [one.exp_id for one in jobs]) == dict(
        zip([one.exp_id for one in jobs], ids, strict=True)
    )


def test_impossible_shares_are_refused(cluster: Cluster, folder: Path, config: launcher.Config):
    with pytest.raises(
        LaunchError, match=r"e: it starts from the experiment of job 1_0\+0of2, which shares a Slurm task"
    ):
        submit([job(folder, "e", after_jobs=("1_0+0of2",))], folder, config)
    assert not cluster.calls("sbatch")
    with pytest.raises(LaunchError, match=r"job 1_0\+0of2: it shares its task, and Slurm can only hold complete tasks"):
        config.hold(["1_0+0of2"])
    with pytest.raises(ConfigError, match=r"jobs_per_task: 2 experiments cannot share a task of 3 nodes\. Write 1"):
        load(launcher.Config, {"jobs_per_task": 2, "processes": {"starter": "torchrun", "nodes": 3}}, "here")


def test_each_experiment_ends_by_itself(
    cluster: Cluster, folder: Path, config: launcher.Config, start: Callable[[], list[str]]
):
    ids = start()
    assert states(config, cluster, ids) == ["running", "running"]
    end(folder, "b", 3)
    wait_until(lambda: code_write_times(folder.parent))
    assert states(config, cluster, ids) == ["running", "failed exit code 3"]
    end(folder, "a", 0)
    wait_until(lambda: states(config, cluster, ids) == ["completed", "failed exit code 3"])
    wait_until(lambda: cluster.reap() or cluster.task("1_0")["exit"] == "3:0")


@pytest.mark.parametrize(("code", "again"), [(0, "b"), (3, "b")])
def test_a_requeue_restarts_unfinished_experiments(
    cluster: Cluster, folder: Path, config: launcher.Config, start: Callable[[], list[str]], code: int, again: str
):
    """The time limit stops what still runs, and its task is queued once."""
    ids = start()
    end(folder, "a", code)
    wait_until(lambda: states(config, cluster, ids)[0] != "running")
    task = cluster.batch_processes["1_0"]
    task.send_signal(signal.SIGUSR1)
    assert task.wait(300) == 0
    assert cluster.calls("scontrol")[-1:] == [["scontrol", "requeue", "1_0"]]
    assert len(cluster.calls("scontrol")) == 2, "one of them was for the largest array"
    cluster.set("1_0", state="PENDING", reason="BeginTime")
    state = states(config, cluster, ids)[0]
    assert states(config, cluster, ids) == [state, "queued BeginTime"]
    before = len(start_log(folder))
    end(folder, "b", 0)
    task = cluster.start("1_0")
    assert task.wait(300) == code
    assert start_log(folder)[before:] == again
    assert states(config, cluster, ids) == [state, "completed"]


def test_a_stop_outweighs_a_failure(
    cluster: Cluster, folder: Path, config: launcher.Config, start: Callable[[], list[str]]
):
    """What Slurm preempts it queues again by itself; the code says that something is left to do."""
    ids = start()
    end(folder, "a", 75)
    end(folder, "b", 3)
    assert cluster.batch_processes["1_0"].wait(300) == 75
    assert not [call for call in cluster.calls("scontrol") if call[1] == "requeue"]
    assert states(config, cluster, ids) == ["failed exit code 75", "failed exit code 3"]
    (folder / "a").unlink()
    end(folder, "a", 0)
    cluster.start("1_0").wait(300)
    assert start_log(folder)[2:] == "a"


@pytest.mark.slow
def test_a_killed_experiment_does_not_come_back_with_its_neighbour(
    cluster: Cluster, folder: Path, config: launcher.Config, start: Callable[[], list[str]]
):
    ids = start()
    config.kill(ids[:1])
    wait_until(lambda: states(config, cluster, ids) == ["cancelled", "running"])
    assert not cluster.calls("scancel")
    task = cluster.batch_processes["1_0"]
    task.send_signal(signal.SIGUSR1)
    assert task.wait(300) == 0
    cluster.set("1_0", state="PENDING", reason="BeginTime")
    assert states(config, cluster, ids) == ["cancelled", "queued BeginTime"]
    end(folder, "b", 0)
    before = code_write_times(folder.parent)[ids[0]]
    assert cluster.start("1_0").wait(300) == 0
    assert start_log(folder)[2:] == "b"
    assert code_write_times(folder.parent)[ids[0]] == before, "not even to be killed again"
    assert states(config, cluster, ids) == ["cancelled", "completed"]


@pytest.mark.slow
def test_a_killed_experiment_that_does_not_stop_is_killed_with_all_that_it_started(
    cluster: Cluster, folder: Path, config: launcher.Config, monkeypatch: pytest.MonkeyPatch
):
    """Also what it started in a session of its own, as torchrun does; its neighbour goes on."""
    monkeypatch.setattr(script, "GRACE_SECONDS", 1)
    deaf = """
        import os, signal, subprocess, sys, time
        signal.signal(signal.SIGTERM, lambda *_: open("told", "w").close())
        rank = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
        rank += "open('rank', 'w').close(); time.sleep(600)"
        child = subprocess.Popen([sys.executable, "-c", rank], start_new_session=True)
        open("pid", "w").write(str(child.pid))
        while True:
            time.sleep(600)
    """
    codes = {"a": textwrap.dedent(deaf), "b": STOPPABLE}
    jobs = [Job(name, ("-c", code, name), folder, folder / name, folder / "logs") for name, code in codes.items()]
    ids, _ = submit(jobs, folder, config)
    task = cluster.start("1_0")
    wait_until(lambda: (folder / "rank").exists() and start_log(folder) == "b")
    config.kill(ids[:1])
    wait_until(lambda: states(config, cluster, ids) == ["cancelled", "running"])
    assert (folder / "told").exists(), "it is asked first"
    assert not (folder / "quick_failures").exists(), "what a person killed is no failure"
    wait_until(lambda: is_gone(int((folder / "pid").read_text())))
    end(folder, "b", 0)
    assert task.wait(300) == 0


def test_job_ids_repeat_on_a_reinstalled_cluster(
    cluster: Cluster, folder: Path, config: launcher.Config, start: Callable[[], list[str]]
):
    ids = start()
    end(folder, "a", 3)
    end(folder, "b", 0)
    wait_until(lambda: states(config, cluster, ids) == ["failed exit code 3", "completed"])
    cluster.configure(arrays={}, next=1)
    later = folder.with_name("20260102-batch")
    later.mkdir()
    again, _ = submit([job(later, name) for name in "ab"], later, config)
    assert [shared_tasks.task_of(job_id) for job_id in again] == [shared_tasks.task_of(job_id) for job_id in ids]
    assert states(config, cluster, again) == ["queued Priority"] * 2
    config.kill(again[:1])
    assert states(config, cluster, ids)[1] == "completed"


def test_one_of_a_running_task_is_repaired_while_its_neighbour_runs(tmp_path: Path, cluster: Cluster):
    world = World(tmp_path)
    target = resources.load("there", {"launcher": "slurm", "jobs_per_task": 3, "patience_seconds": 300.0}, world.runs)
    items: list[PlannedExperiment] = [make_item("end"), make_item("fail"), make_item("end", "long", waits=True)]
    actions.run(world.request(items), target)
    cluster.start("1_0")

    def look() -> list[str]:
        cluster.reap()
        return world.states(items)

    wait_until(lambda: len(code_write_times(world.runs / "submissions")) == 2 and len(world.start_log()) == 3)
    assert look() == ["done", "failed", "running"]
    before = world.start_log()
    (world.runs / "mended").touch()
    actions.run(world.request(items), target, "retry")
    assert [len(call) > 0 for call in cluster.calls("sbatch")] == [True, True]
    assert look() == ["done", "queued", "running"]
    cluster.start("2_0")
    wait_until(lambda: look() == ["done", "done", "running"])
    assert world.start_log()[len(before) :] == [items[1].exp_id]
    actions.run(world.request(items), target, "retry")
    assert len(cluster.calls("sbatch")) == 2
    for item in items:
        assert (world.runs / "logs" / f"{item.exp_id}.out.log").read_text().startswith("begins"), "each has its own log"
    world.go()
    wait_until(lambda: look() == ["done"] * 3)
