"""A sweep file in the schema of Weights & Biases, and the experiments that it would try."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from src.errors import ConfigError
from src.experiments import config as configs
from src.experiments.config import Places
from src.files import read_yaml
from src.runs import plan
from src.sweeps import command as sweep_command
from src.sweeps import space as sweep_space
from src.sweeps.space import SearchDimension

TRIES = 50
"""Random combinations that are tried with a value before it is reported as one that no experiment accepts."""
MAX_CHECKED = 2000
"""Combinations of a grid that are checked before its first trial; a later one would fail as a trial."""


class Metric(configs.Config):
    """The objective: a score of scores.jsonl. The value of a trial is the last one it reports, as for wandb."""

    name: str = Field(min_length=1)
    goal: Literal["minimize", "maximize"] = "minimize"
    target: float | None = None
    """No trial is started once one has reached it."""


class EarlyTerminate(configs.Config):
    """When a bad trial is stopped. An iteration is one row of scores that has the metric, as for wandb."""

    type: Literal["hyperband", "median"]
    """"median", which wandb does not have: worse than the median of the others at the same iteration."""
    min_iter: int | None = Field(default=None, ge=1)
    """The first iteration at which a trial may be stopped."""
    max_iter: int | None = Field(default=None, ge=2)
    """Iterations of a whole training; None: as many as the first trial that ends."""
    eta: int = Field(default=3, ge=2)
    """One trial in `eta` goes on at each bracket."""
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
    """The keys of a sweep file. `entity` and `project` are for a server and have no effect here."""

    program: str = Field(min_length=1)
    method: Literal["grid", "random", "bayes"]
    parameters: dict[str, Any] = Field(min_length=1)
    """Checked by `sweep_space.parse_dimensions`."""
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


@dataclass(frozen=True)
class Sweep:
    """A checked sweep."""

    name: str
    file: SweepFile
    dimensions: list[SearchDimension]
    command: sweep_command.Command
    source: sweep_command.Source
    places: Places
    example: plan.Planned | None = None
    """One of the experiments that it may try."""

    @property
    def group(self) -> str:
        """The group of its trials."""
        return f"sweep/{self.name}"

    @property
    def metric(self) -> str | None:
        """Its name."""
        return self.file.metric.name if self.file.metric else None

    def identity(self) -> dict[str, Any]:
        """What all workers must agree on, as JSON values."""
        keys = {"method", "parameters", "metric"}
        return {**self.file.model_dump(mode="json", include=keys, exclude_none=True), "experiment": self.source.exp}

    def check_place(self) -> None:
        """Check that this machine has what a trial needs, such as its data and a parent.

        Raises:
            ConfigError: one line for each lack.
        """
        lacks = plan.find_problems([self.example], self.places) if self.example else {}
        if lacks:
            raise ConfigError("\n".join(message for messages in lacks.values() for message in messages))

    def describe(self, total: int) -> list[str]:
        """The dry run: the first trials of a grid, or an example, and the command."""
        is_grid = self.file.method == "grid"
        made = combinations(self)[:total] if is_grid else [random_values(self.dimensions, random.Random(0))]
        goal = f"{self.file.metric.goal} {self.metric}" if self.file.metric else "no metric"
        lines = [self.file.description] if self.file.description else []
        lines += [
            f"{self.group}: {self.file.method}, {total} trials that start from {self.source.where}, {goal}; such as"
        ]
        for values in made:
            item = self.source.trial(values, "parameters")
            lines.append(f"{item.exp_id}  {' '.join(f'{path}={value}' for path, value in values.items())}")
        return [*lines, " ".join(self.command.argv("ID", self.places))]


def load(path: Path, places: Places) -> Sweep:
    """Read the sweep file `path` and check everything that can be checked before the first trial.

    Raises:
        ConfigError: one line for each mistake, with file and path.
    """
    where = str(path)
    file = configs.load(SweepFile, read_yaml(path, "the keys of a sweep (program, method, parameters, command)"), where)
    dimensions = sweep_space.parse_dimensions(file.parameters, f"{where}: parameters")
    if file.method == "grid":
        dimensions = sweep_space.grid_dimensions(dimensions, f"{where}: parameters")
    command = sweep_command.parse(file.command, file.program, f"{where}: command")
    source = sweep_command.find_source(command, plan.read_groups(), places.runs)
    places = Places(places.data, places.runs, {exp_id: item.exp for exp_id, item in source.known.items()})
    sweep = Sweep(file.name or path.stem, file, dimensions, command, source, places)
    item = check_values(sweep, f"{where}: parameters")
    if sweep.metric is not None:
        sweep_command.check_metric(item, sweep.metric, places, f"{where}: metric.name")
    return replace(sweep, example=item)


def check_values(sweep: Sweep, where: str) -> plan.Planned:
    """Check that each value, and each bound, makes a valid experiment with some of the others; one such experiment.

    Raises:
        ConfigError: names the parameter and the reason.
    """
    draws = random.Random(0)
    if sweep.file.method == "grid":
        attempts = [[values] for values in combinations(sweep)[:MAX_CHECKED]]
    else:
        attempts = [
            [random_values(sweep.dimensions, draws) | {dimension.path: dimension.value(end)} for _ in range(TRIES)]
            for dimension in sweep.dimensions
            for end in (
                range(len(dimension.choices))[:TRIES] if dimension.kind == "choice" else (dimension.low, dimension.high)
            )
        ]
    mistakes: list[str] = []
    example: plan.Planned | None = None
    for alternatives in attempts:
        refusals = []
        for values in alternatives:
            try:
                example = sweep.source.trial(values, where)
                break
            except ConfigError as error:
                refusals.append(str(error))
        else:
            mistakes += refusals[0].splitlines()
    if mistakes or example is None:
        raise ConfigError("\n".join(dict.fromkeys(mistakes)))
    return example


def random_values(dimensions: Sequence[SearchDimension], draws: random.Random) -> dict[str, Any]:
    """One random combination: dotted path -> value."""

    def draw(dimension: SearchDimension) -> float:
        if dimension.kind in ("choice", "int"):
            return draws.randint(int(dimension.low), int(dimension.high))
        return draws.uniform(dimension.low, dimension.high)

    return {dimension.path: dimension.value(draw(dimension)) for dimension in dimensions}


def combinations(sweep: Sweep) -> list[dict[str, Any]]:
    """Every combination of a grid: dotted path -> value."""
    dimensions = sweep.dimensions
    return [
        {each.path: each.value(indices[each.path]) for each in dimensions}
        for indices in sweep_space.grid_indices(dimensions)
    ]
