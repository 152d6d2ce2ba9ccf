"""The arguments of a recipe: save directory, folders of this machine, and options of the command line."""

import contextlib
import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from src.errors import ConfigError
from src.experiments.config import Places
from src.files import writing
from src.runs.checkpoints.retention import RotationRule
from src.runs.run_dir import RunDir

BRIEF_ROW_EVERY = 10
"""Default of --log_every: steps between rows without evaluation. They do not change the rows of evaluations."""


@dataclass(frozen=True)
class Wandb:
    """Weights & Biases: online if entity and project are given, else files in the save directory."""

    entity: str | None
    project: str | None
    name: str | None
    gradients: bool


@dataclass(frozen=True)
class Limits:
    """Limits at which a training stops gracefully, to be resumed."""

    end: float | None = None
    """Time limit, in seconds of time.monotonic()."""
    host_memory: float | None = None
    """Limit of the share of host memory in use."""


@dataclass(frozen=True)
class Options:
    """Options of the command line that do not change the results of a training."""

    log_every: int | None = None
    """Optimizer steps between score rows; None: BRIEF_ROW_EVERY. Each evaluation adds a row."""
    save_every: int | None = None
    """Optimizer steps between checkpoints; None: at each evaluation, and each multiple of `log_every` if given."""
    wandb: Wandb | None = None
    deepspeed: Path | None = None
    """Settings file of DeepSpeed ZeRO; None: no ZeRO."""
    fsdp: bool = False
    """Shard the model over the ranks (FSDP2)."""
    fsdp_replicas: int = 1
    """Number of replicas, each sharded over its part of the ranks (HSDP):
    with one per node, layers are gathered within a node."""
    fsdp_sharded_gradients: bool = False
    """Reduce-scatter gradients after each pass of a step, not only after the last:
    less memory, more communication, different rounding of sums."""
    gradient_checkpointing: str | None = None
    """Recompute layers in the backward pass: the same bits, less memory.
    "full": a third more time; "selective": all but matrix products."""
    offload_activations: bool = False
    """Keep activations in the host's memory until the backward pass: the same bits."""
    profile: int = 0
    """Number of optimizer steps to profile with torch's profiler."""
    statistics_every: int = 50
    """Optimizer steps between records of statistics.jsonl; 0: no records."""
    limits: Limits = field(default_factory=Limits)
    num_workers: int | None = None
    """Data loading processes per rank; None: see `training.loader.StepLoader`."""
    keep: RotationRule = field(default_factory=RotationRule)
    """Rule for which checkpoints to keep."""
    launcher_settings: Mapping[str, str | float] = field(default_factory=dict)
    """Settings of accelerate's launcher by name; `LoopConfig.check_accelerate` compares them with the experiment."""

    def check_parts(self, processes: int) -> None:
        """Raise ConfigError if the number of `processes` does not fit, or FSDP2 options are given without --fsdp."""
        if not self.fsdp:
            refuse_without_fsdp(self)
        if processes % self.fsdp_replicas:
            raise ConfigError(
                f"--fsdp_replicas {self.fsdp_replicas}: {processes} processes cannot be divided into equal parts. "
                f"Use a divisor of {processes}."
            )

    def save_intervals(self, eval_every: int) -> tuple[int, ...]:
        """Intervals in steps: checkpoints are written at the multiples of each."""
        return (self.save_every,) if self.save_every else (self.log_every or eval_every, eval_every)


def refuse_without_fsdp(options: Any) -> None:
    """Raise ConfigError if `options` (`Options` or a command line) has options of FSDP2 without --fsdp."""
    if (options.fsdp_replicas or 1) > 1:
        raise ConfigError("--fsdp_replicas: only for --fsdp. Add it, or leave this out.")
    if options.fsdp_sharded_gradients:
        raise ConfigError("--fsdp_sharded_gradients: only for --fsdp. Add it, or leave this out.")


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
    """Append the messages of `loggers` to <folder>/train.log; later write errors are ignored. Without loggers, no file.

    Raises:
        RunError: the file cannot be created.
    """
    names = list(loggers)
    if not names:
        yield
        return
    with writing(folder):
        folder.mkdir(exist_ok=True)
    with writing(folder / "train.log"):
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
