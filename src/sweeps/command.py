"""The command of a sweep file: the experiment that it starts from, and how a trial is started."""

import argparse
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from src.errors import ConfigError, UserError
from src.experiments.config import Places
from src.experiments.grid import parse_assignment, set_path
from src.runs import plan
from src.sweeps.space import agent_argument
from src.tables.rows import DIAGNOSTICS

PARAMETERS = "${args_no_hyphens}"
"""The macro of `wandb agent` that becomes path=value for each parameter."""
_MACRO = re.compile(r"\$\{(\w+)\}")
_VARIABLE = re.compile(r"\$\{envvar:([A-Z0-9_]*)\}")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


@dataclass(frozen=True)
class Command:
    """A checked command. start: up to the program; rest: the program's arguments that do not choose the experiment."""

    start: list[str]
    rest: list[str]
    chosen: str | None
    """GROUP or GROUP[i], as -e gives it."""
    exp_id: str | None
    assignments: list[tuple[str, Any]]
    """Of --set and --steps, the same in every trial."""
    where: str

    def argv(self, exp_id: str, places: Places, values: Sequence[str] = ()) -> list[str]:
        """The command line of one trial: the same program and arguments, with an id for the chosen experiment."""
        paths = ["-sb", str(places.runs.resolve()), "--data_path", str(places.data.resolve())]
        return [*self.start, "--exp_id", exp_id, *paths, *values, *self.rest]


def parse(command: Sequence[Any], program: str, where: str) -> Command:
    """Check the `command` list of a sweep file.

    Raises:
        ConfigError: the parameters do not reach --set, the program is not there, or the arguments name no one
            experiment.
    """
    words = [_VARIABLE.sub(lambda match: os.environ.get(match[1], match[1]), str(item)) for item in command]
    if "${program}" not in words:
        raise ConfigError(f"{where}: ${{program}} is missing; wandb agent puts {program} there.")
    at = words.index("${program}")
    if PARAMETERS not in words[at:] or words.index(PARAMETERS) < at + 2:
        raise ConfigError(f"{where}: the parameters must reach the program: end it with --set and {PARAMETERS}.")
    filled = {"${env}": "/usr/bin/env", "${interpreter}": sys.executable, "${program}": program}
    for item in words:
        if _MACRO.fullmatch(item) and item not in filled and item != PARAMETERS:
            raise ConfigError(f"{where}: {item}: trainval.py takes parameters only as --set {PARAMETERS}.")
    if not Path(program).is_file():
        raise ConfigError(
            f"{where}: program {program!r}: no such file in {Path.cwd()}. Start the sweep in the project's folder."
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
                "-sb, --data_path, -r and -j are for the command line of the sweep, or have no meaning in one."
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
    start = [filled.get(item, item) for item in words[: at + 1]]
    return Command(start, rest, args.groups[0] if args.groups else None, args.exp_id, assignments, where)


@dataclass(frozen=True)
class Source:
    """The experiment that a sweep starts from."""

    exp: dict[str, Any]
    known: Mapping[str, plan.Planned]
    """Every experiment of exp_configs.py by its id: where parents are found."""
    where: str

    def trial(self, values: Mapping[str, Any], where: str) -> plan.Planned:
        """The experiment with `values`, by dotted path.

        Raises:
            ConfigError: a value that --set would read as another, or that the experiment does not take.
        """
        exp = self.exp
        for path, value in values.items():
            exp = set_path(exp, path, parse_assignment(agent_argument(path, value, where))[1], must_exist=False)
        return plan.load(exp, "", where)


def find_source(command: Command, groups: Any, runs: Path) -> Source:
    """The one experiment of exp_configs.py that `command` names.

    Raises:
        ConfigError: none or several, or the command's own --set does not fit.
    """
    known = plan.load_all(groups)
    if command.chosen is None:
        assert command.exp_id is not None
        item = plan.find(command.exp_id, known, runs)
        items = plan.load_groups({command.exp_id: [item.with_operational]}, [command.exp_id], command.assignments)
    else:
        name = command.chosen
        if isinstance(groups.get(name), list) and len(groups[name]) > 1:
            raise ConfigError(
                f"{command.where}: -e {name}: a sweep starts from one experiment; choose {name}[0] to "
                f"{name}[{len(groups[name]) - 1}]."
            )
        items = plan.load_groups(groups, [name], command.assignments)
    return Source(items[0].with_operational, known, items[0].where)


def check_metric(item: plan.Planned, metric: str, places: Places, where: str) -> None:
    """Raises ConfigError, with the known names, if the experiment does not log the metric."""
    if metric in ("train_loss", *DIAGNOSTICS):
        return
    try:
        # The recipe knows its scores: the choices of loop.best_metric.
        changed = plan.load(set_path(item.with_operational, "loop.best_metric", metric, must_exist=False), "", where)
    except ConfigError:
        return
    try:
        changed.recipe.check(places)
    except UserError as error:
        for line in str(error).splitlines():
            if line.startswith("loop.best_metric: "):
                raise ConfigError(
                    f"{where}: {line.removeprefix('loop.best_metric: ')} train_loss is logged, too."
                ) from None
