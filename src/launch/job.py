"""The interface of a launcher: what it is given and what it answers."""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from src.interfaces import Component
from src.registry import LAUNCHERS, bind

Note = Callable[[Mapping[str, str]], None]
"""Called by a launcher with {exp_id: job id} as soon as the scheduler has given ids, before anything else can fail."""


@dataclass(frozen=True)
class Job:
    """One experiment to be run somewhere."""

    exp_id: str
    args: tuple[str, ...]
    """trainval.py and its arguments, as they must arrive."""
    cwd: Path
    """The folder that holds trainval.py: a snapshot of the code."""
    run: Path
    """The save directory of the experiment."""
    log_dir: Path
    """What the job prints is appended to <log_dir>/<exp_id>.out.log and <exp_id>.err.log."""
    python_binary: str | None = None
    """What stands before `args`, in bash: "source activate ENV ; torchrun --nproc-per-node NGPUS ". None: as the launcher's config says."""
    after: tuple[str, ...] = ()
    """Ids of experiments that must have ended well before it starts, as far as they stand before it in the same submission."""
    after_jobs: tuple[str, ...] = ()
    """Job ids of the same launcher, from earlier submissions, that must have ended well before it starts."""
    resources: "LauncherConfig | None" = None
    """The launcher's config with what `overrides` say of this experiment; None: as for all."""


@dataclass(frozen=True)
class SchedulerState:
    """What a scheduler says of one job."""

    state: Literal["queued", "running", "completed", "failed", "cancelled", "unknown"]
    word: str = ""
    """Its own word, such as NODE_FAIL."""
    reason: str = ""
    """Why it waits, or how it ended."""
    node: str = ""
    seconds: float | None = None
    """Run time of the present or last attempt."""
    restarts: int = 0


class LauncherConfig(Component):
    """Where jobs run: all that an entry of job_configs.py may say of it."""

    holds_jobs: ClassVar[bool] = False
    """Whether a queued job can be kept from starting, by `hold` and `release`."""

    @abstractmethod
    def submit(self, jobs: Sequence[Job], folder: Path, note: Note) -> list[str]:
        """Queue `jobs`, with files of the launcher's own in the folder of the submission; their job ids, in order.

        Calls `note` with the ids as soon as there are any, so that nothing that was queued is forgotten.

        Raises:
            LaunchError: the scheduler refuses. Nothing stays queued.
        """

    @abstractmethod
    def states(self, job_ids: Sequence[str]) -> dict[str, SchedulerState]:
        """What the scheduler says of each job that it knows, with at most two calls however many.

        Raises:
            LaunchError: it cannot be asked.
        """

    @abstractmethod
    def kill(self, job_ids: Sequence[str]) -> None:
        """End what is alive. Jobs that have ended are left alone.

        Raises:
            LaunchError: the scheduler refuses.
        """

    @abstractmethod
    def find(self, folder: Path, exp_ids: Sequence[str]) -> dict[str, str]:
        """{experiment id: job id} of the jobs that an interrupted submission with this folder has left.

        Raises:
            LaunchError: the scheduler cannot be asked.
        """

    def wait_for(self, job_ids: Sequence[str]) -> None:
        """Stay until the jobs have ended, where the launcher is one that does."""

    def check(self) -> None:
        """Raises LaunchError where no job could be queued from here."""

    def scheduler(self) -> object:
        """What launchers must share for their jobs to be asked for in one call, beside their name."""
        return None

    def hold(self, job_ids: Sequence[str]) -> None:
        """Keep queued jobs from starting; only where `holds_jobs`."""

    def release(self, job_ids: Sequence[str]) -> None:
        """Let held jobs start; only where `holds_jobs`."""


def bind_launcher(raw: object) -> LauncherConfig:
    """The launcher that `raw["launcher"]` names. Raises `config.Problems`: everything wrong with `raw`, by path."""
    return bind(LAUNCHERS, raw, key="launcher")
