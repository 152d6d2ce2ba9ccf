"""The launcher alone on a real Slurm: what the stand-in of the fast tests assumes is so."""

import re
import time
from pathlib import Path

import pytest

from src.errors import LaunchError
from src.launch.command import Processes
from src.launch.job import Job, SchedulerState
from src.launch.slurm import launcher
from src.launch.slurm.states import array_ids_by_name
from tests.slurm.real import Cluster, command, wait_until

pytestmark = [pytest.mark.slurm, pytest.mark.slow]
SETTINGS = launcher.Config(patience_seconds=300.0)
TWO_NODES = launcher.Config(patience_seconds=300.0, processes=Processes(starter="torchrun", nodes=2))


def job(folder: Path, exp_id: str, code: str, **more: object) -> Job:
    """A job that runs Python `code`."""
    return Job(exp_id, ("-c", code), folder, folder / "runs" / exp_id, folder / "logs", **more)  # type: ignore[arg-type]


def bash(folder: Path, exp_id: str, line: str) -> Job:
    """A job that runs a line of bash on each node in place of torchrun."""
    return Job(exp_id, (), folder, folder / "runs" / exp_id, folder / "logs", python_binary=f"bash -c '{line}' ")


def submit(jobs: list[Job], folder: Path, config: launcher.Config = SETTINGS) -> list[str]:
    return config.submit(jobs, folder, lambda ids: None)


def ends(config: launcher.Config, ids: list[str], seconds: float = 300.0) -> dict[str, SchedulerState]:
    wait_until(
        lambda: not {steps.state for steps in config.states(ids).values()} & {"queued", "running"},
        f"the end of {ids}",
        seconds,
    )
    return config.states(ids)


def log(folder: Path, exp_id: str, stream: str = "out") -> str:
    path = folder / "logs" / f"{exp_id}.{stream}.log"
    return path.read_text() if path.exists() else ""


def test_a_job_over_its_memory_limit_is_reported(cluster: Cluster, folder: Path):
    config = launcher.Config(patience_seconds=300.0, mem="200M", requeue=False)
    ids = submit([job(folder, "a", "import time; kept = bytearray(400 << 20); time.sleep(600)")], folder, config)
    ends(config, ids)
    wait_until(lambda: "MaxRSS" in config.states(ids)[ids[0]].reason, "accounting of the memory", 300.0)
    assert re.fullmatch(r"out of memory: MaxRSS \d+K of 200M", config.states(ids)[ids[0]].reason)


def test_the_throttle_of_a_queued_array_is_changed(cluster: Cluster, folder: Path):
    config = launcher.Config(patience_seconds=300.0, max_running=1, cpus_per_task=1)
    ids = submit([job(folder, str(n), "import time; time.sleep(600)") for n in range(4)], folder, config)

    def running() -> int:
        return sum(steps.state == "running" for steps in config.states(ids).values())

    wait_until(lambda: running() == 1, "the first task")
    config.throttle([job_id for job_id, steps in config.states(ids).items() if steps.state == "queued"], 2)
    wait_until(lambda: running() == 2, "the second task")
    config.kill(ids)


def test_jobs_run_in_arrays_after_their_parents(cluster: Cluster, folder: Path):
    hostile = 'it\'s 100%A $HOME "x" `id`\nsecond line'
    jobs = [
        job(folder, "a", f"import time; time.sleep(1); print({hostile!r})"),
        job(folder, "b", "raise SystemExit(3)"),
        job(folder, "after_a", "import time; print(time.time())", after=("a",)),
        job(folder, "after_b", "print('never')", after=("b",)),
    ]
    ids = submit(jobs, folder)
    assert {i.partition("_")[0] for i in ids[:2]} == {ids[0].partition("_")[0]}
    assert SETTINGS.find(folder, ["a", "after_b"]) == {"a": ids[0], "after_b": ids[3]}
    states = ends(SETTINGS, ids)
    assert [states[i].state for i in ids] == ["completed", "failed", "completed", "cancelled"]
    assert (states[ids[1]].reason, states[ids[3]].reason) == ("exit code 3", "DependencyNeverSatisfied")
    assert states[ids[0]].node.startswith("n")
    assert log(folder, "a") == hostile + "\n"
    assert log(folder, "after_b") == ""
    SETTINGS.kill(ids)  # what has ended is no error


def test_accounting_says_the_same(cluster: Cluster, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A squeue that has forgotten everything stands before the real one."""
    jobs = [
        job(folder, "a", "pass"),
        job(folder, "b", "raise SystemExit(3)"),
        job(folder, "c", "print(1)", after=("b",)),
    ]
    ids = submit(jobs, folder)
    outcome = ends(SETTINGS, ids)
    folder.joinpath("squeue").write_text("#!/bin/sh\n")
    folder.joinpath("squeue").chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")

    def is_recorded() -> bool:
        states = SETTINGS.states(ids)
        return {i: steps.state for i, steps in states.items()} == {i: steps.state for i, steps in outcome.items()}

    wait_until(is_recorded, "accounting to say what the controller said", 300)
    states = SETTINGS.states(ids)
    assert (states[ids[1]].reason, states[ids[1]].word) == ("exit code 3", "FAILED")
    assert SETTINGS.states(["999999_0"]) == {}
    assert SETTINGS.find(folder, ["a"]) == {"a": ids[0]}


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"partition": "nope"}, r"invalid partition specified: nope.*Change 'partition'"),
        ({"account": "nobody"}, r"Invalid account.*Change 'account'"),
        ({"constraint": "h100"}, r"Invalid feature.*Change 'constraint'"),
        ({"options": {"no-such-option": True}}, r"unrecognized option.*Change 'options'"),
        ({"mem": "999T"}, r"Memory.*Change 'mem'|node configuration is not available.*Change"),
    ],
)
def test_a_refusal_leaves_nothing_queued(cluster: Cluster, folder: Path, change: dict[str, str], match: str):
    bad_config = launcher.Config.model_validate({"patience_seconds": 300.0, **change})
    with pytest.raises(LaunchError, match=match):
        submit(
            [job(folder, "a", "import time; time.sleep(60)"), job(folder, "b", "pass", resources=bad_config)], folder
        )
    wait_until(lambda: not cluster.alive(), "nothing to be queued")


def test_check(cluster: Cluster):
    launcher.Config(partition="low").check()
    with pytest.raises(LaunchError, match=r"unknown partition 'lowe'. Did you mean 'low'\? Known: high, low"):
        launcher.Config(partition="lowe").check()


def test_a_thousand_jobs_are_queried_in_one_call(cluster: Cluster, folder: Path):
    """More than the cluster's MaxArraySize, so two arrays; held, so that none runs."""
    held_config = launcher.Config(patience_seconds=300.0, options={"hold": True}, max_running=4)
    begin = time.process_time()
    ids = submit([job(folder, f"{i:032x}", "pass") for i in range(1200)], folder, held_config)
    assert time.process_time() - begin < 3, "seconds of our own"
    assert len({i.partition("_")[0] for i in ids}) == 2
    states = SETTINGS.states(ids)
    assert len(states) == 1200
    assert {steps.reason for steps in states.values()} == {"JobHeldUser"}
    assert len(array_ids_by_name(["batch-1.array-000", "batch-1.array-001"], 20.0)) == 2
    SETTINGS.kill(ids)
    wait_until(lambda: {steps.state for steps in SETTINGS.states(ids).values()} == {"cancelled"}, "all to be cancelled")


RANK = 'echo "$NODE_RANK of $NNODES at $MASTER_ADDR:$MASTER_PORT, start ${SLURM_RESTART_COUNT:-0}";'


def test_each_node_runs_the_command(cluster: Cluster, folder: Path):
    (one,) = submit([bash(folder, "e", RANK)], folder, TWO_NODES)
    assert ends(TWO_NODES, [one])[one].state == "completed"
    lines = sorted(log(folder, "e").splitlines())
    assert [line.partition(" at ")[0] for line in lines] == ["0 of 2", "1 of 2"]
    assert len({line.partition(" at ")[2] for line in lines}) == 1
    assert " at 127.0.0.1:2" in lines[0]


def test_one_failing_node_ends_the_job(cluster: Cluster, folder: Path):
    (one,) = submit([bash(folder, "e", "[ $NODE_RANK = 0 ] || exit 5; exec sleep 300")], folder, TWO_NODES)
    steps = ends(TWO_NODES, [one])[one]
    assert (steps.state, steps.reason) == ("failed", "exit code 1"), "the stop of the others is no stop in order"
    assert steps.seconds is not None
    assert steps.seconds < 60


STOPPABLE = """
import os, signal, sys, time
node = int(os.environ['NODE_RANK'])
def stop(*_):
    print('told', node, flush=True)
    time.sleep(0.5 * (1 - node))  # the first node takes longer, and must be let
    print('stopped', node, flush=True)
    sys.exit(75)
signal.signal(signal.SIGTERM, stop)
print('up', node, flush=True)
while True:
    time.sleep(0.05)
"""


@pytest.fixture
def two_nodes(folder: Path) -> launcher.Config:
    (folder / "stoppable.py").write_text(STOPPABLE)
    return TWO_NODES


def both_stopped(folder: Path) -> bool:
    """Whether both nodes have stopped in order. Slurm may tell a process twice."""
    return {"told 0", "told 1", "stopped 0", "stopped 1"} <= set(log(folder, "e").splitlines())


def stoppable(folder: Path) -> Job:
    return Job("e", (), folder, folder / "runs" / "e", folder / "logs", python_binary=f"python3 {folder}/stoppable.py ")


def test_a_preempted_job_of_two_nodes_stops_in_order_and_starts_again(
    cluster: Cluster, folder: Path, two_nodes: launcher.Config
):
    (one,) = submit([stoppable(folder)], folder, two_nodes)
    wait_until(lambda: log(folder, "e").count("up") == 2, "both nodes")
    cluster.preempt(one)
    wait_until(lambda: both_stopped(folder), "both nodes to stop")
    wait_until(lambda: two_nodes.states([one])[one].state == "queued", "the job to be queued again")
    wait_until(lambda: cluster.hurry() or log(folder, "e").count("up") == 4, "the second start")
    assert two_nodes.states([one])[one].restarts == 1
    two_nodes.kill([one])
    wait_until(lambda: two_nodes.states([one])[one].state == "cancelled", "scancel")
    wait_until(lambda: not cluster.alive(), "the end")
    time.sleep(1.5)  # it would be queued again by now
    assert two_nodes.states([one])[one].state == "cancelled"
    assert log(folder, "e").count("up") == 4


@pytest.mark.slow
def test_the_time_limit_queues_a_job_of_two_nodes_again(cluster: Cluster, folder: Path, two_nodes: launcher.Config):
    config = two_nodes.model_copy(update={"time": 1, "signal_seconds": 50})
    (one,) = submit([stoppable(folder)], folder, config)
    wait_until(lambda: both_stopped(folder), "both nodes to stop", 300)
    wait_until(lambda: config.states([one])[one].state == "queued", "the job to be queued again")
    wait_until(lambda: cluster.hurry() or log(folder, "e").count("up") == 4, "the second start")
    steps = config.states([one])[one]
    assert (steps.state, steps.restarts) == ("running", 1)
    assert "could not" not in log(folder, "e", "err")


def test_experiments_that_share_a_task_end_each_by_itself(cluster: Cluster, folder: Path):
    config = SETTINGS.model_copy(update={"jobs_per_task": 4, "submissions": str(folder.parent), "cpus_per_task": 1})
    stops = f"import os; os.environ['NODE_RANK'] = '1'\n{STOPPABLE}"
    codes = {"good": "print('ran')", "bad": "raise SystemExit(3)", "killed": stops, "goes_on": stops}
    ids = submit([job(folder, name, code) for name, code in codes.items()], folder, config)
    assert len(cluster.alive()) == 1

    def steps() -> list[str]:
        cluster.hurry()
        states = config.states(ids)
        return [states[job_id].state for job_id in ids]

    wait_until(lambda: steps() == ["completed", "failed", "running", "running"], "the first two to end")
    assert config.states(ids)[ids[1]].reason == "exit code 3"
    wait_until(lambda: "up" in log(folder, "killed") and "up" in log(folder, "goes_on"), "the others to run")
    config.kill(ids[2:3])
    wait_until(lambda: steps() == ["completed", "failed", "cancelled", "running"], "one to be killed")
    command("scancel", "--signal=USR1", "--batch", ids[3].partition("+")[0])  # as near the time limit
    wait_until(lambda: steps() and log(folder, "goes_on").count("up") == 2, "the second start")
    assert steps() == ["completed", "failed", "cancelled", "running"]
    assert (log(folder, "good"), log(folder, "killed").count("up")) == ("ran\n", 1)
    config.kill(ids)
    wait_until(lambda: steps() == ["completed", "failed", "cancelled", "cancelled"], "the end")
    wait_until(lambda: not cluster.alive(), "the end of the task")


def test_a_lost_node_queues_the_job_again(cluster: Cluster, folder: Path, two_nodes: launcher.Config):
    (one,) = submit([stoppable(folder)], folder, two_nodes)
    wait_until(lambda: log(folder, "e").count("up") == 2, "both nodes")
    lost_node = cluster.nodes(one)[-1]
    cluster.lose(lost_node)
    try:
        wait_until(lambda: two_nodes.states([one])[one].state == "queued", "the job to be queued again")
        wait_until(lambda: cluster.hurry() or log(folder, "e").count("up") == 4, "the second start")
        assert two_nodes.states([one])[one].restarts == 1
    finally:
        cluster.regain(lost_node)


def test_a_controller_that_is_down_is_reported(cluster: Cluster, folder: Path, monkeypatch: pytest.MonkeyPatch):
    conf = folder / "slurm.conf"
    text = (cluster.folder / "slurm.conf").read_text()
    port = next(line.partition("=")[2] for line in text.splitlines() if line.startswith("SlurmctldPort"))
    conf.write_text(text.replace(f"SlurmctldPort={port}", "SlurmctldPort=9"))
    monkeypatch.setenv("SLURM_CONF", str(conf))
    impatient = launcher.Config(patience_seconds=3.0)
    with pytest.raises(LaunchError, match="scontrol ping"):
        submit([job(folder, "a", "pass")], folder, impatient)
    with pytest.raises(LaunchError, match="scontrol ping"):
        impatient.states(["1_0"])


def test_no_jobs_are_left(cluster: Cluster):
    assert command("squeue", "--noheader") == ""
