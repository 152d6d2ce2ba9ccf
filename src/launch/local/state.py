"""What the files of a submission to this machine say of its jobs; each job writes its own, so that they outlive their scheduler.

jobs/<index>.<attempt>.pid   written by the job as it starts: its process, the start of that process, the boot of the machine
jobs/<index>.<attempt>.code  written by the job as it ends: its exit code
jobs/<index>.end             written by the scheduler once the job will not be started again
cancel/<index>               written by whoever wants the job to end
scheduler.lock               locked (flock) as long as the scheduler lives
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
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from src.errors import LaunchError, RunError
from src.files import read_json, write_json
from src.launch.command import INTERRUPTED, STOPPED
from src.launch.job import SchedulerState
from src.runs.lease import process_start, this_process

QUEUE = "queue.json"
STARTED = "started"
ABANDONED = "abandoned"
LOCK = "scheduler.lock"
JOB_ID = re.compile(r"(?P<submission>[\w-]+)\.(?P<index>\d+)")


@dataclass(frozen=True)
class Attempt:
    """One start of a job."""

    number: int
    """1, 2, …; 0: it was never started."""
    pid: int = 0
    alive: bool = False
    code: int | None = None
    """None: it has not ended, or could not say how."""
    seconds: float | None = None


class Queue:
    """The folder of one submission."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @cached_property
    def content(self) -> dict[str, Any]:
        """What was submitted: "host", "scheduler" (its config) and "jobs".

        Raises:
            LaunchError: the file is missing or damaged.
        """
        found = read_json(self.folder / QUEUE, LaunchError)
        if not isinstance(found, dict) or not isinstance(found.get("jobs"), list):
            raise LaunchError(f"{self.folder / QUEUE}: expected a dict with a list of jobs.")
        return found

    def check_host(self) -> None:
        """Raises a LaunchError on a machine that cannot see the processes of these jobs."""
        host = self.content.get("host")
        if host != socket.gethostname():
            raise LaunchError(f"{self.folder}: its jobs run on {host}, and only that machine knows of them.")

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

    def job_id(self, index: int) -> str:
        """The id of a job, for the whole world."""
        return f"{self.folder.name}.{index}"

    def path(self, name: str) -> Path:
        """A file of one job."""
        return self.folder / "jobs" / name

    def attempt(self, index: int, names: Mapping[int, int] | None = None) -> Attempt:
        """The last start of job `index`. names: `attempts()`, where it is known."""
        number = (self.attempts() if names is None else names).get(index, 0)
        if number == 0:
            return Attempt(0)
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
        """How often each job was started, by index; those never started are left out."""
        found: dict[int, int] = {}
        with contextlib.suppress(FileNotFoundError):
            for name in os.listdir(self.folder / "jobs"):
                if match := re.fullmatch(r"(\d+)\.(\d+)\.pid", name):
                    index, number = map(int, match.groups())
                    found[index] = max(number, found.get(index, 0))
        return found

    def cancelled_indices(self) -> set[int]:
        """Indices of the jobs that shall end."""
        try:
            return {int(name) for name in os.listdir(self.folder / "cancel") if name.isdecimal()}
        except FileNotFoundError:
            return set()

    def cancel(self, index: int) -> None:
        """Ask for the end of a job; who waits for it signals it too."""
        (self.folder / "cancel").mkdir(exist_ok=True)
        (self.folder / "cancel" / str(index)).touch()

    def write_end(self, index: int, state: str, reason: str) -> None:
        """Note that a job will not be started again."""
        write_json(self.path(f"{index}.end"), {"state": state, "reason": reason})

    def scheduler_state(self, index: int, lives: bool, names: Mapping[int, int]) -> SchedulerState:
        """What is known of one job. lives: whether the scheduler does; names: `attempts()`."""
        attempt = self.attempt(index, names)
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
        if lives and attempt.number:
            return SchedulerState("running", "ENDING", "its scheduler decides whether it is started again", **facts)
        if lives:
            return SchedulerState("queued", "PENDING", "waits for its turn", **facts)
        if attempt.number == 0:
            return SchedulerState("cancelled", "CANCELLED", "its scheduler on this machine has ended; it was never started", **facts)
        state, reason = verdict(attempt.code, self.content["jobs"][index]["err"])
        return SchedulerState(state, state.upper(), reason, **facts)


def descendants(pid: int) -> list[int]:
    """Every process that `pid` has started, and those that they have started. torchrun starts its ranks in sessions of their own."""
    children: dict[int, list[int]] = defaultdict(list)
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parent = stat.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[1]
            children[int(parent)].append(int(stat.parent.name))
    family = [pid]
    for member in family:
        family += children[member]  # a list may grow while it is gone through
    return family[1:]


def verdict(code: int | None, log: str) -> tuple[Any, str]:
    """State and reason of a job that ended with `code` (None: it could not say) and is not started again."""
    if code == 0:
        return "completed", "exit code 0"
    if code in (STOPPED, INTERRUPTED):
        return "cancelled", "stopped in order"
    return "failed", f"{describe_exit(code)}. See {log}"


def describe_exit(code: int | None) -> str:
    """bash reports a command that was killed by signal n, as the out-of-memory killer does, as exit code 128 + n."""
    if code is None:
        return "killed, with all that it had started"
    number = -code if code < 0 else code - 128
    name = f" ({signal.Signals(number).name})" if number in set(signal.Signals) else ""
    return f"exit code {code}{name}"


def signal_group(pid: int, number: signal.Signals) -> None:
    """Send a signal to a job: the group of its first process."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)


def kill_descendants(pid: int) -> None:
    """End a job at once. Its first process is not killed: it notes how the others ended."""
    for process in descendants(pid):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(process, signal.SIGKILL)


def find_job(submissions: Path, job_id: str) -> tuple[Queue, int] | None:
    """The submission and the index that a job id names; None where these submissions have no such job."""
    match = JOB_ID.fullmatch(job_id)
    if match is None or not (submissions / match["submission"] / QUEUE).exists():
        return None
    queue, index = Queue(submissions / match["submission"]), int(match["index"])
    return (queue, index) if index < len(queue.content["jobs"]) else None


def write_queue(folder: Path, content: dict[str, Any]) -> None:
    """Write what is submitted."""
    (folder / "jobs").mkdir(parents=True, exist_ok=True)
    (folder / QUEUE).write_text(json.dumps(content), encoding="utf-8")
