"""Tag and annotate runs; ids do not change: `python -m results.note RUN .. [--tag T ..] [--untag T ..] [--note TEXT]`.

Tables and the dashboard show tags and can filter by them: `--where "'good' in tags"`. Without an option, print them.
"""

import argparse
import sys
from collections.abc import Sequence
from typing import Literal, TypedDict

from src.errors import ConfigError, print_errors
from src.runs.store import SavedRun
from src.support import documents
from src.support.command_line import make_parser
from src.tables import run_arguments


class Remark(TypedDict):
    """Remarks of a person on a run."""

    exp_id: str
    tags: list[str]
    note: str


class Document(documents.Document):
    """Tags and notes, after the change."""

    schema: Literal["results.note/1"]
    runs: list[Remark]


@print_errors
def main(arguments: Sequence[str] | None = None) -> int:
    """Change tags and notes, and print the result. Returns the exit code."""
    options = run_arguments.parse(_parser(), arguments)
    for tag in options.tag:
        if not tag.strip() or "," in tag:
            raise ConfigError(f"--tag: expected one or a few words without a comma, got {tag!r}.")
    changes = options.tag or options.untag or options.note is not None
    if changes and not (options.paths or options.groups or options.where):
        raise ConfigError(
            "--tag, --untag, --note: no runs are chosen. Name ids, a group with -e, or an expression with --where."
        )
    rows: list[Remark] = []
    for run in map(SavedRun, dict.fromkeys(run_arguments.paths(options, at_least=1))):
        if changes:
            run.write_remarks(options.tag, options.untag, options.note)
        tags, note = run.remarks
        rows.append({"exp_id": run.name, "tags": tags, "note": note})
    run_arguments.show(options.output, "results.note/1", {"runs": rows}, lambda: print("\n".join(map(_line, rows))))
    return 0


def _line(row: Remark) -> str:
    return "  ".join(filter(None, [row["exp_id"][:8], " ".join(f"#{tag}" for tag in row["tags"]), row["note"]]))


def _parser() -> argparse.ArgumentParser:
    parser = make_parser("results.note", __doc__)
    run_arguments.add(parser)
    parser.add_argument("--tag", nargs="+", action="extend", default=[], metavar="T", help="add these tags")
    parser.add_argument("--untag", nargs="+", action="extend", default=[], metavar="T", help="remove these tags")
    parser.add_argument("--note", metavar="TEXT", help='replace the note; "" removes it')
    return parser


if __name__ == "__main__":
    sys.exit(main())
