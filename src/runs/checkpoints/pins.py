"""Pins protect checkpoints from deletion while a process works on them: one file in <run>/pins/ per holder.

A pin is valid while its holder renews its lease (see `lease`); pins of dead holders are ignored. Pins are written and
checked under the guard of the run, so a checkpoint that exists when it is pinned exists until the pin is removed.
"""

import json
import os
import time
from collections.abc import Collection
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated

from pydantic import Field, TypeAdapter, ValidationError

from src.errors import RunError
from src.files import read_json, write_json, writing
from src.runs.checkpoints import checkpoints
from src.runs.history.journal import manifest_hash
from src.runs.lease import STALE_SECONDS, directory_lock, holder_of

FOLDER = "pins"


@dataclass(frozen=True)
class Pin:
    """The checkpoints that one holder needs."""

    holder: str
    """The folder with the holder's lease, relative to the run."""
    every: Annotated[int, Field(gt=0)] | None = None
    """Interval in steps: checkpoints at its multiples, also future ones, are pinned, except those in `finished`."""
    finished: dict[str, str] = field(default_factory=dict)
    """"step-00000040" -> hash of its manifest: the checkpoint of this step differs between branches."""
    steps: dict[str, str] = field(default_factory=dict)
    """Single checkpoints, as in `finished`."""

    def holds(self, checkpoint: Path) -> bool:
        """Whether the checkpoint is pinned."""
        name = checkpoint.name
        if self.every and checkpoints.step_of(checkpoint) % self.every == 0:
            return self.finished.get(name) is None or self.finished[name] != manifest_hash(checkpoint)
        return name in self.steps and self.steps[name] == manifest_hash(checkpoint)


class StalenessProbe:
    """Detects stale leases.
    A remote holder is stale if its counter did not change between two observations, by the local clock."""

    def __init__(self, stale_seconds: float = STALE_SECONDS) -> None:
        self._stale_seconds = stale_seconds
        self._seen: dict[Path, tuple[bytes, float]] = {}

    def is_stale(self, folder: Path) -> bool:
        """Whether the lease in `folder` has no live holder; False if not known yet."""
        holder = holder_of(folder)
        if holder.is_dead is not None:
            return holder.is_dead
        if not holder.beat:  # unreadable: the next call decides
            return False
        now = time.monotonic()
        before, since = self._seen.get(folder, (b"", now))
        if holder.beat != before:
            self._seen[folder] = (holder.beat, now)
            return False
        return now - since >= self._stale_seconds


def place(run: Path, name: str, pin: Pin) -> None:
    """Pin checkpoints of the save directory `run`; replaces the pin `name`.
    Check afterwards that the checkpoints still exist.

    Raises:
        RunError: there is no such run, or the disk refuses.
    """
    path = run / FOLDER / f"{name}.json"
    with directory_lock(run, create=False), writing(path):
        path.parent.mkdir(exist_ok=True)
        write_json(path, asdict(pin))


def remove(run: Path, name: str) -> None:
    """Remove the pin `name`, if there is one.

    Raises:
        RunError: the disk refuses.
    """
    path = run / FOLDER / f"{name}.json"
    with writing(path):
        path.unlink(missing_ok=True)


def find_pinned(run: Path, among: Collection[Path], silence: StalenessProbe) -> dict[Path, str]:
    """The pinned checkpoints of `among`, with a description of pin and holder. Call it under the guard of `run`.

    Raises:
        RunError: a pin is damaged, or cannot be read.
    """
    pinned: dict[Path, str] = {}
    for path in sorted((run / FOLDER).glob("[!.]*.json")):
        pin = _read_pin(path)
        if pin is None:
            continue
        holder = Path(os.path.normpath(run / pin.holder))
        mine = [checkpoint for checkpoint in among if checkpoint not in pinned and pin.holds(checkpoint)]
        if mine and not silence.is_stale(holder):
            pinned |= dict.fromkeys(mine, f"{path}, for {holder_of(holder).host or 'somebody'}")
    return pinned


def _read_pin(path: Path) -> Pin | None:
    """The pin in a file; None if it was just removed."""
    try:
        raw = read_json(path, RunError)
    except RunError as error:
        if not path.exists():
            return None
        raise RunError(f"{error} {_ADVICE}") from None
    try:
        pin = TypeAdapter(Pin).validate_json(json.dumps(raw), strict=True)
        assert raw.keys() == asdict(pin).keys()
    except (ValidationError, AssertionError):
        raise RunError(f"{path}: not a pin: got {json.dumps(raw)[:60]}. {_ADVICE}") from None
    return pin


_ADVICE = "Delete it, if nobody evaluates or uploads the checkpoints of this run."
