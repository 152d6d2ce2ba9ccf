"""A sweep file in the schema of Weights & Biases, and its experiments."""

import argparse
import os
import random
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

from pydantic import Field, model_validator

from src.errors import ConfigError, UserError
from src.experiments import config
from src.experiments.config import Places
from src.experiments.grid import parse_assignment, set_path
from src.files import read_yaml
from src.runs import plan
from src.sweeps.search_space import (
    SearchDimension,
    agent_argument,
    grid_draws,
    parse_dimensions,
    random_values,
    values_of,
)
from src.tables.results import DIAGNOSTICS

TRIES = 50
"""Number of random combinations to try with a value before it is reported as invalid."""
MAX_CHECKED = 2000
"""Maximum combinations of a grid to check before its first trial; invalid later ones fail as trials."""
PARAMETERS = "${args_no_hyphens}"
"""The macro of `wandb agent` that becomes path=value for each parameter."""
_MACRO = re.compile(r"\$\{(\w+)\}")
_VARIABLE = re.compile(r"\$\{envvar:([A-Z0-9_]*)\}")


class Metric(config.Config):
    """The objective: a score in scores.jsonl. The value of a trial is its last one, as for wandb."""

    name: str = Field(min_length=1)
    goal: Literal["minimize", "maximize"] = "minimize"
    target: float | None = None
    """No new trial is started once a trial has reached it."""


class EarlyTerminate(config.Config):
    """When to stop bad trials. An iteration is one row of scores with the metric, as for wandb."""

    type: Literal["hyperband", "median"]
    """"median" (not in wandb): stop a trial that is worse than the median of all trials at the same iteration."""
    min_iter: int | None = Field(default=None, ge=1)
    """The first iteration at which a trial can be stopped."""
    max_iter: int | None = Field(default=None, ge=2)
    """Iterations of a complete training; None: as many as the first trial that ends."""
    eta: int = Field(default=3, ge=2)
    """One in `eta` trials continues at each bracket."""
    s: int | None = Field(default=None, ge=1)
    """Number of brackets, counted back from `max_iter`."""

    @model_validator(mode="after")
    def _enough(self) -> "EarlyTerminate":
        if self.type == "median":
            if ignored := {"max_iter", "eta", "s"} & self.model_fields_set:
                raise ValueError(f"type 'median' takes only min_iter. Remove {', '.join(sorted(ignored))}.")
        elif (self.min_iter is None) == (self.max_iter is None or self.s is None):
            raise ValueError("hyperband needs min_iter, or max_iter and s.")
        elif self.s is not None and self.max_iter is None:
            raise ValueError("s counts brackets back from max_iter: give both, or only min_iter.")
        elif self.max_iter is not None and self.first >= self.max_iter:
            raise ValueError(
                f"max_iter: {self.max_iter}, but the first bracket is at iteration {self.first}. "
                "Raise max_iter, or lower min_iter."
            )
        return self

    @property
    def first(self) -> int:
        """The first iteration at which a trial can be stopped."""
        if self.max_iter is not None and self.s is not None and self.min_iter is None:
            return max(1, self.max_iter // self.eta**self.s)
        return self.min_iter or 1


class SweepFile(config.Config):
    """The keys of a sweep file. `entity` and `project` are for a server and have no effect here."""

    program: str = Field(min_length=1)
    method: Literal["grid", "random", "bayes"]
    parameters: dict[str, Any] = Field(min_length=1)
    """Checked by `parse_dimensions`."""
    command: list[str | int | float] = Field(min_length=1)
    """Checked by `parse_command`."""
    metric: Metric | None = None
    early_terminate: EarlyTerminate | None = None
    run_cap: Annotated[int, Field(ge=1)] | None = None
    """Maximum number of trials."""
    name: str | None = Field(default=None, pattern=r"^\w[\w.-]*$")
    """Name of the study and of the group of its trials; None: the file's name."""
    description: str | None = None
    entity: str | None = None
    project: str | None = None

    @model_validator(mode="after")
    def _has_metric(self) -> "SweepFile":
        if self.metric is None and (self.method == "bayes" or self.early_terminate):
            setting = "early_terminate" if self.early_terminate else "method 'bayes'"
            raise ValueError(f"metric: missing. {setting} needs one: metric: {{name: val_loss, goal: minimize}}.")
        return self


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


@dataclass(frozen=True)
class Command:
    """A validated command. start: up to the program; rest: arguments that do not select the experiment."""

    start: list[str]
    rest: list[str]
    group: str | None
    """GROUP or GROUP[i], as -e gives it."""
    exp_id: str | None
    assignments: list[tuple[str, Any]]
    """Assignments of --set and --steps, equal in all trials."""
    where: str

    def argv(self, exp_id: str, places: Places, values: Sequence[str] = ()) -> list[str]:
        """The command line of one trial: the same program and arguments, with an id instead of the experiment."""
        paths = ["-sb", str(places.runs.resolve()), "--data_path", str(places.data.resolve())]
        return [*self.start, "--exp_id", exp_id, *paths, *values, *self.rest]


def parse_command(command: Sequence[Any], program: str, where: str) -> Command:
    """Check the `command` list of a sweep file.

    Raises:
        ConfigError: the parameters do not reach --set, the program does not exist, or the arguments do not name exactly
            one experiment.
    """
    words = [_VARIABLE.sub(lambda match: os.environ.get(match[1], match[1]), str(item)) for item in command]
    if "${program}" not in words:
        raise ConfigError(f"{where}: ${{program}} is missing. Add it: wandb agent replaces it by {program}.")
    at = words.index("${program}")
    if PARAMETERS not in words[at:] or words.index(PARAMETERS) < at + 2:
        raise ConfigError(f"{where}: the parameters must reach the program: end it with --set and {PARAMETERS}.")
    macros = {"${env}": "/usr/bin/env", "${interpreter}": sys.executable, "${program}": program}
    for item in words:
        if _MACRO.fullmatch(item) and item not in macros and item != PARAMETERS:
            raise ConfigError(f"{where}: {item}: trainval.py takes parameters only as --set {PARAMETERS}.")
    if not Path(program).is_file():
        raise ConfigError(
            f"{where}: program {program!r}: no such file in {Path.cwd()}. Run the sweep in the project's folder."
        )
    parser = _Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("-e", "--exp_group", "--exp_group_list", nargs="+", dest="groups", default=[])
    parser.add_argument("--exp_id")
    parser.add_argument("--set", nargs="+", action="extend", default=[])
    parser.add_argument("--steps", type=int)
    for name in ("-sb", "--savedir_base", "--data_path", "-j", "--j", "--job_scheduler", "-r", "--reset"):
        parser.add_argument(name, dest="refused", action="append")
    try:
        args, rest = parser.parse_known_args(words[at + 1 :])
        if args.refused:
            raise ConfigError(
                "-sb, --data_path, -r and -j are not allowed here. Give the former two to the sweep's command line."
            )
        if args.set.count(PARAMETERS) != 1:
            raise ConfigError(f"expected {PARAMETERS} once, after --set.")
        if len(args.groups) + bool(args.exp_id) != 1:
            raise ConfigError(
                "a sweep starts from one experiment: name it once, with -e GROUP, -e GROUP[0] or --exp_id."
            )
        assignments = [parse_assignment(text) for text in args.set if text != PARAMETERS]
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    if args.steps is not None:
        assignments.append(("loop.steps", args.steps))
    start = [macros.get(item, item) for item in words[: at + 1]]
    return Command(start, rest, args.groups[0] if args.groups else None, args.exp_id, assignments, where)


@dataclass(frozen=True)
class Source:
    """The experiment that a sweep starts from."""

    exp: dict[str, Any]
    experiments: Mapping[str, plan.PlannedExperiment]
    """Every experiment of exp_configs.py by id, to look up parents."""
    where: str

    def trial(self, values: Mapping[str, Any], where: str) -> plan.PlannedExperiment:
        """The experiment with `values`, by dotted path.

        Raises:
            ConfigError: --set would parse a value differently, or the experiment does not accept it.
        """
        exp = self.exp
        for path, value in values.items():
            exp = set_path(exp, path, parse_assignment(agent_argument(path, value, where))[1], must_exist=False)
        return plan.load(exp, "", where)


def find_source(command: Command, groups: Any, runs: Path) -> Source:
    """The experiment of exp_configs.py that `command` names.

    Raises:
        ConfigError: there is no such experiment, or several, or the command's --set is invalid.
    """
    experiments = plan.load_all(groups)
    if command.group is None:
        assert command.exp_id is not None
        item = plan.find(command.exp_id, experiments, runs)
        items = plan.load_groups({command.exp_id: [item.with_operational]}, [command.exp_id], command.assignments)
    else:
        name = command.group
        if isinstance(groups.get(name), list) and len(groups[name]) > 1:
            raise ConfigError(
                f"{command.where}: -e {name}: a sweep starts from one experiment; choose {name}[0] to "
                f"{name}[{len(groups[name]) - 1}]."
            )
        items = plan.load_groups(groups, [name], command.assignments)
    return Source(items[0].with_operational, experiments, items[0].where)


def check_metric(item: plan.PlannedExperiment, metric: str, places: Places, where: str) -> None:
    """Raise ConfigError, with the known names, if the experiment does not log the metric."""
    if metric in ("train_loss", *DIAGNOSTICS):
        return
    try:  # the recipe knows its scores: the choices of loop.best_metric
        exp = set_path(item.with_operational, "loop.best_metric", metric, must_exist=False)
        plan.load(exp, "", where).recipe.check(places)
    except UserError as error:
        for line in str(error).splitlines():
            if line.startswith("loop.best_metric: "):
                message = line.removeprefix("loop.best_metric: ")
                raise ConfigError(f"{where}: {message} train_loss is logged as well.") from None


@dataclass(frozen=True)
class Sweep:
    """A validated sweep."""

    name: str
    file: SweepFile
    dimensions: list[SearchDimension]
    command: Command
    source: Source
    places: Places
    example: plan.PlannedExperiment | None = None

    @property
    def group(self) -> str:
        return f"sweep/{self.name}"

    @property
    def metric(self) -> str | None:
        return self.file.metric.name if self.file.metric else None

    def identity(self) -> dict[str, Any]:
        """Facts that all workers must agree on, as JSON values."""
        keys = {"method", "parameters", "metric"}
        return {**self.file.model_dump(mode="json", include=keys, exclude_none=True), "experiment": self.source.exp}


def load(path: Path, places: Places) -> Sweep:
    """Read the sweep file `path` and check everything that can be checked before the first trial.

    Raises:
        ConfigError: one line for each mistake, with file and path.
    """
    where = str(path)
    file = config.load(SweepFile, read_yaml(path, "the keys of a sweep (program, method, parameters, command)"), where)
    dimensions = parse_dimensions(file.parameters, f"{where}: parameters", file.method == "grid")
    command = parse_command(file.command, file.program, f"{where}: command")
    source = find_source(command, plan.read_groups(), places.runs)
    places = Places(places.data, places.runs, {exp_id: item.exp for exp_id, item in source.experiments.items()})
    sweep = Sweep(file.name or path.stem, file, dimensions, command, source, places)
    item = check_values(sweep, f"{where}: parameters")
    if sweep.metric is not None:
        check_metric(item, sweep.metric, places, f"{where}: metric.name")
    return replace(sweep, example=item)


def check_values(sweep: Sweep, where: str) -> plan.PlannedExperiment:
    """Check that each value, and each bound, is part of some valid combination; return one such experiment.

    Raises:
        ConfigError: names the parameter and the reason.
    """
    draws, dimensions = random.Random(0), sweep.dimensions
    if sweep.file.method == "grid":
        attempts = [[values] for values in combinations(sweep)[:MAX_CHECKED]]
    else:
        ends = [
            {each.path: value}
            for each in dimensions
            for value in (each.choices[:TRIES] if each.kind == "choice" else (each.low, each.high))
        ]
        attempts = [[random_values(dimensions, draws) | end for _ in range(TRIES)] for end in ends]
    mistakes: list[str] = []
    example: plan.PlannedExperiment | None = None
    for alternatives in attempts:
        refusals: list[str] = []
        for values in alternatives:
            try:
                example, refusals = sweep.source.trial(values, where), []
                break
            except ConfigError as error:
                refusals.append(str(error))
        mistakes += refusals[0].splitlines() if refusals else []
    if mistakes or example is None:
        raise ConfigError("\n".join(dict.fromkeys(mistakes)))
    return example


def combinations(sweep: Sweep) -> list[dict[str, Any]]:
    """Every combination of a grid: dotted path -> value."""
    return [values_of(sweep.dimensions, numbers) for numbers in grid_draws(sweep.dimensions)]
