"""A test's view of the stand-in for Slurm: put it on PATH, look at what it was asked, change its jobs, make it fail."""

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from src.launch.job import Job
from src.launch.slurm import launcher
from tests.core.launch.fakes.fake_slurm.program import CALLS_NAME, EMPTY, FAULTS_NAME, STATE_NAME

PROGRAM = Path(__file__).with_name("program.py")
SOON = launcher.Config(patience_seconds=300.0)
IMPATIENT = launcher.Config(patience_seconds=30.0)
"""For a Slurm that says again and again that it cannot answer: see `Clock`."""
HUNG = launcher.Config(patience_seconds=10.0)
"""For one that says nothing, which is waited for."""
COMMANDS = ("sbatch", "squeue", "sacct", "scancel", "scontrol")


class Clock:
    """In place of the module `time`: only a sleep takes time, and none in truth. However busy the machine, nobody loses
    patience for it."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Cluster:
    """The state of one stand-in, which lies in a folder of its own."""

    def __init__(self, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.home = home
        self.clock = Clock()
        self.batch_processes: dict[str, subprocess.Popen[bytes]] = {}
        for module in ("src.launch.job", "src.launch.slurm.sbatch"):
            monkeypatch.setattr(f"{module}.time", self.clock)
        self.bin = home / "bin"
        self.bin.mkdir(parents=True)
        for command in COMMANDS:
            path = self.bin / command
            path.write_text(
                f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -S {shlex.quote(str(PROGRAM))} {command} "$@"\n'
            )
            path.chmod(0o755)
        monkeypatch.setenv("FAKE_SLURM", str(home))
        monkeypatch.setenv("PATH", f"{self.bin}{os.pathsep}{os.environ['PATH']}")

    @property
    def state(self) -> dict[str, Any]:
        path = self.home / STATE_NAME
        return json.loads(path.read_text() if path.exists() else json.dumps(EMPTY))

    def configure(self, **facts: Any) -> None:
        """Change facts of the cluster, such as max_array=4 or run=True."""
        (self.home / STATE_NAME).write_text(json.dumps(self.state | facts))

    def set(self, job_id: str, **facts: Any) -> None:
        """Change facts of one task: state, reason, node, exit, seconds, restarts, forgotten ("" | "controller" |
        "everywhere")."""
        state = self.state
        array, _, task = job_id.partition("_")
        state["arrays"][array]["tasks"][task].update(facts)
        (self.home / STATE_NAME).write_text(json.dumps(state))

    def task(self, job_id: str) -> dict[str, Any]:
        array, _, task = job_id.partition("_")
        return self.state["arrays"][array]["tasks"][task]

    def start(self, job_id: str) -> "subprocess.Popen[bytes]":
        """Run a task as Slurm would, in a session of its own."""
        array, _, number = job_id.partition("_")
        environment = {
            **os.environ,
            "SLURM_ARRAY_JOB_ID": array,
            "SLURM_ARRAY_TASK_ID": number,
            "SLURM_JOB_ID": f"{array}00{number}",
        }
        call = self.calls("sbatch")[int(array) - 1]
        script = next(place for place, word in enumerate(call) if word.endswith(".sh"))
        process = subprocess.Popen(["bash", *call[script:]], env=environment, start_new_session=True)
        self.set(job_id, state="RUNNING", node="n1", pid=process.pid)
        self.batch_processes[job_id] = process
        return process

    def reap(self) -> None:
        """Let the tasks that `start` began and that have ended be over."""
        for job_id, process in list(self.batch_processes.items()):
            if (code := process.poll()) is not None:
                del self.batch_processes[job_id]
                if self.task(job_id)["state"] == "RUNNING":
                    self.set(job_id, state="FAILED" if code else "COMPLETED", exit=f"{code}:0")

    def close(self) -> None:
        """Leave no process of a task."""
        for process in self.batch_processes.values():
            subprocess.run(["pkill", "-KILL", "-s", str(process.pid)], check=False)
            process.wait()

    def fail(self, command: str, do: str, text: str = "", **when: int) -> None:
        """Let a call of `command` go wrong; see program.py."""
        path = self.home / FAULTS_NAME
        faults = json.loads(path.read_text()) if path.exists() else []
        path.write_text(json.dumps([*faults, {"command": command, "do": do, "text": text, **when}]))

    def calls(self, command: str | None = None) -> list[list[str]]:
        """Every call so far as [command, arguments…]."""
        path = self.home / CALLS_NAME
        calls = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        return [call for call in calls if command in (None, call[0])]

    def forget_calls(self) -> None:
        (self.home / CALLS_NAME).unlink(missing_ok=True)

    def alive(self) -> list[str]:
        """Ids of the tasks that wait or run."""
        arrays = self.state["arrays"].items()
        return [
            f"{a}_{i}"
            for a, array in arrays
            for i, task in array["tasks"].items()
            if task["state"] in ("PENDING", "RUNNING")
        ]


def job(folder: Path, exp_id: str, *args: str, **more: Any) -> Job:
    """A job that prints its arguments as JSON."""
    code = "import json, sys; print(json.dumps(sys.argv[1:]))"
    return Job(exp_id, ("-c", code, *args), folder, folder.parent / "runs" / exp_id, folder.parent / "logs", **more)


class Notes(dict[str, str]):
    """What submit told its caller, call by call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[dict[str, str]] = []

    def __call__(self, ids: Mapping[str, str]) -> None:
        self.calls.append(dict(ids))
        self.update(ids)


def submit(jobs: Sequence[Job], folder: Path, config: launcher.Config = SOON) -> tuple[list[str], Notes]:
    notes = Notes()
    return config.submit(jobs, folder, notes), notes
