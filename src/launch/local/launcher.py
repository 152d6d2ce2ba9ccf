"""Run jobs on this machine: a scheduler process starts one per slot, and outlives the terminal."""

import fcntl
import logging
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import Field, model_validator

from src.errors import LaunchError
from src.files import ROOT, writing
from src.launch.command import QueueConfig, shell_line, without_torchrun
from src.launch.job import Job, Note, SchedulerState
from src.launch.local.state import (
    ABANDONED_FILE,
    LOCK,
    QUEUE,
    STARTED_FILE,
    Queue,
    find_job,
    group_by_submission,
    kill_descendants,
    process_start,
    signal_group,
    write_queue,
)
from src.support.command_line import signals_raise

_START_SECONDS = 60.0
_POLL_SECONDS = 0.05
_KILL_SECONDS = 20.0
"""Maximum time for killed processes to disappear."""

log = logging.getLogger(__name__)


class Config(QueueConfig):
    """Resources of this machine. All submissions to a runs folder share them."""

    SUBMISSION_SETTINGS: ClassVar = ("slots", "gpus", "wait", "submissions", "stop_after_failures")

    slots: int = Field(default=1, ge=1)
    """Number of jobs that run at a time."""
    gpus: list[Annotated[int, Field(ge=0)] | Annotated[str, Field(pattern=r"^[\w-]+$")]] = []
    """Devices for jobs, as in CUDA_VISIBLE_DEVICES. Empty: every job sees the devices of this process."""
    gpus_per_job: float = Field(default=1, gt=0)
    """Number of `gpus` per job. 1/2, 1/3, 1/4, 1/6 or 1/12 (also as 0.33): this share of one GPU. The GPU is not
    partitioned, so the jobs must fit into its memory together."""
    retries: int = Field(default=0, ge=0)
    """How often a failed job is restarted. A job that stopped gracefully (exit code 75) is always restarted."""
    wait: bool = True
    """True: wait until all jobs have ended, and stop them on an interrupt. False: return at once."""
    grace_seconds: float = Field(default=60.0, ge=0)
    """How long a job can take to stop before it is killed."""

    @model_validator(mode="after")
    def _enough(self) -> "Config":
        if self.gpus_per_job < 1 and not _twelfths(self.gpus_per_job):
            raise ValueError(
                f"gpus_per_job: expected an integer, or 1/2, 1/3, 1/4, 1/6 or 1/12, got {self.gpus_per_job:g}."
            )
        if self.gpus_per_job > 1 and self.gpus_per_job % 1:
            raise ValueError(f"gpus_per_job: expected an integer above 1, got {self.gpus_per_job:g}.")
        if self.gpus and self.gpus_per_job > len(self.gpus):
            raise ValueError(
                f"gpus_per_job: {self.gpus_per_job:g}, but gpus lists only {len(self.gpus)}. "
                "Lower it, or list more GPUs."
            )
        if len(set(map(str, self.gpus))) < len(self.gpus):
            raise ValueError(f"gpus: duplicate device in {self.gpus}. List each once.")
        if self.processes.nodes > 1:
            raise ValueError("processes.nodes: this machine is one node. Choose a launcher for several nodes.")
        return self

    def submit(self, jobs: Sequence[Job], folder: Path, note: Note) -> list[str]:
        """Queue `jobs`, start their scheduler, and return the job ids "<submission>.<index>".

        A failing job stops only its children. A job inherits the environment, without torchrun's variables.
        """
        ids = [f"{folder.name}.{index}" for index in range(len(jobs))]
        places = {job.exp_id: index for index, job in enumerate(jobs)}
        content = {
            "host": socket.gethostname(),
            "scheduler": {
                "slots": self.slots,
                "gpus": [str(gpu) for gpu in self.gpus],
                "grace_seconds": self.grace_seconds,
                "stop_after_failures": self.stop_after_failures,
            },
            "jobs": [self._describe_job(job, index, places) for index, job in enumerate(jobs)],
        }
        with writing(folder):
            write_queue(folder, content)
            for log_dir in {job.log_dir for job in jobs}:
                log_dir.mkdir(parents=True, exist_ok=True)
        _start_scheduler(folder)
        note(dict(zip(places, ids, strict=True)))
        return ids

    def _describe_job(self, job: Job, index: int, places: dict[str, int]) -> dict[str, object]:
        config = self.settings_of(job)
        return {
            "exp_id": job.exp_id,
            "line": shell_line(job, config.processes, config.environment),
            "cwd": str(job.cwd),
            "out": str(job.log_dir / f"{job.exp_id}.out.log"),
            "err": str(job.log_dir / f"{job.exp_id}.err.log"),
            # A job waits only for earlier jobs, so there is no cycle.
            "after": [places[parent] for parent in job.after if places.get(parent, index) < index],
            "after_jobs": list(job.after_jobs),
            "gpus": int(config.gpus_per_job) if config.gpus else 0,
            "twelfths": _twelfths(config.gpus_per_job) if config.gpus else 0,
            "retries": config.retries,
        }

    def find(self, folder: Path, exp_ids: Sequence[str]) -> dict[str, str]:
        """All jobs of `folder`. Empty if the scheduler never started; then this prevents it from starting."""
        if not (folder / QUEUE).exists() or _abandon(folder):
            return {}
        jobs = Queue(folder).content["jobs"]
        return {
            job["exp_id"]: f"{folder.name}.{index}" for index, job in enumerate(jobs) if job["exp_id"] in set(exp_ids)
        }

    def states(self, job_ids: Sequence[str]) -> dict[str, SchedulerState]:
        """Jobs on another machine, or of a submission with a damaged folder, are "unknown"."""
        states: dict[str, SchedulerState] = {}
        for ids in group_by_submission(job_ids):
            try:
                for queue, indices in self._group_by_queue(ids):
                    queue.check_host()
                    states |= {f"{queue.folder.name}.{index}": state for index, state in queue.states(indices).items()}
            except LaunchError as error:
                states |= dict.fromkeys(ids, SchedulerState("unknown", reason=str(error)))
        return states

    def _group_by_queue(self, job_ids: Sequence[str]) -> list[tuple[Queue, list[int]]]:
        queues: dict[str, Queue] = {}
        indices: dict[Queue, list[int]] = defaultdict(list)
        for job_id in job_ids:
            if match := find_job(Path(self.submissions), job_id, queues):
                indices[match[0]].append(match[1])
        return list(indices.items())

    def kill(self, job_ids: Sequence[str]) -> None:
        """Stop the jobs, kill them after the grace period, and return when they have ended.
        Raises LaunchError if some do not end."""
        for queue, indices in self._group_by_queue(job_ids):
            queue.check_host()
            for index in indices:
                if not queue.path(f"{index}.end").exists():
                    queue.cancel(index)
        try:
            remaining = self._wait_until_ended(job_ids, self.grace_seconds, hard=False)
        except BaseException:
            self._wait_until_ended(job_ids, 0.0, hard=True)
            raise
        if remaining and (remaining := self._wait_until_ended(job_ids, _KILL_SECONDS, hard=True)):
            raise LaunchError(
                f"{', '.join(remaining)}: killed, but still running after {_KILL_SECONDS:g} s. "
                "A process that waits for a disk cannot be killed: check with `ps`, then kill again."
            )

    def _wait_until_ended(self, job_ids: Sequence[str], seconds: float, hard: bool) -> list[str]:
        """Stop (if `hard`, kill) jobs until all have ended or the time is up; return the ids that still run."""
        until, signalled_pids = time.monotonic() + seconds, set[int]()
        while True:
            alive = [
                job_id
                for job_id, state in self.states(job_ids).items()
                if state.state in ("queued", "running", "unknown")
            ]
            for queue, indices in self._group_by_queue(alive):
                names = queue.attempts()
                for attempt in (queue.last_attempt(index, names[index]) for index in indices):
                    if attempt.alive and hard:
                        kill_descendants(attempt.pid)
                    elif attempt.alive and attempt.pid not in signalled_pids:
                        signalled_pids.add(attempt.pid)
                        signal_group(attempt.pid, signal.SIGTERM)
            if not alive or time.monotonic() > until:
                return alive
            time.sleep(_POLL_SECONDS)

    def wait_for(self, job_ids: Sequence[str]) -> None:
        """If `wait` is set, wait until the jobs have ended. SIGINT, SIGTERM and SIGHUP stop all of them.

        Raises:
            LaunchError: at the end, if jobs did not complete; names each, how it ended and its log.
        """
        if not self.wait:
            return
        queues: dict[str, Queue] = {}
        jobs = [job for job_id in job_ids if (job := find_job(Path(self.submissions), job_id, queues))]
        names = {f"{queue.folder.name}.{index}": queue.content["jobs"][index]["exp_id"] for queue, index in jobs}
        logged = dict.fromkeys(job_ids, "queued")
        with signals_raise():
            try:
                while True:
                    seen = self.states(job_ids)
                    for job_id, now in seen.items():
                        if now.state != logged[job_id]:
                            log.info("%s: %s%s", names[job_id], now.state, f" ({now.reason})" if now.reason else "")
                            logged[job_id] = now.state
                    if all(now.state not in ("queued", "running") for now in seen.values()):
                        break
                    time.sleep(_POLL_SECONDS)
            except BaseException:
                self.kill(job_ids)
                raise
        failures = [f"{names[job_id]}: {now.reason}." for job_id, now in seen.items() if now.state != "completed"]
        if failures:
            raise LaunchError("\n".join([f"{len(failures)} of {len(job_ids)} jobs did not complete:", *failures]))


def _twelfths(gpus: float) -> int:
    """Share of a GPU in twelfths; 0 if the job does not share a GPU, or the share is not 1/n."""
    return next((count for count in (1, 2, 3, 4, 6) if abs(gpus - count / 12) < 0.01), 0)


def _start_scheduler(folder: Path) -> None:
    """Start the scheduler as a daemon, and wait until it runs."""
    command = [sys.executable, "-m", "src.launch.local.scheduler", str(folder)]
    log_file = folder / "scheduler.log"
    log_file.touch(mode=0o600)
    line = f"{shlex.join(command)} < /dev/null > {shlex.quote(str(log_file))} 2>&1 & echo $!"
    try:
        done = subprocess.run(
            ["bash", "-c", line],
            cwd=ROOT,
            env=without_torchrun(os.environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            start_new_session=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError) as error:
        raise LaunchError(
            f"{folder}: the scheduler of the launcher local could not be started: {str(error).rstrip('.')}. "
            "Fix this, then submit again."
        ) from None
    until = time.monotonic() + _START_SECONDS
    while not (folder / STARTED_FILE).exists():
        alive = process_start(int(done.stdout)) is not None
        if (not alive and not (folder / STARTED_FILE).exists()) or time.monotonic() > until:
            if _abandon(folder):
                output_lines = log_file.read_text(encoding="utf-8", errors="replace").strip().splitlines() or [
                    "no output"
                ]
                raise LaunchError(
                    f"{folder}: the scheduler of the launcher local did not start: {output_lines[-1].rstrip('.')}. "
                    f"See {log_file}, then submit again."
                )
            return
        time.sleep(0.01)


def _abandon(folder: Path) -> bool:
    """Prevent the scheduler from starting; False if it has already started."""
    with open(folder / LOCK, "ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        if (folder / STARTED_FILE).exists():
            return False
        (folder / ABANDONED_FILE).touch()
    return True
