"""A sweep whose every part has been checked, and the experiments that it would try."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from src.config import Places, top_level
from src.errors import ConfigError
from src.runs import plan
from src.sweeps import command as sweep_command
from src.sweeps import space as sweep_space
from src.sweeps.file import SweepFile, read
from src.sweeps.space import Axis

TRIES = 50
"""Combinations with a value that are looked at before it is called one that no experiment takes."""
MOST_CHECKED = 2000
"""Combinations of a grid that are checked before its first trial; one after these would fail as a trial."""


@dataclass(frozen=True)
class Sweep:
    """A sweep whose every part has been checked."""

    name: str
    file: SweepFile
    axes: list[Axis]
    command: sweep_command.Command
    source: sweep_command.Source
    places: Places
    example: plan.Planned | None = None
    """One of the experiments that it may try."""

    @property
    def group(self) -> str:
        """What its trials are noted under."""
        return f"sweep/{self.name}"

    @property
    def metric(self) -> str | None:
        """Its name."""
        return self.file.metric.name if self.file.metric else None

    def asked(self) -> dict[str, Any]:
        """What makes it this sweep and no other, JSON values."""
        keys = {"method", "parameters", "metric"}
        return {**self.file.model_dump(mode="json", include=keys, exclude_none=True), "experiment": self.source.exp}

    def check_place(self) -> None:
        """Refuse what this machine lacks for a trial, such as its data or a parent.

        Raises:
            ConfigError: one line for each lack.
        """
        lacks = plan.problems([self.example], self.places) if self.example else {}
        if lacks:
            raise ConfigError("\n".join(message for messages in lacks.values() for message in messages))

    def shown(self, total: int) -> list[str]:
        """What would be tried: the parameters, and the first trials of a grid, or an example of the others."""
        is_grid = self.file.method == "grid"
        made = combinations(self)[:total] if is_grid else [drawn(self.axes, random.Random(0))]
        goal = f"{self.file.metric.goal} {self.metric}" if self.file.metric else "no metric"
        lines = [self.file.description] if self.file.description else []
        lines += [f"{self.group}: {self.file.method}, {total} trials that start from {self.source.where}, {goal}; such as"]
        for values in made:
            item = self.source.trial(values, "parameters")
            lines.append(f"{item.exp_id}  {' '.join(f'{path}={value}' for path, value in values.items())}")
        return [*lines, " ".join(self.command.argv("ID", self.places))]


def load(path: Path, places: Places) -> Sweep:
    """Read the sweep file `path` and check everything that can be checked before the first trial.

    Raises:
        ConfigError: one line for each mistake, with file and path.
    """
    file = read(path)
    where = str(path)
    axes = sweep_space.axes(file.parameters, f"{where}: parameters")
    if file.method == "grid":
        axes = sweep_space.listed(axes, f"{where}: parameters")
    command = sweep_command.parse(file.command, file.program, f"{where}: command")
    source = sweep_command.source(command, top_level("exp_configs", "EXP_GROUPS"), places.runs)
    places = Places(places.data, places.runs, {exp_id: item.exp for exp_id, item in source.known.items()})
    sweep = Sweep(file.name or path.stem, file, axes, command, source, places)
    item = check_values(sweep, f"{where}: parameters")
    if sweep.metric is not None:
        sweep_command.check_metric(item, sweep.metric, places, f"{where}: metric.name")
    return replace(sweep, example=item)


def check_values(sweep: Sweep, where: str) -> plan.Planned:
    """Make sure that each value, and each bound, makes an experiment together with some of the others; gives one such experiment.

    Raises:
        ConfigError: names the parameter and what the experiment says of it.
    """
    draws = random.Random(0)
    mistakes: list[str] = []
    example: plan.Planned | None = None
    made = combinations(sweep) if sweep.file.method == "grid" else []
    for values in made[:MOST_CHECKED]:
        try:
            example = sweep.source.trial(values, where)
        except ConfigError as error:
            mistakes.append(str(error))
    for axis in [] if made else sweep.axes:
        ends = range(int(axis.high) + 1) if axis.kind == "choice" else (axis.low, axis.high)
        for end in list(ends)[:TRIES]:
            refusal = None
            for _ in range(TRIES):
                values = drawn(sweep.axes, draws) | {axis.path: axis.value(end)}
                try:
                    example = sweep.source.trial(values, where)
                    break
                except ConfigError as error:
                    refusal = refusal or str(error)
            else:
                mistakes.append(refusal or "")
    if mistakes or example is None:
        raise ConfigError("\n".join(dict.fromkeys(line for text in mistakes for line in text.splitlines())))
    return example


def drawn(axes: Sequence[Axis], draws: random.Random) -> dict[str, Any]:
    """One random combination: dotted path -> value."""
    return {
        axis.path: axis.value(
            draws.randint(int(axis.low), int(axis.high)) if axis.kind in ("choice", "int") else draws.uniform(axis.low, axis.high)
        )
        for axis in axes
    }


def combinations(sweep: Sweep) -> list[dict[str, Any]]:
    """Every combination of a grid: dotted path -> value."""
    return [{axis.path: axis.value(chosen[axis.path]) for axis in sweep.axes} for chosen in sweep_space.combinations(sweep.axes)]
