"""Progress of a training for its observers: <run>/heartbeat.json, written every few seconds.

The lease does not show progress: it is renewed even while a step hangs.
"""

import contextlib
import json
import statistics
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path

from src.errors import RunError, UserError
from src.files import read_json, write_atomic

HEARTBEAT = "heartbeat.json"
EVERY_SECONDS = 5.0
_WINDOW = 101


class Heartbeat:
    """Writes a small file every `EVERY_SECONDS`, on rank 0; write errors are ignored."""

    def __init__(self, run: Path, attempt: int, every_seconds: float = EVERY_SECONDS) -> None:
        self.path = run / HEARTBEAT
        self._attempt = attempt
        self._every = every_seconds
        self._seconds: deque[float] = deque(maxlen=_WINDOW)
        self._last_step: float | None = None
        self._last_write = float("-inf")

    def on_step(self, step: int) -> None:
        """Call this after `step` optimizer steps are finished."""
        now = time.monotonic()
        if self._last_step is not None:
            self._seconds.append(now - self._last_step)
        self._last_step = now
        if now - self._last_write >= self._every:
            self._last_write = now
            facts = {
                "attempt": self._attempt,
                "step": step,
                "step_seconds": statistics.median(self._seconds) if self._seconds else None,
            }
            with contextlib.suppress(UserError, OSError):
                write_atomic(self.path, json.dumps(facts) + "\n")


def refresh(run: Path, attempt: int, step: int) -> None:
    """Report activity outside of a step, such as inference after `step`. Cheap to call often."""
    path = run / HEARTBEAT
    with contextlib.suppress(UserError, OSError):
        if not path.exists() or time.time() - path.stat().st_mtime >= EVERY_SECONDS:
            write_atomic(path, json.dumps({"attempt": attempt, "step": step, "step_seconds": None}) + "\n")


def keep_alive(run: Path, attempt: int) -> None:
    """Report that the training is alive while it waits within a step. Cheap to call often."""
    with contextlib.suppress(OSError):
        (run / HEARTBEAT).touch() if (run / HEARTBEAT).exists() else refresh(run, attempt, 0)


@dataclass(frozen=True)
class Beat:
    """Content and age of heartbeat.json."""

    attempt: int
    step: int
    step_seconds: float | None
    """Median time between the ends of steps; None before the second step."""
    age_seconds: float


def read(run: Path) -> Beat | None:
    """The heartbeat of the save directory `run`; None if it is missing or unreadable.
    Its age compares the clock of the disk with the local clock."""
    path = run / HEARTBEAT
    try:
        write_time = path.stat().st_mtime
        facts = read_json(path, RunError)
    except (OSError, UserError):
        return None
    if not isinstance(facts, dict) or type(facts.get("attempt")) is not int or type(facts.get("step")) is not int:
        return None
    seconds = facts.get("step_seconds")
    return Beat(
        facts["attempt"],
        facts["step"],
        seconds if isinstance(seconds, int | float) else None,
        max(0.0, time.time() - write_time),
    )
