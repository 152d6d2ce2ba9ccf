"""The interface of a launcher."""

import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal, TypeVar

from src.errors import LaunchError
from src.experiments.interfaces import Component
from src.experiments.registry import LAUNCHERS, bind

Note = Callable[[Mapping[str, str]], None]
"""A launcher calls this with {exp_id: job id} as soon as the scheduler returns ids, before anything else can fail."""
T = TypeVar("T")


@dataclass(frozen=True)
class Job:
    """One experiment to run."""

    exp_id: str
    args: tuple[str, ...]
    """trainval.py and its arguments, passed on unchanged."""
    cwd: Path
    """The folder that holds trainval.py: a snapshot of the code."""
    run: Path
    """The save directory of the experiment."""
    log_dir: Path
    """The output of the job is appended to <log_dir>/<exp_id>.out.log and <exp_id>.err.log."""
    python_binary: str | None = None
    """Bash before `args`, such as "source activate ENV ; torchrun --nproc-per-node NGPUS ".
    None: as the launcher's config says."""
    after: tuple[str, ...] = ()
    """Ids of experiments that must complete before it starts. Only those earlier in the submission count."""
    after_jobs: tuple[str, ...] = ()
    """Job ids of the same launcher, from earlier submissions, that must complete before it starts."""
    resources: "LauncherConfig | None" = None
    """The launcher's config with the `overrides` for this experiment; None: no override."""


QUEUE_STOPPED = "in a row failed within 60 s of their start"
"""Part of the reason for each experiment that was not started because of `stop_after_failures`."""


@dataclass(frozen=True)
class SchedulerState:
    """The state of one job, from its scheduler."""

    state: Literal["queued", "running", "completed", "failed", "cancelled", "unknown"]
    word: str = ""
    """The scheduler's own word, such as NODE_FAIL."""
    reason: str = ""
    """Why the job waits, or how it ended."""
    node: str = ""
    seconds: float | None = None
    """Run time of the current or last attempt."""
    restarts: int = 0


class LauncherConfig(Component):
    """A launcher: the fields of an entry of job_configs.py, and how to submit, query and kill jobs."""

    holds_jobs: ClassVar[bool] = False
    """Whether `hold` and `release` work on queued jobs."""

    @abstractmethod
    def submit(self, jobs: Sequence[Job], folder: Path, note: Note) -> list[str]:
        """Queue `jobs`, parents before children; return their job ids, in the same order.
        folder: folder of the submission, for the launcher's files.

        Calls `note` with the ids as soon as they are known, so that no queued job is forgotten. Each job appends its
        output to its logs.

        Raises:
            LaunchError: the scheduler refuses or does not answer. Jobs that were queued are cancelled.
            RunError: the disk refuses. Jobs that were queued are cancelled.
        """

    @abstractmethod
    def states(self, job_ids: Sequence[str]) -> dict[str, SchedulerState]:
        """The state of each job that the scheduler knows. Uses a few calls for any number of jobs.

        Raises:
            LaunchError: the scheduler does not answer.
        """

    @abstractmethod
    def kill(self, job_ids: Sequence[str]) -> None:
        """End the jobs for good. Jobs that have ended or are unknown are ignored.

        Raises:
            LaunchError: the scheduler refuses.
        """

    @abstractmethod
    def find(self, folder: Path, exp_ids: Sequence[str]) -> dict[str, str]:
        """{experiment id: job id} of the jobs that an interrupted submission with this folder queued, noted or not.

        `status` stops waiting for this call after some seconds, and it continues in a thread. Actions that depend on
        its result belong in `forbid`.

        Raises:
            LaunchError: the scheduler does not answer.
        """

    def forbid(self, folder: Path, exp_ids: Sequence[str]) -> None:
        """Keep jobs that `find` did not return from starting: a request can still be on its way to the scheduler.

        Raises:
            RunError: the disk refuses.
        """

    def wait_for(self, job_ids: Sequence[str]) -> None:
        """Wait until the jobs have ended, if this launcher does that."""

    def check(self) -> None:
        """Raise LaunchError if no job could be queued from here."""

    def scheduler(self) -> object:
        """Identifies the scheduler: launchers with equal name and value can query their jobs in one call."""
        return None

    def hold(self, job_ids: Sequence[str]) -> None:
        """Keep queued jobs from starting; only where `holds_jobs`."""

    def release(self, job_ids: Sequence[str]) -> None:
        """Let held jobs start; only where `holds_jobs`."""

    def throttle(self, job_ids: Sequence[str], max_running: int) -> None:
        """Run at most `max_running` of the queued jobs that were submitted together at a time; 0: no limit.

        Raises:
            LaunchError: this launcher cannot, or the scheduler refuses.
        """
        raise LaunchError(
            f"launcher {self.name}: cannot change how many queued jobs run at a time. Only slurm can. "
            "To stop some of them, use --job_option kill."
        )


def bind_launcher(raw: object) -> LauncherConfig:
    """The launcher that `raw["launcher"]` names. Raises `config.Problems`: everything wrong with `raw`, by path."""
    return bind(LAUNCHERS, raw, key="launcher")


class NoAnswer(LaunchError):
    """The scheduler did not answer in time. It is unknown whether the request was or will be carried out."""


def retry_until_answered(call: Callable[[float], T], patience_seconds: float) -> T:
    """Repeat an idempotent call until it does not raise `NoAnswer`; return its result. It gets a timeout in seconds.

    Raises:
        NoAnswer: no answer within `patience_seconds`.
    """
    deadline, wait = time.monotonic() + patience_seconds, 0.25
    while True:
        try:
            return call(max(0.1, (deadline - time.monotonic()) / 2))
        except NoAnswer:
            if time.monotonic() + wait >= deadline:
                raise
        time.sleep(wait)
        wait = min(2 * wait, 8.0)


def query_schedulers(calls: Sequence[Callable[[], T]], seconds: float | None) -> list[T | LaunchError]:
    """The result of each call to a scheduler, or its LaunchError.
    Calls that take longer than `seconds` are abandoned; None: wait for all."""

    def answer(call: Callable[[], T]) -> T | LaunchError:
        try:
            return call()
        except LaunchError as error:
            return error

    if seconds is None:
        return [answer(call) for call in calls]
    results: dict[int, T | LaunchError | Exception] = {}

    def work(place: int) -> None:
        try:
            results[place] = answer(calls[place])
        except Exception as error:  # noqa: BLE001  raised below, in the calling thread
            results[place] = error

    # Daemon threads, so that a hanging scheduler does not keep this process alive.
    workers = [threading.Thread(target=work, args=(place,), daemon=True) for place in range(len(calls))]
    until = time.monotonic() + seconds
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(max(0.0, until - time.monotonic()))
    timeout_error = LaunchError(f"the scheduler did not answer in {seconds:.2g} s, so the state of the job is unknown")
    answers = [results.get(place, timeout_error) for place in range(len(calls))]
    for each in answers:
        if isinstance(each, Exception) and not isinstance(each, LaunchError):
            raise each
    return answers  # type: ignore[return-value]
