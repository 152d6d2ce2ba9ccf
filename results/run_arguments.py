"""What the commands of results share: their arguments `[RUNS] [-e GROUP [GROUP ..]] [RUNS]`, and how they print warnings and pages."""

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from src.command_line import parse_arguments
from src.errors import ConfigError
from src.files import write_atomic, writing
from src.tables import curves
from src.tables import rows as results

RUNS = Path("results/runs")


def warn(lines: Iterable[str]) -> None:
    """Print lines to stderr."""
    for line in lines:
        print(line, file=sys.stderr)


def write_page(output: Path, page: str) -> None:
    """Write a page, creating its folder, and print its path.

    Raises:
        RunError: the disk refuses.
    """
    with writing(output):
        output.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(output, page)
    print(output)


def add(parser: argparse.ArgumentParser, about: str) -> None:
    """Add the arguments that `parse` understands. about: of the groups."""
    parser.add_argument("runs", nargs="?", type=Path, help=f"folder of save directories (default: {RUNS})")
    parser.add_argument("-e", "--group", dest="groups", nargs="+", action="extend", metavar="GROUP", help=about)


def parse(parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> argparse.Namespace:
    """`runs` is a folder and `groups` a list of names, or None for all.

    The last word after -e is the folder of the runs, if none stands before it, there are several words and it is a folder.
    """
    options = parse_arguments(parser, arguments)
    groups = list(dict.fromkeys(options.groups or ()))
    if options.runs is None and len(groups) > 1 and Path(groups[-1]).is_dir():
        options.runs = Path(groups.pop())
    options.runs = options.runs or RUNS
    options.groups = groups or None
    return options


def add_values(parser: argparse.ArgumentParser) -> None:
    """Add the options that say which value of which runs a mean is over: see `choose_values`."""
    parser.add_argument("--unfinished", action="store_true", help="means over all runs that have the score (default: those that are done)")
    parser.add_argument("--at-step", type=int, metavar="N", help="the values at exactly this step, also of runs that are not done")
    parser.add_argument("--value", choices=curves.VALUES, default="last", help="which value of a run (default: last)")
    parser.add_argument("--seed-key", default=results.SEED, metavar="KEY", help=f"what means are taken over (default: {results.SEED})")


def choose_values(options: argparse.Namespace, rows: Sequence[results.Row]) -> tuple[list[results.Row], list[str]]:
    """The rows with the values that the options ask for, and warnings. Sets `unfinished` and `seed_key` to what they come to.

    Raises:
        ConfigError: options that contradict each other, or an unknown key.
    """
    if options.at_step is not None and options.value != "last":
        raise ConfigError("--at-step takes the value at one step, --value one of the whole run: leave one of them out.")
    if rows and options.seed_key != results.SEED:
        known = {key for row in rows for key in results.config_keys(row)}
        options.seed_key = results.resolve_key(known, options.seed_key)
        results.check_known("key", [options.seed_key], known, "--seed-key")
    options.unfinished = options.unfinished or options.at_step is not None  # at one step all runs can be compared
    return curves.choose_values(options.runs, rows, options.value, options.at_step)


def title(groups: Sequence[str] | None) -> str:
    """The name of a file about the groups."""
    return "+".join(groups or ["all"])
