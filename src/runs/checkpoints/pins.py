"""Who works on checkpoints of a run: a file in <run>/pins/ for each. Nobody deletes what is pinned, but for whoever pinned it.

A pin counts while its holder beats his lease (see `lease`): that of a dead one holds nothing, though the file stays. Pins are written,
and obeyed, under the guard of the run: what is pinned before it is looked for is there until the pin goes.
"""

import json
import os
import time
from collections.abc import Collection
from dataclasses import asdict, dataclass, field
from pathlib import Path

from src.errors import RunError
from src.files import read_json, reading, write_json, writing
from src.runs.checkpoints import folder as checkpoints
from src.runs.history.transaction import manifest_hash
from src.runs.lease import LEASE, STALE_SECONDS, directory_lock, holder_host, holder_is_dead

FOLDER = "pins"


@dataclass(frozen=True)
class Pin:
    """What one holder needs."""

    holder: str
    """The folder with his lease, relative to the run."""
    every: int | None = None
    """The checkpoints at multiples of so many steps, those to come among them, but for the `ended`."""
    ended: dict[str, str] = field(default_factory=dict)
    """"step-00000040" -> hash of its manifest: one of that step on another branch is another checkpoint."""
    steps: dict[str, str] = field(default_factory=dict)
    """Single ones, named as in `ended`."""

    def holds(self, checkpoint: Path) -> bool:
        """Whether it means the checkpoint."""
        name = checkpoint.name
        if self.every and checkpoints.step_of(checkpoint) % self.every == 0:
            return self.ended.get(name) is None or self.ended[name] != manifest_hash(checkpoint)
        return name in self.steps and self.steps[name] == manifest_hash(checkpoint)


class StalenessProbe:
    """Tells the leases of the dead. One whose holder is elsewhere must be seen standing still, between two looks on our own clock."""

    def __init__(self, stale_seconds: float = STALE_SECONDS) -> None:
        self._stale_seconds = stale_seconds
        self._seen: dict[Path, tuple[bytes, float]] = {}

    def is_stale(self, folder: Path) -> bool:
        """Whether nobody holds the lease in `folder` any more; False where that cannot be told yet."""
        known = holder_is_dead(folder)
        if known is not None:
            return known
        try:
            with reading(folder):
                beat = (folder / LEASE).read_bytes()
        except (FileNotFoundError, RunError):  # let go of just now, or not to be read: the next look tells
            return False
        now = time.monotonic()
        before, since = self._seen.get(folder, (b"", now))
        if beat != before:
            self._seen[folder] = (beat, now)
            return False
        return now - since >= self._stale_seconds


def place(run: Path, name: str, pin: Pin) -> None:
    """Pin checkpoints of the save directory `run`, instead of what the pin `name` held; what is gone by then must be looked for after.

    Raises:
        RunError: there is no such run, or the disk refuses.
    """
    path = run / FOLDER / f"{name}.json"
    with directory_lock(run, create=False), writing(path):
        path.parent.mkdir(exist_ok=True)
        write_json(path, asdict(pin))


def remove(run: Path, name: str) -> None:
    """Pin nothing under this name any more.

    Raises:
        RunError: the disk refuses.
    """
    path = run / FOLDER / f"{name}.json"
    with writing(path):
        path.unlink(missing_ok=True)


def find_pinned(run: Path, among: Collection[Path], silence: StalenessProbe) -> dict[Path, str]:
    """Those of the checkpoints `among` that somebody works on: checkpoint -> who, for people. To be called under the guard of `run`.

    Raises:
        RunError: a pin is damaged, or cannot be read.
    """
    found: dict[Path, str] = {}
    for path in sorted((run / FOLDER).glob("[!.]*.json")):
        pin = _read_pin(path)
        if pin is None:
            continue
        holder = Path(os.path.normpath(run / pin.holder))
        mine = [checkpoint for checkpoint in among if checkpoint not in found and pin.holds(checkpoint)]
        if mine and not silence.is_stale(holder):
            found |= dict.fromkeys(mine, f"{path}, for {holder_host(holder) or 'somebody'}")
    return found


def _read_pin(path: Path) -> Pin | None:
    """None where it was taken away just now."""
    try:
        raw = read_json(path, RunError)
    except RunError as error:
        if not path.exists():
            return None
        raise RunError(f"{error} {_ADVICE}") from None
    if not _is_pin(raw):
        raise RunError(f"{path}: not a pin: got {json.dumps(raw)[:60]}. {_ADVICE}")
    return Pin(**raw)


_ADVICE = "Delete it, if nobody evaluates or uploads the checkpoints of this run."


def _is_pin(raw: object) -> bool:
    if not isinstance(raw, dict) or raw.keys() != asdict(Pin("")).keys() or not isinstance(raw["holder"], str):
        return False
    hashes = [raw["ended"], raw["steps"]]
    every = raw["every"] is None or (type(raw["every"]) is int and raw["every"] > 0)
    return every and all(isinstance(named, dict) and all(isinstance(value, str) for value in named.values()) for named in hashes)
