"""Conditions for a graceful, resumable stop: time limit, host memory, or a stop file."""

import time
from collections.abc import Iterator
from pathlib import Path

from src.errors import RunError
from src.files import reading
from src.runs.context import Limits
from src.support import distributed

STOP_FILE = "stop"
"""Name of the stop file. In a save directory it stops that training, in the folder of all runs every training, until it
is removed."""
LOOK_SECONDS = 1.0
"""Minimum time between two checks of the disk and the memory."""
_MEMORY = Path("/proc/meminfo")
_GROUP = Path("/proc/self/cgroup")
_GROUPS = Path("/sys/fs/cgroup")


class StopConditions:
    """Checks `limits` and the stop files of the save directory `run`, in each process."""

    def __init__(self, limits: Limits, run: Path) -> None:
        self.limits = limits
        self.files = (run / STOP_FILE, run.parent / STOP_FILE)
        self._checked_at = float("-inf")
        self._reason: distributed.Reason | None = None

    def reason(self) -> distributed.Reason | None:
        """The reason to stop, or None."""
        now, end = time.monotonic(), self.limits.end
        if end is not None and now >= end:
            return distributed.Reason("time limit", "limit")
        if (
            self._reason is None and now - self._checked_at >= LOOK_SECONDS
        ):  # a condition stays met until all ranks have agreed to stop
            self._checked_at, self._reason = now, self._look()
        return self._reason

    def _look(self) -> distributed.Reason | None:
        for file in self.files:
            if file.exists():
                return distributed.Reason(f"{file} (remove it to resume the training)", "person")
        most = self.limits.host_memory
        if most is not None and (share := memory_used()) >= most:
            return distributed.Reason(f"{share:.0%} of host memory in use", "limit")
        return None


def memory_used() -> float:
    """Share of memory in use, of the machine or of this process's control groups, whichever is larger.

    Raises:
        RunError: the system is not Linux.
    """
    return max(_machine_memory(), *_control_group_memory(), 0.0)


def _machine_memory() -> float:
    try:
        with reading(_MEMORY):
            facts = {
                name: int(rest.split()[0])
                for name, _, rest in (line.partition(":") for line in _MEMORY.read_text().splitlines())
            }
    except FileNotFoundError:
        raise RunError(f"{_MEMORY}: no such file, so memory use is unknown. Leave out --max_host_memory.") from None
    return 1 - facts["MemAvailable"] / facts["MemTotal"]


def _control_group_memory() -> Iterator[float]:
    """Yield the memory shares of control groups (versions 2 and 1), without reclaimable file cache."""
    if not _GROUP.exists():
        return
    for line in _GROUP.read_text().splitlines():
        number, kinds, path = line.split(":", 2)
        if number == "0":
            top, limit, usage, cached = _GROUPS, "memory.max", "memory.current", "inactive_file"
        elif kinds == "memory":
            top, limit, usage, cached = (
                _GROUPS / "memory",
                "memory.limit_in_bytes",
                "memory.usage_in_bytes",
                "total_inactive_file",
            )
        else:
            continue
        folder = top / path.lstrip("/")
        for group in (folder, *folder.parents):
            if group == top.parent:
                break
            if (group / limit).exists() and (group / limit).read_text().strip() != "max":
                statistics = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
                yield (int((group / usage).read_text()) - int(statistics[cached])) / int((group / limit).read_text())
