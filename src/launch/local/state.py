"""The files of a submission to this machine. Each job writes its own, so that they outlive the scheduler.

jobs/<index>.<attempt>.pid   written by the job when it starts: process id, start time, boot id
jobs/<index>.<attempt>.code  written by the job when it ends: exit code
jobs/<index>.end             written by the scheduler once the job will not be restarted
cancel/<index>               written to request the end of the job
scheduler.lock               locked (flock) while the scheduler runs
"""

import contextlib
import fcntl
import json
import os
import re
import signal
import socket
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from src.errors import LaunchError, RunError
from src.files import read_json, write_atomic, write_json
from src.launch.command import INTERRUPTED_EXIT, STOPPED_EXIT
from src.launch.job import SchedulerState
from src.runs.lease import process_start, this_process

QUEUE = "queue.json"
STARTED_FILE = "started"
ABANDONED_FILE = "abandoned"
LOCK = "scheduler.lock"
JOB_ID = re.compile(r"(?P<submission>[\w-]+)\.(?P<index>\d+)")


@dataclass(frozen=True)
class Attempt:
    """One start of a job."""

    number: int
    """1, 2, …; 0 if never started."""
    pid: int = 0
    alive: bool = False
    code: int | None = None
    """None if it has not ended, or was killed before it could write the code."""
    seconds: float | None = None


class Queue:
    """The folder of one submission."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @cached_property
    def content(self) -> dict[str, Any]:
        """The submission: "host", "scheduler" (its config) and "jobs".

        Raises:
            LaunchError: the file is missing or damaged.
        """
        content = read_json(self.folder / QUEUE, LaunchError)
        if not (
            isinstance(content, dict) and isinstance(content.get("host"), str) and isinstance(content.get("jobs"), list)
        ):
            raise LaunchError(
                f'{self.folder / QUEUE}: expected {{"host": NAME, "jobs": [...]}}, got {json.dumps(content)[:60]}. '
                "Restore it from a copy, or stop its jobs by hand and delete the folder."
            )
        return content

    def check_host(self) -> None:
        """Raise LaunchError on a machine other than the one that runs these jobs."""
        host = self.content.get("host")
        if host != socket.gethostname():
            raise LaunchError(
                f"{self.folder}: its jobs run on {host}, and only that machine can query them. Run this command there."
            )

    def scheduler_is_alive(self) -> bool:
        """Whether the scheduler process still runs."""
        try:
            with open(self.folder / LOCK, "rb") as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except FileNotFoundError:
            return False
        except BlockingIOError:
            return True
        return False

    def path(self, name: str) -> Path:
        """A file of one job."""
        return self.folder / "jobs" / name

    def last_attempt(self, index: int, number: int) -> Attempt:
        """The last start of job `index`, with this `number`; 0: it was never started."""
        pid_file, code_file = self.path(f"{index}.{number}.pid"), self.path(f"{index}.{number}.code")
        pid, alive = 0, False
        with contextlib.suppress(OSError, ValueError):
            words = pid_file.read_text(encoding="utf-8").split()
            pid = int(words[0])
            alive = words[2] == this_process()["boot_id"] and process_start(pid) == int(words[1])
        code = None
        with contextlib.suppress(OSError, ValueError):
            code = int(code_file.read_text(encoding="utf-8"))
        seconds = None
        with contextlib.suppress(OSError):
            end = code_file.stat().st_mtime if code is not None else time.time()
            seconds = max(0.0, end - pid_file.stat().st_mtime) if alive or code is not None else None
        return Attempt(number, pid, alive and code is None, code, seconds)

    def attempts(self) -> dict[int, int]:
        """Number of starts of each job, by index."""
        last_attempts: dict[int, int] = defaultdict(int)
        with contextlib.suppress(FileNotFoundError):
            for name in os.listdir(self.folder / "jobs"):
                if match := re.fullmatch(r"(\d+)\.(\d+)\.pid", name):
                    index, number = map(int, match.groups())
                    last_attempts[index] = max(number, last_attempts[index])
        return last_attempts

    def cancelled_indices(self) -> set[int]:
        """Indices of the jobs with a request to end."""
        try:
            return {int(name) for name in os.listdir(self.folder / "cancel") if name.isdecimal()}
        except FileNotFoundError:
            return set()

    def cancel(self, index: int) -> None:
        """Request the end of a job. The caller also signals it."""
        (self.folder / "cancel").mkdir(exist_ok=True)
        (self.folder / "cancel" / str(index)).touch()

    def write_end(self, index: int, state: str, reason: str) -> None:
        """Record that a job will not be restarted."""
        write_json(self.path(f"{index}.end"), {"state": state, "reason": reason})

    def states(self, indices: Sequence[int]) -> dict[int, SchedulerState]:
        """The state of each job."""
        is_alive = self.scheduler_is_alive()  # checked first: if it ends in between, its last files are read below
        attempts = self.attempts()
        return {index: self._state(index, is_alive, self.last_attempt(index, attempts[index])) for index in indices}

    def _state(self, index: int, is_alive: bool, attempt: Attempt) -> SchedulerState:
        facts: dict[str, Any] = {
            "node": self.content["host"] if attempt.number else "",
            "seconds": attempt.seconds,
            "restarts": max(0, attempt.number - 1),
        }
        with contextlib.suppress(RunError):
            end = read_json(self.path(f"{index}.end"), RunError)
            return SchedulerState(end["state"], end["state"].upper(), end["reason"], **facts)
        if attempt.alive:
            return SchedulerState("running", "RUNNING", **facts)
        if is_alive and attempt.number:
            return SchedulerState("running", "ENDING", "its scheduler decides whether to restart it", **facts)
        if is_alive:
            return SchedulerState("queued", "PENDING", "waiting for a slot", **facts)
        if attempt.number == 0:
            return SchedulerState(
                "cancelled", "CANCELLED", "its scheduler on this machine has ended; it was never started", **facts
            )
        state, reason = verdict(attempt.code, self.content["jobs"][index]["err"])
        return SchedulerState(state, state.upper(), reason, **facts)


def descendants(pid: int) -> list[int]:
    """All descendants of the process `pid`, whatever their sessions: torchrun's ranks have their own."""
    children: dict[int, list[int]] = defaultdict(list)
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parent = stat.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[1]
            children[int(parent)].append(int(stat.parent.name))
    family = [pid]
    for member in family:
        family += children[member]  # the list grows while it is iterated
    return family[1:]


def verdict(code: int | None, log: str) -> tuple[Any, str]:
    """State and reason of a job that ended with `code` (None: unknown) and is not restarted."""
    if code == 0:
        return "completed", "exit code 0"
    if code in (STOPPED_EXIT, INTERRUPTED_EXIT):
        return "cancelled", "stopped in order"
    return "failed", f"{describe_exit(code)}. See {log}"


def describe_exit(code: int | None) -> str:
    """Describe an exit code. bash reports a command that was killed by signal n as exit code 128 + n."""
    if code is None:
        return "killed, with all its processes"
    number = -code if code < 0 else code - 128
    name = f" ({signal.Signals(number).name})" if number in set(signal.Signals) else ""
    return f"exit code {code}{name}"


def signal_group(pid: int, number: signal.Signals) -> None:
    """Send a signal to a job: the group of its first process."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)


def kill_descendants(pid: int) -> None:
    """Kill a job, except its first process, which writes the exit code."""
    for process in descendants(pid):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(process, signal.SIGKILL)


def find_job(submissions: Path, job_id: str, queues: dict[str, Queue]) -> tuple[Queue, int] | None:
    """The submission and the index that a job id names; None if there is no such job.
    queues: the submissions read so far."""
    match = JOB_ID.fullmatch(job_id)
    if match is None or not (submissions / match["submission"] / QUEUE).exists():
        return None
    queue, index = queues.setdefault(match["submission"], Queue(submissions / match["submission"])), int(match["index"])
    return (queue, index) if index < len(queue.content["jobs"]) else None


def group_by_submission(job_ids: Sequence[str]) -> list[list[str]]:
    """The job ids of each submission."""
    groups: dict[str, list[str]] = defaultdict(list)
    for job_id in job_ids:
        groups[job_id.rpartition(".")[0]].append(job_id)
    return list(groups.values())


def write_queue(folder: Path, content: dict[str, Any]) -> None:
    """Write the jobs of a submission."""
    (folder / "jobs").mkdir(parents=True, exist_ok=True)
    write_atomic(folder / QUEUE, json.dumps(content), private=True)  # it contains the jobs' environment variables
