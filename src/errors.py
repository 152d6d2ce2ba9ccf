"""Errors that the user can fix: printed as one line, no traceback, exit code 1."""

import errno
import functools
import io
import os
import re
import select
import sys
from collections.abc import Callable
from typing import ParamSpec

from src.support import documents

P = ParamSpec("P")


class UserError(Exception):
    """An error with three parts: where, the wrong value, and the fix. Any other exception is a bug in this project."""

    everywhere = False
    """True if every process of the training raises it at the same point, so all of them can continue."""


class ConfigError(UserError):
    """An experiment, a group or a command line that cannot be run as written."""


def print_errors(main: Callable[P, int]) -> Callable[P, int]:
    """Decorate the `main` of a command: print a UserError to stderr as lines `error: ...`, and exit with code 1.
    With --json, also print errors as a document (`docs/json_documents.py`)."""

    @functools.wraps(main)
    def run(*args: P.args, **kwargs: P.kwargs) -> int:
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="backslashreplace")  # any JSON file can contain halves of surrogate pairs
        with documents.scope():
            try:
                return main(*args, **kwargs)
            except UserError as error:
                return _report(type(error).__name__, str(error))
            except OSError as error:
                if error.errno != errno.ENAMETOOLONG:  # the path is from the user
                    raise
                return _report("DataError", f"{_shorten(error.filename)}: {error.strerror}. Use shorter names.")
            except KeyboardInterrupt:
                documents.show_error("KeyboardInterrupt", "interrupted")
                return 130

    return end_with_reader(run)


def _report(kind: str, message: str) -> int:
    sys.stderr.write("".join(f"error: {line}\n" for line in message.splitlines()))
    documents.show_error(kind, message)
    return 1


def end_with_reader(action: Callable[P, int]) -> Callable[P, int]:
    """Wrap `action` to exit silently with 141 (128 + SIGPIPE) when the reader of its output exits, as `| head` does."""

    @functools.wraps(action)
    def run(*args: P.args, **kwargs: P.kwargs) -> int:
        try:
            code = action(*args, **kwargs)
            sys.stdout.flush()
            return code
        except BrokenPipeError:
            if not _has_lost_reader(sys.stdout.fileno()):
                raise
            null = os.open(os.devnull, os.O_WRONLY)  # for output that is flushed at exit
            os.dup2(null, sys.stdout.fileno())
            os.close(null)
            return 141

    return run


def _shorten(path: object) -> str:
    text = os.fsdecode(path) if isinstance(path, bytes) else str(path)
    return text if len(text) <= 200 else f"{text[:100]}...{text[-97:]}"


def _has_lost_reader(pipe: int) -> bool:
    poll = select.poll()
    poll.register(pipe, select.POLLOUT)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def system_error(error: Exception) -> OSError | None:
    """The system's refusal that `error` reports, if any. safetensors names its number only in the message."""
    if isinstance(error, OSError):
        return error
    number = type(error).__name__ == "SafetensorError" and re.search(r"serializing: .*\(os error (\d+)\)", str(error))
    return OSError(int(number[1]), os.strerror(int(number[1]))) if number else None


def check_all(*checks: Callable[[], object]) -> None:
    """Run every check, and raise one ConfigError with a line for each failure."""
    messages = []
    for check in checks:
        try:
            check()
        except UserError as error:
            messages.append(str(error))
    if messages:
        raise ConfigError("\n".join(dict.fromkeys(messages)))


class DataError(UserError):
    """A data set that is missing, incomplete or malformed."""


class CheckpointError(UserError):
    """A checkpoint that is missing, damaged, or for a different model."""


class RunError(UserError):
    """A save directory that is held by another process, belongs to another dict, or cannot be written."""


class TrainingError(UserError):
    """A training that must stop, for example because its loss is not finite. Every process raises it."""

    everywhere = True


class LaunchError(UserError):
    """A launcher that is unknown, or that refused the job."""
