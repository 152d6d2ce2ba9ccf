"""Settings and states of toolkit jobs, and retries for an unreliable service.

No job is queued twice, and a failed call is never taken for a failed job.
"""

import logging
import os
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypeVar

from pydantic import AfterValidator, Field, model_validator

from src.errors import LaunchError
from src.launch.command import QueueConfig
from src.launch.job import SchedulerState

PAGE = 1000
"""Minimum number of jobs to list in one call."""
_WAITING = {"QUEUING", "QUEUED", "PENDING"}
_INTERRUPTED_STATES = {"INTERRUPTED", "PREEMPTED"}
_STATES = {
    "RUNNING": "running",
    "CANCELLING": "running",
    "SUCCEEDED": "completed",
    "FAILED": "failed",
    "CANCELLED": "cancelled",
}
_MOUNT = re.compile(r"[^\s:]+:(/[^:]*)(?::(ro|rw))?")
T = TypeVar("T")
log = logging.getLogger(__name__)


class ServiceUnreachable(LaunchError):
    """The service was not reached, or refused the login: nothing was done, so a retry is safe."""


class OutcomeUnknown(LaunchError):
    """The request can have been carried out: the service failed, timed out, or sent an unreadable response."""


class NameTaken(LaunchError):
    """A job with this name already exists; it can have ended."""


def _check_image(image: str) -> str:
    tag = image.rpartition("/")[2].partition(":")[2]
    if "@" not in image and tag in ("", "latest"):
        raise ValueError(f"expected an image with a fixed tag, such as name:v3 or name@sha256:…, got {image!r}.")
    return image


def _check_mount(mount: str) -> str:
    if not _MOUNT.fullmatch(mount):
        raise ValueError(f"expected 'account.name@branch:/folder', then ':ro' or ':rw' if need be, got {mount!r}.")
    return mount


class JobConfig(QueueConfig):
    """Resources of one job, how its processes start, and retries of failed calls."""

    account: str = Field(min_length=1)
    """Id or full name; "$NAME" is read from the environment."""
    image: Annotated[str, Field(min_length=1), AfterValidator(_check_image)]
    """Docker image, not `:latest`: a restarted job must run the same software."""
    data: list[Annotated[str, AfterValidator(_check_mount)]] = []
    """Mounts, "account.name@branch:/folder[:ro|rw]"; rw by default."""
    cpu: int = Field(default=4, ge=1)
    """Processors on each node."""
    mem_gb: int = Field(default=16, ge=1)
    """GiB of memory on each node."""
    gpus: int = Field(default=0, ge=0)
    """GPUs per node."""
    gpu_mem_gb: int | None = Field(default=None, ge=1)
    """Minimum memory of each GPU."""
    gpu_model: str | None = None
    """GPU model, such as "A100" or "!A100"."""
    preemptable: bool = True
    """Whether the toolkit can stop the job to run another."""
    restartable: bool = True
    """True: the toolkit restarts it after a preemption, and it resumes from its last checkpoint."""
    bid: int | None = Field(default=None, ge=0, le=9999)
    """Priority of a preemptable job."""
    max_run_seconds: int = Field(ge=60)
    """The toolkit ends the job after this time, including the time that a child waits for its parents."""
    stop_before_seconds: int = Field(default=300, ge=1)
    """How long before `max_run_seconds` the training gets the signal to write a checkpoint and stop."""
    parent_poll_seconds: float = Field(default=30.0, gt=0)
    """Interval at which a child checks its parents' states.
    A waiting child holds its resources: submit parents separately if that is expensive."""
    parent_patience_seconds: int = Field(default=600, ge=0)
    """How long a parent can be failed or stopped (and be retried) before its child gives up."""
    parent_wait_seconds: int = Field(default=86_400, ge=0)
    """How long a parent can be queued or running before its child gives up."""
    max_parallel_calls: int = Field(default=8, ge=1)
    """Parallel calls to the toolkit."""
    kill_seconds: float = Field(default=180.0, ge=0)
    """How long to wait until killed jobs have ended."""
    retries: int = Field(default=5, ge=0)
    """Number of retries of a failed call."""
    backoff_seconds: float = Field(default=2.0, ge=0)
    """Pause before the first retry; doubled each time, at most a minute."""

    @model_validator(mode="after")
    def _check_together(self) -> "JobConfig":
        if self.stop_before_seconds >= self.max_run_seconds:
            raise ValueError(
                f"stop_before_seconds is {self.stop_before_seconds}, expected less than max_run_seconds, "
                f"{self.max_run_seconds}."
            )
        if self.gpus == 0 and (self.gpu_mem_gb is not None or self.gpu_model is not None):
            raise ValueError("gpu_mem_gb and gpu_model need gpus of at least 1, got 0.")
        return self

    def account_id(self) -> str:
        """The account id, read from the environment if it is a variable. Raises LaunchError if that is not set."""
        if not self.account.startswith("$"):
            return self.account
        name = self.account[1:].strip("{}")
        if not os.environ.get(name):
            raise LaunchError(
                f"toolkit: account is {self.account!r}, but {name} is not set. Set it: `export {name}=ACCOUNT_ID`."
            )
        return os.environ[name]

    def mounts(self) -> dict[Path, bool]:
        """Folder of each mount, and whether it is writable."""
        matches = [match for mount in self.data if (match := _MOUNT.fullmatch(mount))]
        return {Path(match[1]): match[2] != "ro" for match in matches}


@dataclass(frozen=True)
class Spec:
    """One job to create."""

    name: str
    """Characters [a-z0-9_]; unique among all jobs of the account, including cancelled ones."""
    command: tuple[str, ...]
    workdir: Path
    submission: str
    exp_id: str
    config: JobConfig


@dataclass(frozen=True)
class ListedJob:
    """A job as the toolkit reports it."""

    job_id: str
    word: str
    """Its state, in capitals."""
    name: str = ""
    submission: str = ""
    """Name of the folder of its submission; empty if the job is not ours."""
    exp_id: str = ""
    exit_code: int | None = None
    runs: int = 1


def scheduler_state(config: JobConfig, job: ListedJob) -> SchedulerState:
    """Convert the toolkit's state. An unfamiliar word is "unknown", never a failure."""
    if job.word in _WAITING or (job.word in _INTERRUPTED_STATES and config.restartable):
        state = "queued"
    else:
        state = "failed" if job.word in _INTERRUPTED_STATES else _STATES.get(job.word, "unknown")
    reason = f"exit code {job.exit_code}" if state == "failed" and job.exit_code is not None else ""
    return SchedulerState(state, job.word, reason, restarts=job.runs - 1)  # type: ignore[arg-type]


def has_ended(seen: SchedulerState) -> bool:
    return seen.state in ("completed", "failed", "cancelled")


def pauses(config: JobConfig) -> Iterator[float]:
    return (min(60.0, config.backoff_seconds * 2**i) for i in range(config.retries))


def call_with_retries(config: JobConfig, call: Callable[[], T]) -> T:
    """Repeat an idempotent call until it succeeds.
    Raises LaunchError if it is refused, or fails at the last try."""
    remaining = pauses(config)
    while True:
        try:
            return call()
        except (ServiceUnreachable, OutcomeUnknown) as error:
            pause = next(remaining, None)
            if pause is None:
                raise
            log.warning("%s Trying again in %g seconds.", error, pause)
        time.sleep(pause)
