"""What a recipe is given to run one experiment: its save directory, where things are, how to report."""

import contextlib
import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from src.config import Places
from src.files import writing
from src.runs.checkpoints.retention import RotationRule
from src.runs.run_dir import RunDir


@dataclass(frozen=True)
class Wandb:
    """Where Weights & Biases logs go: online when entity and project are both given, else to files in the save directory."""

    entity: str | None
    project: str | None
    name: str | None
    gradients: bool


@dataclass(frozen=True)
class Limits:
    """What ends a training before its last step, in order: it is to be started again."""

    end: float | None = None
    """Of time.monotonic(), in seconds."""
    host_memory: float | None = None
    """Share of the host's memory that may be in use."""


@dataclass(frozen=True)
class Options:
    """Choices of the command line that change no number of a training."""

    log_every: int | None = None
    """Optimizer steps between score rows and between checkpoints; None: at each evaluation."""
    wandb: Wandb | None = None
    deepspeed: Path | None = None
    """Settings of DeepSpeed ZeRO; None: every process has the whole model."""
    fsdp: bool = False
    """Whether the processes share the model (FSDP2)."""
    gradient_checkpointing: bool = False
    """Whether layers keep only their inputs and are computed again in the backward pass: the same bits, less memory, a third more time."""
    offload_activations: bool = False
    """Whether what the backward pass needs waits in the host's memory: the same bits."""
    statistics_every: int = 50
    """Optimizer steps between the records of statistics.jsonl; 0: there are none."""
    limits: Limits = field(default_factory=Limits)
    num_workers: int | None = None
    """Processes that read data beside each training process; None: 2 beside a GPU, else none."""
    keep: RotationRule = field(default_factory=RotationRule)
    """Which checkpoints stay."""
    launcher_settings: Mapping[str, str | float] = field(default_factory=dict)
    """What the launcher was told of the experiment, by name: `LoopConfig.agree` refuses what differs."""


@dataclass(frozen=True)
class Run:
    """One experiment in this process."""

    dir: RunDir
    places: Places
    options: Options = field(default_factory=Options)

    @property
    def path(self) -> Path:
        """The save directory."""
        return self.dir.path


@contextlib.contextmanager
def log_to_file(folder: Path, loggers: Iterable[str]) -> Iterator[None]:
    """Append what `loggers` say to <folder>/train.log, as long as the disk takes it. None given: nothing is written.

    Raises:
        RunError: the file cannot be made.
    """
    names = list(loggers)
    if not names:
        yield
        return
    with writing(folder):
        folder.mkdir(exist_ok=True)
        handler = logging.FileHandler(folder / "train.log", encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    handler.handleError = lambda record: None
    for name in names:
        logging.getLogger(name).addHandler(handler)
    try:
        yield
    finally:
        for name in names:
            logging.getLogger(name).removeHandler(handler)
        with contextlib.suppress(OSError):
            handler.close()
