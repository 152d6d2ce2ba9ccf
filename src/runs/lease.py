"""The exclusive lock of a save directory: a file with a counter that its holder increments.
The lease of a dead holder is taken over.

Every access to the file `lease` holds an flock on `lease.guard`, so check-and-set is atomic. A holder with the same
boot id and pid namespace is judged by its process: gone means dead, stopped means alive. Any other holder is judged by
its counter, observed over time on the local clock; clocks are not compared. An unreadable lease is observed in the same
way, and taken over if it does not change.
"""

import contextlib
import errno
import fcntl
import json
import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from src.errors import RunError
from src.files import reading, write_atomic, writing
from src.runs.environment import now
from src.support.parsing import parse_json

STALE_SECONDS = 30.0
"""A holder on another machine is dead if its counter does not change for this long."""
BEAT_SECONDS = 5.0
SILENT_SECONDS = 10 * STALE_SECONDS
"""A holder on another machine without a heartbeat for this long counts as not running. It can still be alive: clocks
differ, and network file systems cache."""
GUARD_SECONDS = 20.0
"""Timeout for the guard, which is normally held for milliseconds."""
LEASE = "lease"
GUARD = "lease.guard"
_POLL_SECONDS = 0.01

log = logging.getLogger(__name__)


class Lease:
    """Held from `acquire` to `release`.
    A daemon thread increments the counter; `is_lost` becomes True if another process takes over."""

    def __init__(self, path: Path, stale_seconds: float, beat_seconds: float) -> None:
        self.path = path
        self.is_lost = False
        self._stale_seconds = stale_seconds
        self._beat_seconds = beat_seconds
        self._facts = {**this_process(), "token": uuid.uuid4().hex, "since": now()}
        self._release_event = threading.Event()
        self._thread = threading.Thread(target=self._beat, name=f"lease {path.name}", daemon=True)

    @classmethod
    def acquire(cls, path: Path, stale_seconds: float = STALE_SECONDS, beat_seconds: float = BEAT_SECONDS) -> "Lease":
        """Lock the save directory `path`, created if missing.

        A dead holder on this machine is replaced at once, a silent holder elsewhere after `stale_seconds`.

        Raises:
            RunError: this or another process already holds it, or the disk refuses.
        """
        lease = cls(path, stale_seconds, beat_seconds)
        holder_bytes = lease._try_acquire(None)
        if holder_bytes is not None:
            log.warning(
                "%s: waiting up to %g s to see whether its holder is alive: %s",
                path,
                stale_seconds,
                _holder(holder_bytes),
            )
            until = time.monotonic() + stale_seconds
            while time.monotonic() < until and _read(path) == holder_bytes:
                time.sleep(min(1.0, stale_seconds / 20))
            if lease._try_acquire(holder_bytes) is not None:
                raise _held_error(path, _read(path) or holder_bytes)
        lease._thread.start()
        return lease

    def confirm(self) -> None:
        """Check that this process still holds the lease; call it before writing anything important.

        Raises:
            RunError: another process took over while this one was stopped, or the lease was removed.
        """
        if self._release_event.is_set():
            raise RunError(f"{self.path}: the lease was released. Open the run again to write.")
        self._check_owner()
        if self.is_lost:
            content = _read(self.path)
            by = f"now held by {_holder(content)}" if content else "deleted"
            raise RunError(f"{self.path}: this process no longer holds the lease ({by}), so it stops without writing.")

    def release(self) -> None:
        """Unlock. Does nothing if the lease is released, lost, or inherited by a forked process."""
        if self._facts["pid"] != os.getpid() or self._release_event.is_set():
            return
        self._release_event.set()
        self._thread.join()
        try:
            with directory_lock(self.path, create=False):
                if _parse(_read(self.path)).get("token") == self._facts["token"]:
                    (self.path / LEASE).unlink()
        except (OSError, RunError) as error:
            log.warning(
                "%s: the lease could not be removed (%s); it is stale once this process has ended.",
                self.path,
                error,
            )

    def move_directory(self, target: Path) -> None:
        """Rename the locked directory to `target` and release it. No other process can lock it in between.

        Raises:
            RunError: the lease was lost, or the disk refuses.
        """
        self.confirm()
        with directory_lock(self.path), writing(target):
            os.rename(self.path, target)
            (target / LEASE).unlink(missing_ok=True)
            self._release_event.set()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def _try_acquire(self, silent: bytes | None) -> bytes | None:
        """Take the lease if it is free, dead, or still equal to `silent`; return None.
        Else return the bytes of the lease, to be observed.

        Raises:
            RunError: the holder is known to be alive.
        """
        with directory_lock(self.path):
            content = _read(self.path)
            if content is not None and content != silent:
                alive = _alive(_parse(content))
                if alive:
                    raise _held_error(self.path, content)
                if alive is None:
                    return content
            if content is not None:
                log.warning("%s: taking over from a dead holder: %s", self.path, _holder(content))
            self._write(0)
        return None

    def _write(self, beat: int) -> None:
        write_atomic(self.path / LEASE, json.dumps({**self._facts, "beat": beat}) + "\n")

    def _beat(self) -> None:
        beat = 0
        while not self._release_event.wait(self._beat_seconds):
            beat += 1
            try:
                with directory_lock(self.path, create=False):
                    self._check_owner()
                    if self.is_lost or self._release_event.is_set():
                        return
                    self._write(beat)
            except (OSError, RunError) as error:
                # A full disk can have space again before another process takes over.
                log.warning("%s: no heartbeat: %s", self.path, error)

    def _check_owner(self) -> None:
        try:
            content = _read(self.path)
        except RunError as error:
            log.warning("%s", error)
            return
        if _parse(content).get("token") != self._facts["token"] and not self._release_event.is_set():
            self.is_lost = True


@dataclass(frozen=True)
class Holder:
    """The holder of a save directory, from its lease."""

    is_dead: bool | None
    """Whether there is no live holder; None if this cannot be judged from this machine."""
    host: str = ""
    """Host name of the holder; "" without a holder, or if the lease is unreadable."""
    seconds: float | None = None
    """Time since the lease was renewed; None without a holder.
    For display only: it compares the clock of the disk with the local clock. Never negative."""
    beat: bytes = b""
    """Content of the lease: while it changes, the holder is alive."""

    @property
    def lost_contact(self) -> str:
        """ "lost contact 49 min ago" for a holder on another machine that was silent for `SILENT_SECONDS`; else "".

        Such a run counts as not running. To delete anything, check `is_dead`.
        """
        if self.seconds is None or self.seconds <= SILENT_SECONDS or self.is_dead is not None:
            return ""
        minutes = int(self.seconds // 60)
        days, hours = minutes // 1440, minutes // 60
        return f"lost contact {f'{days} d' if days > 1 else f'{hours} h' if hours > 1 else f'{minutes} min'} ago"


def holder_of(path: Path) -> Holder:
    """The holder of the save directory `path`."""
    seconds = None
    with contextlib.suppress(OSError):
        seconds = max(0.0, time.time() - os.stat(path / LEASE).st_mtime)
    try:
        beat = _read(path)
    except RunError:
        return Holder(None, seconds=seconds)
    if beat is None:
        return Holder(True)
    facts = _parse(beat)
    alive = _alive(facts)
    return Holder(None if alive is None else not alive, str(facts.get("host") or ""), seconds, beat)


def this_process() -> dict[str, Any]:
    """Identity of this process: host, boot id, pid namespace, pid, and start time in clock ticks (pids are reused)."""
    return {
        "host": socket.gethostname(),
        "boot_id": _boot_id(),
        "pid_namespace": _pid_namespace(),
        "pid": os.getpid(),
        "started": process_start(os.getpid()),
    }


def process_start(pid: int) -> int | None:
    """Start time of a process in clock ticks since boot; None if it is gone or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else int(fields[19])


@contextlib.contextmanager
def directory_lock(path: Path, create: bool = True) -> Iterator[None]:
    """Hold the guard of the save directory `path`, for files that any process can write without the lease.
    Not reentrant.

    create: create the directory if it is missing.

    Raises:
        RunError: timeout, locks are not supported, or the disk refuses.
    """
    with writing(path):
        descriptor = _open_guard(path, create)
    try:
        yield
    finally:
        fcntl.flock(descriptor, fcntl.LOCK_UN)  # a forked child can have a copy of the descriptor, and with it the lock
        os.close(descriptor)


def _open_guard(path: Path, create: bool) -> int:
    until = time.monotonic() + GUARD_SECONDS
    while True:
        if create:
            _make_directory(path)
        try:
            descriptor = os.open(path / GUARD, os.O_RDWR | os.O_CREAT, 0o666)
        except FileNotFoundError:
            if not create:
                raise
            if time.monotonic() > until:  # not just moved away between the two lines above
                raise RunError(
                    f"{path}: cannot create the save directory: it disappears each time. "
                    "Stop the program that deletes it."
                ) from None
            time.sleep(_POLL_SECONDS)
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # If the directory was moved away meanwhile, this is the guard of the moved directory.
            if os.path.samestat(os.fstat(descriptor), os.stat(path / GUARD)):
                return descriptor
        except FileNotFoundError:
            pass
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                os.close(descriptor)
                raise RunError(
                    f"{path}: this file system offers no locks (flock: {error.strerror}). Choose another folder."
                ) from error
        os.close(descriptor)
        if time.monotonic() > until:
            raise RunError(
                f"{path / GUARD}: locked for {GUARD_SECONDS:g} s. Check for a stopped process that holds it."
            )
        time.sleep(_POLL_SECONDS)


def _make_directory(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        # Also raised for a directory that was moved away in the meantime; then the caller tries again.
        for folder in (path, *path.parents):
            if folder.is_symlink() and not folder.exists():
                raise RunError(
                    f"{folder}: a link to {os.readlink(folder)}, which does not exist. Create it, or remove the link."
                ) from None
            if folder.exists() and not folder.is_dir():
                raise RunError(f"{folder}: a file where the save directory should be. Move it away.") from None


def _read(path: Path) -> bytes | None:
    """The bytes of the lease; None without a lease. Raises RunError if it cannot be read."""
    try:
        with reading(path / LEASE):
            return (path / LEASE).read_bytes()
    except FileNotFoundError:
        return None


def _parse(content: bytes | None) -> dict[str, Any]:
    """The facts in a lease; empty without a lease, or if it cannot be parsed."""
    try:
        facts = parse_json(content or b"", LEASE, RunError)
    except RunError:
        return {}
    return facts if isinstance(facts, dict) else {}


def _alive(facts: dict[str, Any]) -> bool | None:
    """Whether the holder is alive; None if this cannot be judged from this machine."""
    here = this_process()
    is_same_machine = all(here[key] is not None and facts.get(key) == here[key] for key in ("boot_id", "pid_namespace"))
    if not is_same_machine or type(facts.get("pid")) is not int:
        return None
    start_ticks = process_start(facts["pid"])
    return start_ticks is not None and start_ticks == facts.get("started")


def _holder(content: bytes) -> str:
    facts = _parse(content)
    if not facts:
        return "an unreadable lease"
    return f"process {facts.get('pid')} on host {facts.get('host')} since {facts.get('since')}"


def _held_error(path: Path, content: bytes) -> RunError:
    return RunError(f"{path}: held by {_holder(content)}; it trains this experiment now. Wait for it, or stop it.")


def _boot_id() -> str | None:
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return None


def _pid_namespace() -> str | None:
    with contextlib.suppress(OSError):
        return os.readlink("/proc/self/ns/pid")
    return None
