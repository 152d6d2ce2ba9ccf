"""The script that each task of an array runs, under the signals that Slurm sends."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from src.launch.slurm.script import write_script, write_tasks
from tests.core.launch.fakes.fake_slurm.cluster import Cluster, job


def wait_until(condition: Callable[[], object], seconds: float = 300) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.01)


WAITS = """
trap 'echo told; [ -n "$DEAF" ] || exit 75' TERM
echo up; touch "$UP"
until [ -e "$LET" ]; do sleep 0.02; done
exit ${CODE:-0}
"""


class Task:
    """One task of the script, running without any Slurm."""

    def __init__(self, folder: Path, requeue: bool, **environment: str) -> None:
        self.job = job(folder, "exp")
        write_tasks(folder / "array-000.tasks", [self.job], [WAITS], requeue)
        self.up, self.let = folder / "up", folder / "let"
        names = {
            "SLURM_ARRAY_JOB_ID": "41",
            "SLURM_ARRAY_TASK_ID": "0",
            "SLURM_JOB_ID": "57",
            "UP": str(self.up),
            "LET": str(self.let),
        }
        self.process = subprocess.Popen(
            ["bash", str(write_script(folder)), str(folder / "array-000.tasks")],
            env={**os.environ, **names, **environment},
            start_new_session=True,
        )
        wait_until(self.up.exists)

    def err(self) -> str:
        return (self.job.log_dir / "exp.err.log").read_text()

    def out(self) -> str:
        return (self.job.log_dir / "exp.out.log").read_text()


def test_the_time_limit_stops_and_requeues_only_this_task(cluster: Cluster, folder: Path):
    task = Task(folder, requeue=True)
    task.process.send_signal(signal.SIGUSR1)
    assert task.process.wait(300) == 0
    assert task.out() == "up\ntold\n"
    assert cluster.calls("scontrol") == [["scontrol", "requeue", "41_0"]]


def test_a_requeue_that_is_refused_is_tried_again(cluster: Cluster, folder: Path):
    cluster.fail("scontrol", "say", "slurm_requeue error: Unable to contact slurm controller (connect failure)")
    task = Task(folder, requeue=True)
    task.process.send_signal(signal.SIGUSR1)
    assert task.process.wait(300) == 0
    assert len(cluster.calls("scontrol")) == 2


def test_a_task_that_never_gets_to_a_checkpoint_is_not_requeued_for_ever(cluster: Cluster, folder: Path):
    """One fruitless start may be the fault of a slow disk; a checkpoint in between makes up for it."""
    checkpoints = job(folder, "exp").run / "checkpoints"
    codes = []
    for checkpoint in ("", "step-00000009", "", "step-00000010", "", ""):
        (folder / "up").unlink(missing_ok=True)
        task = Task(folder, requeue=True)
        (checkpoints / checkpoint).mkdir(parents=True, exist_ok=True)
        task.process.send_signal(signal.SIGUSR1)
        codes.append(task.process.wait(300))
    assert codes == [0, 0, 0, 0, 0, 75]
    assert len(cluster.calls("scontrol")) == 5
    assert "two starts in a row reached their limit without a new checkpoint" in task.err()


@pytest.mark.parametrize(("requeue", "deaf", "code"), [(False, "", 75), (True, "1", 0), (True, "1", 3)])
def test_the_time_limit_requeues_no_job_that_shall_not_or_that_ended(
    cluster: Cluster, folder: Path, requeue: bool, deaf: str, code: int
):
    task = Task(folder, requeue, DEAF=deaf, CODE=str(code))
    task.process.send_signal(signal.SIGUSR1)
    wait_until(lambda: "told" in task.out())
    task.let.touch()
    assert task.process.wait(300) == code
    assert not cluster.calls("scontrol")


@pytest.mark.parametrize(("by", "is_requeued"), [("limit", True), ("signal", False), ("person", False)])
def test_a_limit_of_its_own_requeues_as_the_time_limit_does(cluster: Cluster, folder: Path, by: str, is_requeued: bool):
    task = Task(folder, requeue=True, CODE="75")
    task.job.run.mkdir(parents=True, exist_ok=True)
    (task.job.run / "status.json").write_text(json.dumps({"state": "stopped", "stopped_by": by}, indent=4))
    task.let.touch()
    assert task.process.wait(300) == (0 if is_requeued else 75)
    assert cluster.calls("scontrol") == ([["scontrol", "requeue", "41_0"]] if is_requeued else [])


def test_scancel_and_preemption_requeue_nothing(cluster: Cluster, folder: Path):
    """Slurm's TERM reaches every process at once."""
    task = Task(folder, requeue=True)
    children = subprocess.run(
        ["pgrep", "-P", str(task.process.pid)], capture_output=True, text=True, check=True
    ).stdout.split()
    task.process.send_signal(signal.SIGTERM)
    for child in children:
        os.kill(int(child), signal.SIGTERM)
    assert task.process.wait(300) == 75
    assert task.out() == "up\ntold\n"
    assert not cluster.calls("scontrol")


@pytest.mark.parametrize(("code", "exit_code"), [(75, 1), (143, 1), (137, 137), (3, 3), (0, 0)])
def test_a_stop_by_srun_is_a_failure(cluster: Cluster, folder: Path, code: int, exit_code: int):
    """It stops the other nodes when one has failed, maybe before they can say that they stop in order."""
    (cluster.bin / "srun").write_text(f"#!/bin/sh\nexit {code}\n")
    (cluster.bin / "srun").chmod(0o755)
    write_tasks(folder / "array-000.tasks", [job(folder, "exp")], ["true"], True)
    names = {"SLURM_ARRAY_JOB_ID": "41", "SLURM_ARRAY_TASK_ID": "0", "SLURM_JOB_ID": "57", "SLURM_NNODES": "2"}
    command = ["bash", str(write_script(folder)), str(folder / "array-000.tasks")]
    assert subprocess.run(command, env={**os.environ, **names}, check=False).returncode == exit_code


def test_a_task_without_a_command_says_so(folder: Path):
    write_tasks(folder / "array-000.tasks", [job(folder, "exp")], ["true"], True)
    environment = {**os.environ, "SLURM_ARRAY_JOB_ID": "41", "SLURM_ARRAY_TASK_ID": "1"}
    command = ["bash", str(write_script(folder)), str(folder / "array-000.tasks")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "41_1: " in done.stderr
    assert "does not hold its command" in done.stderr
