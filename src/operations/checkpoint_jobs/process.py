"""A command that outlives whoever started it, so that the next one neither starts it twice nor misses how it ended.

Beside its log, an attempt leaves `.pid`, `.exit` (the exit code, written when it has ended) and `.lock`, which it holds while it runs.
"""

import contextlib
import fcntl
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from src.files import writing

POLL_SECONDS = 0.1
_END_SECONDS = 10.0
_SCRIPT = 'echo $$ > "$3"; /bin/sh -c "$1"; code=$?; echo $code > "$2.new" && mv "$2.new" "$2"; exit $code'


@dataclass(frozen=True)
class Attempt:
    """One attempt at a stage, in the folder of that stage."""

    folder: Path
    number: int

    def file(self, kind: str) -> Path:
        """attempt-N.log, .exit, .pid or .lock."""
        return self.folder / f"attempt-{self.number}.{kind}"


@dataclass(frozen=True)
class End:
    """How an attempt ended."""

    exit_code: int | None
    """Negative: the signal that ended it. None: it left no exit code, as something killed it."""
    seconds: float
    reason: str = ""


def last_begun(folder: Path) -> int:
    """Number of the last attempt that was begun in the folder of a stage; 0 for none."""
    names = [path.name for path in folder.glob("attempt-*.lock")]
    return max((int(name.split("-")[1].split(".")[0]) for name in names), default=0)


def run(attempt: Attempt, command: str, timeout_seconds: float, check: Callable[[], object]) -> End:
    """Run a shell command to its end, output to the attempt's log. check: called all the while; what it raises ends the command.

    Raises:
        RunError: the disk refuses. The command was not started.
    """
    with writing(attempt.folder):
        lock = os.open(attempt.file("lock"), os.O_RDWR | os.O_CREAT, 0o666)
    began = time.monotonic()
    with contextlib.ExitStack() as late:
        late.callback(os.close, lock)
        fcntl.flock(lock, fcntl.LOCK_EX)
        with writing(attempt.folder), open(attempt.file("log"), "ab") as log, _signals_wait() as pending:
            process = subprocess.Popen(
                ["/bin/sh", "-c", _SCRIPT, "stage", command, str(attempt.file("exit")), str(attempt.file("pid"))],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=(lock,),  # it has its own hold on the lock
            )
    try:
        for number in pending:
            os.kill(os.getpid(), number)
        while process.poll() is None:
            check()
            if time.monotonic() - began > timeout_seconds:
                _end(process.pid, lambda: process.poll() is not None)
                return End(process.wait(), time.monotonic() - began, f"ended after {timeout_seconds:g} s (timeout_seconds)")
            time.sleep(POLL_SECONDS)
    except BaseException:
        _end(process.pid, lambda: process.poll() is not None)
        process.wait()
        raise
    if process.returncode < 0:  # the shell was killed: what it had started must not go on beside the next attempt
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    return End(process.returncode, time.monotonic() - began)


@contextlib.contextmanager
def _signals_wait() -> Iterator[list[int]]:
    """Signals that would end this process are collected within the block: none may come between a start and the note of its pid."""
    pending: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield pending
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    for number, handler in before.items():
        if callable(handler):
            signal.signal(number, lambda number, _: pending.append(number))
    try:
        yield pending
    finally:
        for number, handler in before.items():
            if callable(handler):
                signal.signal(number, handler)


def adopt(attempt: Attempt, timeout_seconds: float, check: Callable[[], object]) -> End:
    """Wait for the end of an attempt whose starter has died, or see how it ended. `check` as for `run`, but the command goes on."""
    try:
        began = attempt.file("lock").stat().st_mtime
        lock = os.open(attempt.file("lock"), os.O_RDWR)
    except FileNotFoundError:
        return End(None, 0.0, "it left no trace")
    try:
        while not attempt.file("exit").exists():
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                check()
            if time.time() - began > timeout_seconds:
                _end(_pid(attempt), attempt.file("exit").exists)
                return End(None, time.time() - began, f"ended after {timeout_seconds:g} s (timeout_seconds)")
            time.sleep(POLL_SECONDS)
    finally:
        os.close(lock)
    try:
        code = int(attempt.file("exit").read_text(encoding="ascii"))
        return End(code, max(0.0, attempt.file("exit").stat().st_mtime - began))
    except (FileNotFoundError, ValueError):
        return End(None, 0.0, "killed, together with what had started it")


def _pid(attempt: Attempt) -> int | None:
    """The leader of the attempt's session, if it still is that process."""
    with contextlib.suppress(OSError, ValueError):
        pid = int(attempt.file("pid").read_text(encoding="ascii"))
        if os.fsencode(attempt.file("exit")) in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"):
            return pid
    return None


def _end(pid: int | None, ended: Callable[[], bool]) -> None:
    """End a session: asked first, then killed."""
    if pid is None:
        return
    for number, seconds in ((signal.SIGTERM, _END_SECONDS), (signal.SIGKILL, 0.0)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, number)
        until = time.monotonic() + seconds
        while not ended() and time.monotonic() < until:
            time.sleep(POLL_SECONDS / 5)
