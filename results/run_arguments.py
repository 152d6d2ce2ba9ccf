"""Which folder of runs and which groups a command of results is about: `[RUNS] [-e GROUP [GROUP ..]] [RUNS]`."""

import argparse
from collections.abc import Sequence
from pathlib import Path

RUNS = Path("results/runs")


def add(parser: argparse.ArgumentParser, about: str) -> None:
    """Add the arguments that `parsed` understands. about: of the groups."""
    parser.add_argument("runs", nargs="?", type=Path, help=f"folder of save directories (default: {RUNS})")
    parser.add_argument("-e", "--group", dest="groups", nargs="+", action="extend", metavar="GROUP", help=about)


def parsed(parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> argparse.Namespace:
    """`runs` is a folder and `groups` a list of names, or None for all.

    The last word after -e is the folder of the runs, if none stands before it, there are several words and it is a folder.
    """
    options = parser.parse_args(arguments)
    groups = list(dict.fromkeys(options.groups or ()))
    if options.runs is None and len(groups) > 1 and Path(groups[-1]).is_dir():
        options.runs = Path(groups.pop())
    options.runs = options.runs or RUNS
    options.groups = groups or None
    return options


def title(groups: Sequence[str] | None) -> str:
    """What a file about the groups is called."""
    return "+".join(groups or ["all"])
