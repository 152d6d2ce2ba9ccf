"""docs/flags.md is what the parser says. `python -m tests.core.project.test_flags` writes it."""

import argparse
from pathlib import Path

import pytest

from src.launch import arguments

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "flags.md"
BEGINNING = """# Flags of trainval.py

Written by `python -m tests.core.project.test_flags` from the parser of `src/launch/arguments.py`. Nothing here may
change a number of an experiment, but `--set` and `--steps`, which make another experiment, and `--micro_batch` by
rounding. Every other command, `python -m …`, shows its flags with `--help`.
"""


def row(action: argparse.Action) -> str:
    """One flag as a row of a table."""
    value = action.metavar if isinstance(action.metavar, str) else "\\|".join(map(str, action.choices or ()))
    names = ", ".join(f"`{name}`" for name in action.option_strings)
    takes = (
        "" if action.nargs == 0 else value.replace("true|false", "true\\|false") + (" …" if action.nargs == "+" else "")
    )
    return f"| {names} | {takes} | {action.help} |"


def page() -> str:
    """The whole of docs/flags.md."""
    text = BEGINNING
    for group in arguments.make_parser("", Path("."))._action_groups[2:]:
        visible_actions = [action for action in group._group_actions if action.help is not argparse.SUPPRESS]
        rows = "\n".join(row(action) for action in visible_actions)
        text += (
            f"\n## {(title := group.title or '')[:1].upper()}{title[1:]}\n\n| flag | value | meaning "
            f"|\n|---|---|---|\n{rows}\n"
        )
    return text


def test_the_page_matches_the_parser():
    assert PAGE.read_text() == page(), "write it again: python -m tests.core.project.test_flags"


def test_every_flag_has_a_meaning():
    parser = arguments.make_parser("", ROOT)
    assert not [action.dest for action in parser._actions if not action.help]


@pytest.mark.parametrize(
    "flag", ["-e", "-sb", "-r", "-j", "--exp_id", "--set", "--steps", "--with-parents", "--list", "--log_every"]
)
def test_it_has_the_flags_that_people_know(flag: str):
    assert f"`{flag}`" in PAGE.read_text()


if __name__ == "__main__":
    PAGE.write_text(page())
