"""Runs a shell command that does not outlive this process: if we are killed, the command is killed too."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from src.files import writing
from src.launch.command_line import start_bound

POLL_SECONDS = 0.1
_END_SECONDS = 10.0


@dataclass(frozen=True)
class CommandResult:
    """How an attempt ended."""

    exit_code: int | None
    """Negative: the signal that ended it. None: it failed outside the command."""
    reason: str = ""


def run_command(command: str, log: Path, timeout_seconds: float, check: Callable[[], object]) -> CommandResult:
    """Run a shell command to its end, output to `log`. check: called all the while; what it raises ends the command.

    Raises:
        RunError: the disk refuses. The command was not started.
    """
    until = time.monotonic() + timeout_seconds
    with writing(log), open(log, "ab") as out:
        process = start_bound(["/bin/sh", "-c", command], signal.SIGKILL, out, out)
    try:
        while process.poll() is None:
            check()
            if time.monotonic() > until:
                _end(process)
                return CommandResult(process.returncode, f"ended after {timeout_seconds:g} s (timeout_seconds)")
            time.sleep(POLL_SECONDS)
    except BaseException:
        _end(process)
        raise
    if process.returncode < 0:  # something else killed the shell: the command must not go on beside the next attempt
        _end(process)
    return CommandResult(process.returncode)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the command's session: asked first, then killed."""
    with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(_END_SECONDS)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
