"""A sweep file in the schema of Weights & Biases, read and checked; what only a server could do with it is refused."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from src import config as configs
from src.files import read_yaml


class Metric(configs.Config):
    """What the sweep looks for: a score of scores.jsonl. The value of a trial is the last one it reports, as for wandb."""

    name: str = Field(min_length=1)
    goal: Literal["minimize", "maximize"] = "minimize"
    target: float | None = None
    """No trial is begun once one has reached it."""


class EarlyTerminate(configs.Config):
    """When a trial that does badly is stopped. An iteration is one row of scores that has the metric, as for wandb."""

    type: Literal["hyperband", "median"]
    """"median" is known here alone: worse than the median of the others at the same iteration."""
    min_iter: int | None = Field(default=None, ge=1)
    """The first iteration at which a trial may be stopped."""
    max_iter: int | None = Field(default=None, ge=2)
    """Iterations of a whole training; None: those of the first trial that ends."""
    eta: int = Field(default=3, ge=2)
    """One in `eta` goes on at each bracket."""
    s: int | None = Field(default=None, ge=1)
    """Brackets, counted back from `max_iter`."""

    @model_validator(mode="after")
    def _enough(self) -> "EarlyTerminate":
        if self.type == "median":
            if {"max_iter", "eta", "s"} & self.model_fields_set:
                raise ValueError("type 'median' has min_iter alone.")
        elif (self.min_iter is None) == (self.max_iter is None or self.s is None):
            raise ValueError("hyperband needs min_iter, or max_iter and s.")
        elif self.s is not None and self.max_iter is None:
            raise ValueError("s counts brackets back from max_iter: give both, or min_iter alone.")
        elif self.max_iter is not None and self.first >= self.max_iter:
            raise ValueError(f"the first bracket would be at iteration {self.first}, and max_iter is {self.max_iter}.")
        return self

    @property
    def first(self) -> int:
        """The first iteration at which a trial may be stopped."""
        if self.max_iter is not None and self.s is not None and self.min_iter is None:
            return max(1, self.max_iter // self.eta**self.s)
        return self.min_iter or 1


class SweepFile(configs.Config):
    """The keys of a sweep file. `entity` and `project` tell a server where to keep it, and mean nothing here."""

    program: str = Field(min_length=1)
    method: Literal["grid", "random", "bayes"]
    parameters: dict[str, Any] = Field(min_length=1)
    """Checked by `sweep_space.axes`."""
    command: list[str | int | float] = Field(min_length=1)
    """Checked by `sweep_command`."""
    metric: Metric | None = None
    early_terminate: EarlyTerminate | None = None
    run_cap: Annotated[int, Field(ge=1)] | None = None
    """Most trials."""
    name: str | None = Field(default=None, pattern=r"^\w[\w.-]*$")
    """Names the study and the group of its trials; None: the file's name."""
    description: str | None = None
    entity: str | None = None
    project: str | None = None

    @model_validator(mode="after")
    def _has_metric(self) -> "SweepFile":
        if self.metric is None and (self.method == "bayes" or self.early_terminate):
            what = "early_terminate" if self.early_terminate else "method 'bayes'"
            raise ValueError(f"metric: missing. {what} needs one: metric: {{name: val_loss, goal: minimize}}.")
        return self


def read(path: Path) -> SweepFile:
    """The sweep file `path`.

    Raises:
        ConfigError: it cannot be read, is no YAML, or has a mistake; names the file, and the line or the key.
    """
    raw = read_yaml(path, "the keys of a sweep (program, method, parameters, command)")
    return configs.load(SweepFile, raw, str(path))
