"""What a launcher is given and what it answers: the contract between `jobs` and each launcher."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from src.config import Config

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
    resources: Config | None = None
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
