"""What a recipe is given to run one experiment: its save directory, where things are, how to report."""

from dataclasses import dataclass, field
from pathlib import Path

from src.config import Places
from src.experiments.rundir import RunDir


@dataclass(frozen=True)
class Wandb:
    """Where Weights & Biases logs go: online when entity and project are both given, else to files in the save directory."""

    entity: str | None
    project: str | None
    name: str | None
    gradients: bool


@dataclass(frozen=True)
class Options:
    """Choices of the command line that change no number of a training."""

    log_every: int | None = None
    """Optimizer steps between score rows and between checkpoints; None: at each evaluation."""
    wandb: Wandb | None = None


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
