"""The process that starts the jobs of one submission on this machine: python -m src.launch.local.scheduler FOLDER."""

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from src.errors import LaunchError
from src.launch.command import INTERRUPTED_EXIT, STOPPED_EXIT
from src.launch.job import QUEUE_STOPPED
from src.launch.local.state import (
    ABANDONED_FILE,
    LOCK,
    STARTED_FILE,
    Queue,
    find_job,
    kill_descendants,
    signal_group,
    verdict,
)
from src.runs.environment import JOBS_PER_GPU

_POLL_SECONDS = 0.05
_QUICK_SECONDS = 60.0
_MAX_CONTINUATIONS = 100
"""Maximum restarts of a job that stopped gracefully, so that a job that stops at once is not restarted forever."""
# $1 file for the process id, $2 file for the exit code, $3 the job, $4 descriptors of locks that this shell holds and
# the job must not inherit. Stop signals go to the process group, so they reach the job directly. This shell ignores
# them, and starts no job after one.
_WRAPPER = r"""
SIGNALLED=
trap SIGNALLED=1 TERM USR1 HUP INT
read -r -a STAT < /proc/$$/stat
echo "$$ ${STAT[21]} $(< /proc/sys/kernel/random/boot_id)" > "$1.new" && mv "$1.new" "$1" || exit 1
( [ -z "$SIGNALLED" ] || exit 143; for DESCRIPTOR in $4; do eval "exec $DESCRIPTOR>&-"; done; exec bash -c "$3" )
CODE=$?
echo $CODE > "$2.new" && mv "$2.new" "$2"
exit $CODE
"""


@dataclass
class _Entry:
    """One job that has not ended."""

    index: int
    job: dict[str, Any]
    failures: int = 0
    start_time: float = 0.0
    continues: int = 0
    attempt: int = 0
    child: subprocess.Popen[bytes] | None = None
    is_signalled: bool = False


@dataclass
class _Scheduler:
    queue: Queue
    stopping: bool = False
    quick_failures: int = 0
    """Quick failures in a row so far."""
    entries: list[_Entry] = field(default_factory=list)
    end_states: dict[int, str] = field(default_factory=dict)
    """Index -> state of the jobs that have ended."""
    queues: dict[str, Queue] = field(default_factory=dict)
    """Other submissions, by name."""
    outside: dict[str, tuple[float, str]] = field(default_factory=dict)
    """Jobs of other submissions: when they were checked, and their state, or why it is unknown."""

    def run(self) -> None:
        """Schedule jobs until all have ended."""
        config = self.queue.content["scheduler"]
        self.entries = [_Entry(index, job) for index, job in enumerate(self.queue.content["jobs"])]
        killed_at = None
        while self.entries:
            cancelled_indices = (
                self.queue.cancelled_indices() if not self.stopping else {entry.index for entry in self.entries}
            )
            if self.stopping:
                killed_at = killed_at or time.monotonic() + config["grace_seconds"]
                self._stop(hard=time.monotonic() > killed_at)
            for entry in list(self.entries):
                if entry.index in self.end_states:  # ended by another entry of this round
                    continue
                if entry.child is not None:
                    self._reap(entry, entry.index in cancelled_indices)
                elif entry.index in cancelled_indices:
                    self._end(
                        entry, "cancelled", "cancelled before it was started" if entry.attempt == 0 else "cancelled"
                    )
                elif (reason := self._reason_never_to_start(entry)) is not None:
                    self._end(entry, "cancelled", reason)
            self._start_what_fits(config)
            time.sleep(_POLL_SECONDS)

    def _stop(self, hard: bool) -> None:
        for entry in self.entries:
            if entry.child is not None and hard:
                kill_descendants(entry.child.pid)
            elif entry.child is not None and not entry.is_signalled:
                entry.is_signalled = True
                signal_group(entry.child.pid, signal.SIGTERM)

    def _reason_never_to_start(self, entry: _Entry) -> str | None:
        """Why the job will never start; None if it can start, now or later."""
        failed_parents = [
            index for index in entry.job["after"] if self.end_states.get(index, "completed") != "completed"
        ]
        if failed_parents:
            return f"not started, because {self.queue.content['jobs'][failed_parents[0]]['exp_id']} did not complete"
        for job_id in entry.job["after_jobs"]:
            if (state := self._outside_state(job_id)) not in ("completed", "queued", "running"):
                has_ended = state in ("failed", "cancelled", "unknown")
                return f"not started, because {f'job {job_id} did not complete' if has_ended else state}"
        return None

    def _is_ready(self, entry: _Entry) -> bool:
        within = all(self.end_states.get(index) == "completed" for index in entry.job["after"])
        return within and all(self._outside_state(job_id) == "completed" for job_id in entry.job["after_jobs"])

    def _outside_state(self, job_id: str) -> str:
        """State of a job of another submission, at most a second old.
        If its files are damaged, a message why the state is unknown."""
        if time.monotonic() - self.outside.get(job_id, (-1.0, ""))[0] > 1.0:
            try:
                match = find_job(self.queue.folder.parent, job_id, self.queues)
                state: str = match[0].states([match[1]])[match[1]].state if match else "unknown"
            except LaunchError as error:
                state = f"the state of job {job_id} is unknown: {error}"
            self.outside[job_id] = time.monotonic(), state
        return self.outside[job_id][1]

    def _start_what_fits(self, config: dict[str, Any]) -> None:
        free = config["slots"] - sum(entry.child is not None for entry in self.entries)
        for entry in list(self.entries):
            if self.stopping or free <= 0:
                return
            if entry.child is None and self._is_ready(entry):
                with contextlib.ExitStack() as stack:
                    slots = Slots(self.queue.folder.parent / "slots")
                    if (slot := slots.take([f"slot-{n}" for n in range(config["slots"])], 1, stack)) is None:
                        return  # other submissions use all of them
                    if twelfths := entry.job.get("twelfths"):
                        devices = slots.take_share(config["gpus"], twelfths, stack)
                    else:
                        devices = slots.take([f"gpu-{gpu}" for gpu in config["gpus"]], entry.job["gpus"], stack)
                    if devices is not None:
                        self._start(entry, slot | devices)
                        free -= 1

    def _start(self, entry: _Entry, locks: dict[str, int]) -> None:
        job = entry.job
        entry.attempt += 1
        entry.start_time = time.monotonic()
        twelfths = job.get("twelfths")
        environment = {**os.environ, JOBS_PER_GPU: str(12 // twelfths if twelfths else 1)}
        if devices := [name.removeprefix("gpu-") for name in locks if name.startswith("gpu-")]:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
        files = [str(self.queue.path(f"{entry.index}.{entry.attempt}.{suffix}")) for suffix in ("pid", "code")]
        descriptors = tuple(locks.values())
        command = ["bash", "-c", _WRAPPER, "job", *files, job["line"], " ".join(map(str, descriptors))]
        try:
            with open(job["out"], "ab") as out, open(job["err"], "ab") as err:
                entry.child = subprocess.Popen(
                    command,
                    cwd=job["cwd"],
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=err,
                    start_new_session=True,
                    pass_fds=descriptors,
                )
        except OSError as error:
            self._end(entry, "failed", f"could not be started: {error}")

    def _reap(self, entry: _Entry, is_cancelled: bool) -> None:
        """If the job has ended, record its state, or leave it to be restarted."""
        assert entry.child is not None
        code = entry.child.poll()
        if code is None:
            return
        signal_group(entry.child.pid, signal.SIGKILL)  # processes that it left running
        entry.child = None
        state, reason = verdict(code, entry.job["err"])
        if code == 0:
            self.quick_failures = 0
            self._end(entry, state, reason)
        elif is_cancelled:
            self._end(entry, "cancelled", "cancelled")
        elif code == STOPPED_EXIT and entry.continues < _MAX_CONTINUATIONS:
            entry.continues += 1
        elif code not in (STOPPED_EXIT, INTERRUPTED_EXIT) and entry.failures < entry.job["retries"]:
            entry.failures += 1
        else:
            self._end(entry, state, reason)
            if state == "failed":
                self._count_quick_failure(time.monotonic() - entry.start_time)

    def _count_quick_failure(self, seconds: float) -> None:
        """After several quick failures in a row, do not start the rest: they would fail for the same reason."""
        self.quick_failures = self.quick_failures + 1 if seconds < _QUICK_SECONDS else 0
        limit = self.queue.content["scheduler"].get("stop_after_failures", 0)
        if not limit or self.quick_failures < limit:
            return
        for entry in [entry for entry in self.entries if entry.attempt == 0]:
            reason = f"not started: {limit} {QUEUE_STOPPED}. See why, then --job_option retry"
            self._end(entry, "cancelled", reason)

    def _end(self, entry: _Entry, state: str, reason: str) -> None:
        self.queue.write_end(entry.index, state, reason)
        self.end_states[entry.index] = state
        self.entries.remove(entry)


class Slots:
    """Lock files for slots and devices, shared by all submissions to a runs folder.

    The job holds the lock, not its scheduler, so the lock is released when the job ends, whichever process is killed.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)

    def take(self, names: list[str], count: int, stack: contextlib.ExitStack) -> dict[str, int] | None:
        """Lock `count` of the files `names`: name -> descriptor, closed by `stack`. None if too few are free."""
        locks: dict[str, int] = {}
        for name in names:
            if len(locks) == count:
                break
            descriptor = os.open(self.folder / name, os.O_RDWR | os.O_CREAT, 0o666)
            stack.callback(os.close, descriptor)
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                locks[name] = descriptor
        return locks if len(locks) == count else None

    def take_share(self, gpus: list[str], twelfths: int, stack: contextlib.ExitStack) -> dict[str, int] | None:
        """Lock a share of one of `gpus` that no job has exclusively; like `take`."""
        for gpu in gpus:
            device = os.open(self.folder / f"gpu-{gpu}", os.O_RDWR | os.O_CREAT, 0o666)
            with contextlib.ExitStack() as attempt:
                attempt.callback(os.close, device)
                with contextlib.suppress(BlockingIOError):
                    fcntl.flock(device, fcntl.LOCK_SH | fcntl.LOCK_NB)
                    parts = self.take([f"part-{gpu}-{n}" for n in range(12)], twelfths, attempt)
                    if parts is not None:
                        stack.push(attempt.pop_all())
                        return {f"gpu-{gpu}": device, **parts}
        return None


def main(folder: Path) -> int:
    """Schedule the submission in `folder`, unless it was abandoned."""
    queue = Queue(folder)
    scheduler = _Scheduler(queue)

    def stop(number: int, frame: FrameType | None) -> None:
        scheduler.stopping = True

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with open(folder / LOCK, "ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (folder / ABANDONED_FILE).exists() or (folder / STARTED_FILE).exists():
            return 1
        (folder / STARTED_FILE).touch()
        scheduler.run()
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
