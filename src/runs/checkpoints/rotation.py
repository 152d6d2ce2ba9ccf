"""What a training deletes of its own checkpoints while it goes on, by rule. Deleting those of runs that rest is `retention`'s.

How many checkpoints a run keeps changes no number, so the rule is a choice of the command line and of each start. It is applied to the
live line alone: the checkpoints up to the one just written, in checkpoints/, from which a rewind has moved those of other branches.
"""

import logging
import shutil
import uuid
from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from src.errors import ConfigError, UserError
from src.files import defect, sync_directory, writing
from src.runs.checkpoints import folder as checkpoints
from src.runs.checkpoints import pins, retention
from src.runs.history import archive as abandoned
from src.runs.history import branches
from src.runs.lease import guarded
from src.runs.scores import SCORES, Scores

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Keep:
    """A checkpoint stays while any of these holds.

    Raises:
        ConfigError: a number that is too small.
    """

    last: int = 2
    """It is one of so many newest: one to resume from, one to fall back to."""
    every: int | None = None
    """Its step is a multiple of this."""
    best: int = 1
    """It is one of so many best by `loop.best_metric`, of those that were evaluated."""

    def __post_init__(self) -> None:
        for name, value in (("last", self.last), ("every", self.every), ("best", self.best)):
            if value is not None and value < 1:
                raise ConfigError(f"--keep_{name}: expected a number of at least 1, got {value}.")

    def check(self, intervals: Iterable[int]) -> None:
        """Refuse an `every` that would keep none, or fewer than it says. intervals: steps between checkpoints, any of them.

        Raises:
            ConfigError: checkpoints are not written at each multiple of `every`; the same in all processes.
        """
        steps = sorted(set(intervals))
        if self.every is not None and all(self.every % interval for interval in steps):
            error = ConfigError(
                f"--keep_every: checkpoints are written every {' and every '.join(map(str, steps))} steps, so there is not one at each "
                f"multiple of {self.every}. Take a multiple of {' or of '.join(map(str, steps))}, or change --log_every."
            )
            error.everywhere = True
            raise error


class Rotation:
    """Applies `keep` to one run. It notes nothing that a restart would need: the same checkpoints and scores decide alike."""

    def __init__(self, run: Path, keep: Keep, metric: str, mode: Literal["min", "max"]) -> None:
        self._run, self._keep, self._metric = run, keep, metric
        self._sign = 1 if mode == "min" else -1
        self._silence = pins.Silence()
        self._is_parent: bool | None = None

    def rotate(self, step: int, best_step: int | None) -> None:
        """Delete what need not stay now that the checkpoint of `step` is written, and what killed writers have left.

        A crash at any moment leaves whole checkpoints or none. Where it cannot be told what must stay, or the disk refuses, all stay, and
        a warning says so: the training goes on. To be called by who holds the lease, while nothing is being written.

        best_step: the one that best.json names. It stays.
        """
        try:
            if doomed := self._doomed(step, best_step):
                self._hide(doomed)
        except UserError as error:
            log.warning("%s Until that is mended, checkpoints may stay that could go.", error)
        for hidden in (self._run / "checkpoints").glob(".step-*"):
            shutil.rmtree(hidden, ignore_errors=True)
            if hidden.exists():
                log.warning("%s: could not be deleted; it is tried again after the next checkpoint.", hidden)

    def _doomed(self, step: int, best_step: int | None) -> list[Path]:
        """What may go by the rule, unless somebody works on it, oldest first. Looks closer only where something would go."""
        keep = self._keep
        line = [path for path in checkpoints.every(self._run) if checkpoints.step_of(path) <= step]
        whole = [path for path in line if defect(path, hashes=False) is None]  # what is damaged is none to fall back to
        newest = whole[-keep.last :]
        if not newest:
            return []
        doomed = [path for path in line if checkpoints.step_of(path) < checkpoints.step_of(newest[0]) and not path.is_symlink()]
        doomed = [path for path in doomed if checkpoints.step_of(path) != best_step]
        if keep.every is not None:
            doomed = [path for path in doomed if checkpoints.step_of(path) % keep.every]
        if doomed and keep.best > 1:
            best = self._best(whole)
            doomed = [path for path in doomed if path not in best]
        if doomed and (before := self._offered_before()):
            doomed = [path for path in doomed if checkpoints.step_of(path) > before]
        return doomed

    def _best(self, whole: Collection[Path]) -> set[Path]:
        """The best of those that were evaluated; of equals the earliest, as `Selection` has it."""
        rows = {row["step"]: row.get(self._metric) for row in Scores(self._run / SCORES, read_only=True).rows()}
        scored = [(value, checkpoints.step_of(path), path) for path in whole if (value := rows.get(checkpoints.step_of(path))) is not None]
        scored.sort(key=lambda item: (self._sign * item[0], item[1]))
        return {path for _, _, path in scored[: self._keep.best]}

    def _offered_before(self) -> int:
        """The last step whose checkpoint another experiment may have started from, which stays; 0 where there is none.

        Experiments start from the last or the best checkpoint of a run that is done, and who goes on in such a run has gone back in it
        first. What was there then may have been the best, though another is now; so may what the branch was made on that an undo has
        left. The folder of runs is searched once: who comes later starts from what the run has when it is done again.
        """
        chain = branches.read(self._run)
        number, before = (chain[-1].number, chain[-1].from_step) if chain else (0, 0)
        undone = [one for one in abandoned.records(self._run) if one["event"] == "rewind" and one["number"] > number]
        before = max([before, *(one["step"] for one in undone)])
        if not before:
            return 0
        if self._is_parent is None:
            self._is_parent = self._run.name in {name for name, _ in retention.needed(self._run.parent)[0]}
            if self._is_parent:
                log.info("%s: another experiment starts from it, so its checkpoints up to step %d stay.", self._run, before)
        return before if self._is_parent else 0

    def _hide(self, doomed: Collection[Path]) -> None:
        """Rename, so that no half deleted folder looks like a checkpoint; not what somebody works on."""
        folder = self._run / "checkpoints"
        with guarded(self._run, create=False), writing(folder):
            pinned = pins.held(self._run, doomed, self._silence)
            for path in doomed:
                if path not in pinned:
                    with suppress(FileNotFoundError):  # cleaned up by somebody else just now
                        path.rename(path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.old"))
            sync_directory(folder)
