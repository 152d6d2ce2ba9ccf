"""What tells a process from every other: one that has ended is not taken for another that was given its number."""

import contextlib
import os
import socket
from pathlib import Path
from typing import Any


def this_process() -> dict[str, Any]:
    """What tells this process from every other: host, boot, pid namespace, pid, and when it started (clock ticks since boot)."""
    return {
        "host": socket.gethostname(),
        "boot_id": _boot_id(),
        "pid_namespace": _pid_namespace(),
        "pid": os.getpid(),
        "started": process_start(os.getpid()),
    }


def process_start(pid: int) -> int | None:
    """Start time of a process in clock ticks since boot; None when it is gone, or dead and not yet waited for."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def _boot_id() -> str | None:
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return None


def _pid_namespace() -> str | None:
    with contextlib.suppress(OSError):
        return os.readlink("/proc/self/ns/pid")
    return None
