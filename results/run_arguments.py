"""What the commands of results share: their arguments `[RUNS] [-e GROUP [GROUP ..]] [RUNS]`, and how they print warnings and pages."""

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from src.command_line import parse_arguments
from src.files import write_atomic, writing

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


def title(groups: Sequence[str] | None) -> str:
    """The name of a file about the groups."""
    return "+".join(groups or ["all"])
