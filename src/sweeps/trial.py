"""One trial of a sweep: an ordinary training in its own save directory,
run as a child process and followed through its scores."""

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from src.errors import RunError, UserError
from src.files import writing
from src.runs.checkpoints.pins import StalenessProbe
from src.runs.lease import STALE_SECONDS
from src.runs.metadata import read_status, state_of
from src.runs.scores import SCORES, Scores
from src.runs.summary import is_finite
from src.support.command_line import end_session, start_bound

POLL_SECONDS = 0.2
EXP_ID = "exp_id"
"""The attribute of a trial that holds its experiment id."""
GRACE_SECONDS = 60.0
"""Time for a training to stop with a checkpoint before it is killed."""
RESTARTS = 3
"""How often a training that something else killed is restarted without progress."""
_INTERRUPTED = {75, 128 + signal.SIGTERM, 128 + signal.SIGKILL, 128 + signal.SIGUSR1}


@dataclass(frozen=True)
class TrialResult:
    """How a trial ended. value: the last one of the metric, None without a metric."""

    state: Literal["done", "pruned", "failed"]
    value: float | None = None
    reason: str = ""


@dataclass
class Training:
    """Follows the training in the save directory `run`, which `argv` starts unless another process trains there.

    If this process dies, the training that it started is stopped.
    """

    run: Path
    argv: Sequence[str]
    metric: str | None
    grace_seconds: float = GRACE_SECONDS

    def __post_init__(self) -> None:
        self.child: subprocess.Popen[bytes] | None = None
        self._starts_without_gain = 0
        self._rows_at_start = -1
        self._known: tuple[object, list[float | None]] = (None, [])
        self._holder = StalenessProbe(2 * STALE_SECONDS)

    def follow(self, prune: Callable[[Sequence[float]], bool]) -> TrialResult:
        """Train to the end. `prune` gets all values so far whenever there can be new ones; True stops the training.

        An interruption of this process stops the training gracefully first.

        Raises:
            RunError: the log cannot be written, or the command cannot be started.
        """
        try:
            while (result := self._step(prune)) is None:
                time.sleep(POLL_SECONDS)
        except BaseException:
            self._stop()
            raise
        return result

    def _step(self, prune: Callable[[Sequence[float]], bool]) -> TrialResult | None:
        code = self.child.poll() if self.child else None  # before the files are read: they are final if it has ended
        try:
            state, values = state_of(self.run), self._finite_values()
        except UserError as error:
            self._stop()
            return TrialResult("failed", reason=str(error))
        ended = self.child is None or code is not None
        if state == "done":
            if not ended:
                return None
            prune(values)
            return self._final_result()
        if prune(values):
            self._stop()
            if state_of(self.run) == "done":
                return self._final_result()
            return TrialResult("pruned", values[-1] if values else None)
        if not ended or not self._holder.is_stale(self.run):
            return None  # another process trains there: wait for it
        if code is not None and code >= 0 and code not in _INTERRUPTED:
            reason = (
                str(read_status(self.run).get("reason") or f"exit code {code}")
                if state == "failed"
                else f"exit code {code}"
            )
            return TrialResult("failed", reason=f"{reason}. See {self._logs()[1]}")
        return self._start(len(values))

    def _start(self, rows: int) -> TrialResult | None:
        self._starts_without_gain = 0 if rows > self._rows_at_start else self._starts_without_gain + 1
        self._rows_at_start = rows
        if self._starts_without_gain > RESTARTS:
            return TrialResult(
                "failed", reason=f"killed {RESTARTS + 1} times without coming further. See {self._logs()[1]}"
            )
        logs = self._logs()
        with writing(logs[0].parent):
            logs[0].parent.mkdir(parents=True, exist_ok=True)
        if shutil.which(self.argv[0]) is None:
            raise RunError(f"{self.argv[0]}: no such program. Look at `command` of the sweep file.")
        with writing(logs[0]), open(logs[0], "ab") as out, open(logs[1], "ab") as err:
            self.child = start_bound(self.argv, signal.SIGTERM, out, err)
        return None

    def _logs(self) -> tuple[Path, Path]:
        folder = self.run.parent / "logs"
        return folder / f"{self.run.name}.out.log", folder / f"{self.run.name}.err.log"

    def _final_result(self) -> TrialResult:
        """The result of a training that is done: it failed if its metric is missing or ended in NaN or infinity."""
        values = self._values()
        if self.metric is not None and not values:
            return TrialResult(
                "failed", reason=f"no value of {self.metric!r} in {self.run / SCORES}: the training does not log it."
            )
        if values and values[-1] is None:
            return TrialResult("failed", reason=f"{self.metric!r} ended in NaN or infinity: see {self.run / SCORES}.")
        return TrialResult("done", values[-1] if values else None)

    def _finite_values(self) -> list[float]:
        return [value for value in self._values() if value is not None]

    def _values(self) -> list[float | None]:
        """The values of the metric so far, in the order of the steps; None for NaN and infinity."""
        file = self.run / SCORES
        try:
            facts = os.stat(file)
        except FileNotFoundError:
            return []
        version = (facts.st_ino, facts.st_size, facts.st_mtime_ns)
        if version != self._known[0]:
            rows = Scores(file, read_only=True).rows()
            column = [row[self.metric] for row in rows if self.metric in row]
            self._known = (version, [float(value) if is_finite(value) else None for value in column])
        return self._known[1]

    def _stop(self) -> None:
        if self.child is not None and self.child.poll() is None:
            end_session(self.child, self.grace_seconds)
