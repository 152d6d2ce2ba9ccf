"""Parser, exit codes and child processes for all command lines."""

import argparse
import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from types import FrameType
from typing import BinaryIO, NoReturn

from src.errors import ConfigError, print_errors
from src.support import documents

# Standard input is a pipe that closes when its writer dies. The shell and its watcher ignore stop signals.
_BOUND_COMMAND = (
    'exec 3<&0 < /dev/null; (trap "" TERM INT HUP USR1; read -r _ <&3; kill -s "$0" 0) & exec 3<&-; '
    'trap : TERM INT HUP USR1; "$@"; code=$?; kill -KILL $!; exit $code'
)


def make_parser(module: str, description: str | None) -> argparse.ArgumentParser:
    """The parser for `python -m MODULE`. Its help starts with `description`."""
    layout = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(
        prog=f"python -m {module}", description=description, formatter_class=layout, allow_abbrev=False
    )


def parse_arguments(
    parser: argparse.ArgumentParser, argv: Sequence[str] | None, has_json: bool = False
) -> argparse.Namespace:
    """Parse `argv`. If a shell requests completions (argcomplete), print them and exit.
    has_json: add --json (`src/support/documents.py`). Options cannot be abbreviated, as programs look for `--json`."""
    words = sys.argv[1:] if argv is None else argv
    parser.allow_abbrev = False
    if has_json:
        documents.add_option(parser)
    if "_ARGCOMPLETE" in os.environ:
        import argcomplete

        argcomplete.autocomplete(parser)
    with documents.parsing(words if has_json else ()):
        return parser.parse_intermixed_args(words)  # positional arguments can be anywhere among the options


def run_command(action: Callable[[], int], level: int = logging.INFO) -> int:
    """Run `action` and return the exit code. A UserError is printed as lines `error: ...` and gives 1, Ctrl-C 130.
    level: logging level."""
    logging.basicConfig(format="%(message)s")
    ours = [logging.getLogger(name) for name in ("src", "__main__")]  # __main__: a module that `python -m` runs
    before = [logger.level for logger in ours]
    for logger in ours:
        logger.setLevel(level)
    try:
        with signals_raise():
            return print_errors(action)()
    except KeyboardInterrupt:
        return 130
    finally:
        for logger, old in zip(ours, before, strict=True):
            logger.setLevel(old)


def require_at_least(least: float, **options: float | None) -> None:
    """Raise ConfigError for an option below `least`. None: the option was not given."""
    for name, value in options.items():
        if value is not None and value < least:
            raise ConfigError(f"--{name}: expected at least {least:g}, got {value:g}.")


def aligned_lines(rows: Sequence[Sequence[str]]) -> list[str]:
    """One line per row of cells, with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


@contextlib.contextmanager
def signals_raise() -> Iterator[None]:
    """Within the block, SIGTERM and SIGHUP raise SystemExit, as SIGINT raises KeyboardInterrupt.
    An ignored signal (nohup) stays ignored."""

    def leave(number: int, _: FrameType | None) -> NoReturn:
        raise SystemExit(128 + number)

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    is_main_thread = threading.current_thread() is threading.main_thread()
    old_handlers = {number: old for number, old in before.items() if is_main_thread and old is not signal.SIG_IGN}
    for number in old_handlers:
        signal.signal(number, leave)
    try:
        yield
    finally:
        for number, old in old_handlers.items():
            signal.signal(number, old)


@cache
def _life_line() -> int:
    """The read end of a pipe that closes when this process ends: only this process has the write end."""
    return os.pipe()[0]


def start_bound(argv: Sequence[str], ending: signal.Signals, out: BinaryIO, err: BinaryIO) -> "subprocess.Popen[bytes]":
    """Start a command in its own session. It gets the signal `ending` when this process dies, for any reason.

    If a signal ends the command, the exit code is 128 + its number, as in shells.
    """
    command = ["/bin/sh", "-c", _BOUND_COMMAND, ending.name.removeprefix("SIG"), *argv]
    return subprocess.Popen(command, stdin=_life_line(), stdout=out, stderr=err, start_new_session=True)


def end_session(process: "subprocess.Popen[bytes]", seconds: float) -> None:
    """End a session leader and its session: SIGTERM, then SIGKILL after at most `seconds`."""
    with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(seconds)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
