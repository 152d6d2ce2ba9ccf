"""Protect checkpoints from deletion, by their training or by cleaning, until the stages of a plan are finished.

A process that works on a plan holds one lease for all runs, <runs>/checkpoint_jobs/<name>/, and places a pin in each
run (see src.runs.checkpoints.pins). Future checkpoints at multiples of `checkpoints.every` are pinned as well. Pins
have no effect once the process has ended.
"""

import os
import shutil
import uuid
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from src.errors import RunError
from src.operations.checkpoint_jobs.plan import Plan
from src.runs.checkpoints import pins
from src.runs.checkpoints.pins import Pin
from src.runs.history.journal import manifest_hash
from src.runs.lease import LEASE, Lease, holder_of
from src.runs.store import SavedRun

FOLDER = "checkpoint_jobs"


class Pins:
    """The pins of this process. A context manager that removes them on exit."""

    def __init__(self, runs: Path, plan: Plan) -> None:
        self._every = plan.checkpoints.every
        self._name = uuid.uuid4().hex[:12]
        self._pins: dict[Path, Pin] = {}
        for leftover in (runs / FOLDER).glob("*"):
            if (leftover / LEASE).exists() and holder_of(leftover).is_dead:
                shutil.rmtree(leftover, ignore_errors=True)
        self._lease = Lease.acquire(runs / FOLDER / self._name)

    def renew(self, run: Path, finished_checkpoints: Sequence[Path], remaining_checkpoints: Sequence[Path]) -> None:
        """Pin `remaining_checkpoints` of `run`, and its future checkpoints unless the run is done.
        Unpins `finished_checkpoints`.

        Raises:
            RunError: the disk refuses, or status.json is damaged.
        """
        every = self._every if SavedRun(run).status["state"] != "done" else None
        pin = Pin(
            os.path.relpath(self._lease.path, run),
            every,
            _manifest_hashes(finished_checkpoints) if every else {},
            _manifest_hashes(remaining_checkpoints),
        )
        if not every and not pin.steps:
            self._take_away(run)
        elif pin != self._pins.get(run):
            self._pins[run] = pin
            pins.place(run, self._name, pin)
            self._sweep(run)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(RunError):  # a pin without its lease has no effect
            for run in list(self._pins):
                self._take_away(run)
        self._lease.release()
        shutil.rmtree(self._lease.path, ignore_errors=True)

    def _take_away(self, run: Path) -> None:
        if self._pins.pop(run, None) is not None:
            pins.remove(run, self._name)

    def _sweep(self, run: Path) -> None:
        """Remove the pins of processes with a deleted lease."""
        for path in (run / pins.FOLDER).glob("[!.]*.json"):
            if not (self._lease.path.parent / path.stem).exists():
                pins.remove(run, path.stem)


def _manifest_hashes(checkpoints: Sequence[Path]) -> dict[str, str]:
    return {path.name: digest for path in checkpoints if (digest := manifest_hash(path)) is not None}
