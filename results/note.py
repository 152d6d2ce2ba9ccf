"""Tags and a note on runs, beside them and outside of their ids: `python -m results.note ID.. [--tag T ..] [--untag T ..] [--note TEXT]`.

Tables and the dashboard show them and filter by them: `--where "'good' in tags"`. Without an option they are printed.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from results.diff import resolve
from results.run_arguments import RUNS
from src.errors import ConfigError, print_errors
from src.runs.metadata import read_remarks, write_remarks


@print_errors
def main(arguments: Sequence[str] | None = None) -> int:
    """Write the remarks, and print those that the runs have then. Returns the exit code."""
    options = _parser().parse_args(arguments)
    for tag in options.tag:
        if not tag.strip() or "," in tag:
            raise ConfigError(f"--tag {tag!r}: expected a word or a few, without a comma.")
    runs = [options.runs / resolve(options.runs, given) for given in options.ids]
    for run in runs:
        if options.tag or options.untag or options.note is not None:
            write_remarks(run, options.tag, options.untag, options.note)
        tags, note = read_remarks(run)
        print("  ".join(filter(None, [run.name[:8], " ".join(f"#{tag}" for tag in tags), note])))
    return 0


def _parser() -> argparse.ArgumentParser:
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m results.note", description=__doc__, formatter_class=layout)
    parser.add_argument("ids", nargs="+", metavar="ID", help="id of a run, or its beginning")
    parser.add_argument("--runs", type=Path, default=RUNS, help=f"folder of save directories (default: {RUNS})")
    parser.add_argument("--tag", nargs="+", action="extend", default=[], metavar="T", help="add these tags")
    parser.add_argument("--untag", nargs="+", action="extend", default=[], metavar="T", help="remove these tags")
    parser.add_argument("--note", metavar="TEXT", help='replace the note; "" removes it')
    return parser


if __name__ == "__main__":
    sys.exit(main())
