"""JSON documents of commands: with --json, standard output has exactly one, and all text goes to standard error."""

import argparse
import contextlib
import dataclasses
import io
import json
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO, TypedDict

OPTION = "--json"
_USAGE = re.compile(r"(?:argument (.+?): )?(.*)", re.DOTALL)
_ADVICE = re.compile(r"(?<=[^.])\.\s+(?=\S)")


Mistake = TypedDict(  # noqa: UP013  in a class, "found" would be a name
    "Mistake", {"kind": str, "where": str | None, "found": str, "advice": str | None}
)
"""An error that the user can fix. kind: class of the error, or `UsageError`. where: file and line, dotted path, option
or experiment. advice: None if it follows from `found`, such as "expected at least 1, got 0"."""


class Document(TypedDict):
    """Members of every document, in addition to `schema`."""

    error: Mistake | None
    """Why the exit code is not 0."""
    more_errors: list[Mistake]
    """Further errors of the same check."""
    warnings: list[str]
    """Lines that the command also prints to standard error."""


_output: TextIO | None = None
_steps: list[dict[str, Any]] = []
_warnings: list[str] = []


@contextlib.contextmanager
def scope() -> Iterator[None]:
    """A command: the effects of `start` and `report` end with the block."""
    global _output, _steps, _warnings
    before = _output, _steps, _warnings, sys.stdout
    _steps, _warnings = [], []
    try:
        yield
    finally:
        _output, _steps, _warnings, sys.stdout = before


def add_option(parser: argparse.ArgumentParser) -> None:
    """Add --json."""
    parser.add_argument(OPTION, action="store_true", help="print one JSON document, for programs")


@contextlib.contextmanager
def parsing(words: Sequence[str]) -> Iterator[None]:
    """A block that parses `words`. With --json, all that is printed from now on goes to standard error, and wrong
    arguments are printed as a `Failure`, too."""
    global _output
    if OPTION not in words:
        yield
        return
    if _output is None:
        _output, sys.stdout = sys.stdout, sys.stderr
    with contextlib.redirect_stderr(io.StringIO()) as text:
        try:
            yield
        except SystemExit as stop:
            sys.stdout.write(text.getvalue())
            if stop.code:
                where, problem = _USAGE.findall(text.getvalue().rstrip().rpartition(": error: ")[2])[0]
                error = Mistake(kind="UsageError", where=where or None, found=problem, advice=None)
                show("error/1", {}, lambda: None, [error])
            raise


def show(
    schema: str,
    content: Mapping[str, Any],
    write: Callable[[], object],
    errors: Sequence[Mistake] = (),
    output: TextIO | None = None,
) -> None:
    """With --json, print the document, with paths as text and null for numbers that are not finite; else call `write`,
    which prints the same as text. output: write the document there."""
    if _output is None:
        write()
        return
    error, *more_errors = errors or [None]
    rest = {"error": error, "more_errors": more_errors, "warnings": _warnings}
    output = output or _output
    output.write(json.dumps(plain({"schema": schema, **content, **rest}), indent=4, allow_nan=False) + "\n")
    output.flush()


def warn(lines: Iterable[str]) -> None:
    """Print lines to standard error. The document has them as `warnings`."""
    for line in lines:
        sys.stderr.write(f"{line}\n")
        _warnings.append(line)


def report(text: str, /, **facts: Any) -> None:
    """Print a line. The document of `show_steps` has its facts."""
    sys.stdout.write(f"{text}\n")
    if facts:
        _steps.append(facts)


def show_steps(command: str) -> None:
    """Print the facts of all `report`s of this command as a `Steps` document."""
    show("data_prep/1", {"command": command, "steps": _steps}, lambda: None)


def show_error(kind: str, message: str) -> None:
    """With --json, print a `Failure`."""
    show("error/1", {}, lambda: None, mistakes(kind, message))


def mistakes(kind: str, message: str) -> list[Mistake]:
    """The parts of each line of an error, "where: found. advice."; `where` and `advice` can be missing."""
    return [_split(kind, line) for line in message.splitlines() or [""]]


def _split(kind: str, line: str) -> Mistake:
    where, colon, rest = line.partition(": ")
    if not colon or _ADVICE.search(where):
        where, rest = "", line
    problem, *advice = _ADVICE.split(rest, maxsplit=1)
    return Mistake(kind=kind, where=where or None, found=problem.rstrip("."), advice=advice[0] if advice else None)


def plain(value: Any) -> Any:
    """`value` as JSON values. NaN and infinite numbers become None."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = dataclasses.asdict(value)
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple | set):
        return [plain(each) for each in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return str(value) if isinstance(value, Path) else value
