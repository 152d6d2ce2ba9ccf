"""Deletion of old checkpoints: `Rotation` while a run trains, `plan` and `remove` afterwards.

Checkpoints that a run resumes from, that another experiment starts from, or that are pinned are never deleted.
"""

import logging
import os
import shutil
import uuid
from collections.abc import Collection, Iterable, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from src.errors import ConfigError, RunError, UserError
from src.files import defect, read_bytes, read_json, sync_directory, write_json, writing
from src.runs import parents
from src.runs.checkpoints import checkpoints, pins
from src.runs.history import archive, branches
from src.runs.lease import LEASE, directory_lock, holder_of
from src.runs.scores import SCORES, Scores
from src.runs.store import EXP_DICT, JOB, STATUS, SavedRun

log = logging.getLogger(__name__)
_LEFTOVER_PREFIXES = ("damaged-step-", ".step-", ".damaged-step-")
"""Prefixes of damaged checkpoints that a resume renamed, and of leftovers of killed writers."""
CHILD_STEPS = Path("checkpoints", "continued.json")
"""File of a run that lists the steps that other experiments continue or evaluate; see `mark_continued`."""
NeededCheckpoints = AbstractSet[tuple[str, str | int]]
"""(id, "last", "best" or a step) of the checkpoints that other experiments start from."""


@dataclass(frozen=True)
class CleanupRule:
    """Checkpoints to keep in addition to those that are never deleted."""

    keep_last: int = 1
    """Number of newest complete checkpoints of each run."""
    keep_best: bool = True
    older_than_seconds: float = 0.0
    """Keep checkpoints younger than this."""


@dataclass(frozen=True)
class Plan:
    """The checkpoints of one run that can be deleted."""

    run: Path
    deletable: tuple[Path, ...] = ()
    reason_to_keep: str = ""
    """Why nothing of this run can be deleted."""
    snapshot: tuple[bytes, ...] = ()
    """State of the run on which the plan is based."""


def needed_by_children(runs: Path) -> tuple[set[tuple[str, str | int]], list[str]]:
    """The checkpoints that experiments in the folder `runs` start from, and a warning for each unreadable dict.

    The parents in an unreadable dict are unknown: then all checkpoints of every run are needed.
    """
    result: set[tuple[str, str | int]] = set()
    warnings = []
    names = [entry.name for entry in runs.iterdir() if not entry.name.startswith(".") and _is_run(entry)]
    for name in sorted(names):
        try:
            result.update(parents.parent_checkpoints(SavedRun(runs / name).exp))
        except UserError as error:
            warnings.append(f"{error} Its parent is unknown, so the checkpoints of every run are kept.")
    if warnings:
        result.update((name, which) for name in names for which in ("last", "best"))
        for name in names:
            with suppress(PermissionError):  # nothing of such a run can be deleted
                result.update((name, checkpoints.step_of(path)) for path in checkpoints.list_all(runs / name))
    return result, warnings


def mark_continued(run: Path, step: int) -> None:
    """Record that another experiment needs the checkpoint of `step`, so that `Rotation` does not delete it.
    Check afterwards that it still exists.

    Raises:
        RunError: the record is damaged, or the disk refuses.
    """
    with directory_lock(run, create=False):
        write_json(run / CHILD_STEPS, sorted({*read_continued(run), step}))


def read_continued(run: Path) -> list[int]:
    """The steps of `mark_continued`."""
    return read_json(run / CHILD_STEPS, RunError) if (run / CHILD_STEPS).exists() else []


def describe_holder(run: Path) -> str:
    """Why nothing of a run can be deleted, if a process can still hold it; else "".
    A silent holder on another machine can be alive."""
    holder = holder_of(run)
    if holder.is_dead is True:
        return ""
    if contact := holder.lost_contact:
        return f"{contact}, which does not prove that it ended. If its process is gone, delete the file {run / LEASE}"
    return "it is running, maybe on another machine"


def plan(run: Path, rule: CleanupRule, by_others: NeededCheckpoints, now: float) -> Plan:
    """The deletable checkpoints of the save directory `run`, including damaged ones and leftovers of killed writers.

    by_others: see `needed_by_children`. now: seconds since the epoch, by the clock of the disk.

    Raises:
        RunError, CheckpointError: status.json, best.json or a pin is damaged.
    """
    if reason := describe_holder(run):
        return Plan(run, reason_to_keep=reason)
    snapshot = _snapshot(run)
    complete_paths, damaged_paths = [], []
    for checkpoint in checkpoints.list_all(run):
        (damaged_paths if defect(checkpoint, hashes=False) else complete_paths).append(checkpoint)
    damaged_paths += [
        path
        for path in sorted((run / "checkpoints").glob("*"))
        if path.name.startswith(_LEFTOVER_PREFIXES) and path.is_dir()
    ]
    required_paths = set(complete_paths[len(complete_paths) - rule.keep_last :]) if rule.keep_last else set()
    state = SavedRun(run).status
    best = checkpoints.best_step(run)
    if best is not None and (rule.keep_best or state["state"] != "done" or (run.name, "best") in by_others):
        required_paths.add(checkpoints.folder(run, best))
    if (run.name, "last") in by_others and type(state.get("step")) is int:
        required_paths.add(checkpoints.folder(run, state["step"]))
    required_paths |= {path for path in complete_paths if (run.name, checkpoints.step_of(path)) in by_others}
    before = now - rule.older_than_seconds
    deletable = [
        path
        for path in (*complete_paths, *damaged_paths)
        if path not in required_paths and not path.is_symlink() and path.stat().st_mtime <= before
    ]
    if state["state"] != "done" and set(deletable) & set(complete_paths):
        newest = checkpoints.newest_complete(run)  # reads every byte, as a resume does
        deletable = [path for path in deletable if path != newest]
    pinned = _find_pinned(run, deletable)
    if deletable and len(pinned) == len(deletable):
        return Plan(run, reason_to_keep=f"all deletable checkpoints are in use: see {next(iter(pinned.values()))}")
    return Plan(run, tuple(path for path in deletable if path not in pinned), snapshot=snapshot)


def remove(cleanup: Plan) -> None:
    """Delete the checkpoints of a plan, if the run has not changed since.
    A crash leaves each checkpoint complete or deleted.

    Raises:
        RunError: the run was started or has changed, so nothing is deleted; or the disk refuses.
    """
    run = cleanup.run
    if not cleanup.deletable:
        return
    hidden_paths = []
    with directory_lock(run, create=False), writing(run):  # blocks a start of the run, so it must be short
        if holder_of(run).is_dead is not True or _snapshot(run) != cleanup.snapshot:
            raise RunError(f"{run}: has changed meanwhile, so nothing in it was deleted. Try again.")
        for path, pin in _find_pinned(run, cleanup.deletable).items():
            raise RunError(f"{path}: pinned meanwhile (see {pin}), so nothing in {run} was deleted. Try again.")
        best = checkpoints.best_step(run)
        if best is not None and checkpoints.folder(run, best) in cleanup.deletable:
            checkpoints.forget_best(run)
        for path in cleanup.deletable:
            # Renamed first: a half deleted folder must not look like a checkpoint.
            hidden = path if path.name.startswith(".") else path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.old")
            hidden_paths.append(path.rename(hidden))
    for path in hidden_paths:
        with writing(path):
            shutil.rmtree(path)


def folder_bytes(path: Path) -> int:
    """Total size of the files below a folder, in bytes."""
    return sum(entry.lstat().st_size for entry in path.rglob("*") if not entry.is_dir())


def _find_pinned(run: Path, among: Sequence[Path]) -> dict[Path, str]:
    """The pinned checkpoints of `among`."""
    return pins.find_pinned(
        run, [path for path in among if not path.name.startswith(_LEFTOVER_PREFIXES)], pins.StalenessProbe()
    )


def _is_run(run: Path) -> bool:
    """Whether the folder is a save directory of an experiment, even if its dict is missing."""
    try:
        return any((run / name).exists() for name in (EXP_DICT, STATUS, JOB))
    except PermissionError:
        return True


def _snapshot(run: Path) -> tuple[bytes, ...]:
    """The state of a run that deletion depends on: its status, its best checkpoint, and all checkpoints' names."""
    folder = run / "checkpoints"
    contents = [read_bytes(path) if path.exists() else b"" for path in (run / STATUS, folder / "best.json")]
    return (*contents, *map(os.fsencode, sorted(os.listdir(folder)) if folder.exists() else []))


@dataclass(frozen=True)
class RotationRule:
    """Rules for checkpoints to keep: one match is enough.

    Raises:
        ConfigError: a number is too small.
    """

    last: int = 2
    """Number of newest checkpoints. The second newest is a fallback for resuming."""
    every: int | None = None
    """Interval: steps that are multiples of this."""
    best: int = 1
    """Number of best checkpoints by `loop.best_metric`."""

    def __post_init__(self) -> None:
        for name, value in (("last", self.last), ("every", self.every), ("best", self.best)):
            if value is not None and value < 1:
                raise ConfigError(f"--keep_{name}: expected a number of at least 1, got {value}.")

    def count(self, steps: Sequence[int]) -> int:
        """Maximum number of kept checkpoints at the end of a run with checkpoints at `steps`, in order."""
        kept_steps = {*steps[-self.last :], *(step for step in steps if self.every and step % self.every == 0)}
        return min(len(steps), len(kept_steps) + self.best)

    def check(self, intervals: Iterable[int]) -> None:
        """Refuse an `every` without checkpoints at its multiples. intervals: steps between checkpoints.

        Raises:
            ConfigError: checkpoints are not written at each multiple of `every`. Raised on all ranks.
        """
        steps = sorted(set(intervals))
        if self.every is not None and all(self.every % interval for interval in steps):
            error = ConfigError(
                f"--keep_every: checkpoints are written every {' and every '.join(map(str, steps))} steps, "
                f"not at each multiple of {self.every}. "
                f"Take a multiple of {' or of '.join(map(str, steps))}, or change --save_every."
            )
            error.everywhere = True
            raise error


class Rotation:
    """Applies the rule `keep` to the current branch of a run while it trains.
    It is stateless: it reads checkpoints and scores each time."""

    def __init__(self, run: Path, keep: RotationRule, metric: str, mode: Literal["min", "max"]) -> None:
        self._run, self._keep, self._metric = run, keep, metric
        self._sign = 1 if mode == "min" else -1
        self._silence = pins.StalenessProbe()
        self._is_parent: bool | None = None

    def rotate(self, step: int, best_step: int | None) -> None:
        """Delete old checkpoints after the checkpoint of `step` is written, and leftovers of killed writers.

        A crash leaves each checkpoint complete or deleted. If the required checkpoints are unknown, or the disk
        refuses, nothing is deleted; this logs a warning, and the training continues. The caller holds the lease, and no
        checkpoint is being written.

        best_step: step in best.json; its checkpoint is not deleted.
        """
        try:
            if deletable := self._deletable(step, best_step):
                self._hide(deletable)
        except UserError as error:
            log.warning("%s Until this is fixed, fewer checkpoints are deleted.", error)
        for hidden in (self._run / "checkpoints").glob(".step-*"):
            shutil.rmtree(hidden, ignore_errors=True)
            if hidden.exists():
                log.warning("%s: could not be deleted; retrying after the next checkpoint.", hidden)

    def _deletable(self, step: int, best_step: int | None) -> list[Path]:
        """The checkpoints that the rule does not keep, oldest first; pins are not considered.
        Expensive checks come last."""
        keep = self._keep
        paths = [path for path in checkpoints.list_all(self._run) if checkpoints.step_of(path) <= step]
        # A damaged checkpoint is not a fallback.
        complete_paths = [path for path in paths if defect(path, hashes=False) is None]
        newest = complete_paths[-keep.last :]
        if not newest:
            return []
        older_paths = paths[: paths.index(newest[0])]
        candidates = [path for path in older_paths if checkpoints.step_of(path) != best_step and not path.is_symlink()]
        if keep.every is not None:
            candidates = [path for path in candidates if checkpoints.step_of(path) % keep.every]
        if candidates and keep.best > 1:
            best = self._best(complete_paths)
            candidates = [path for path in candidates if path not in best]
        if candidates and (before := self._last_offered_step()):
            candidates = [path for path in candidates if checkpoints.step_of(path) > before]
        return candidates

    def _best(self, complete_paths: Collection[Path]) -> set[Path]:
        """The best evaluated checkpoints; ties go to the earliest, as in `ModelSelection`."""
        rows = {row["step"]: row.get(self._metric) for row in Scores(self._run / SCORES, read_only=True).rows()}
        ranking = [
            (value, checkpoints.step_of(path), path)
            for path in complete_paths
            if (value := rows.get(checkpoints.step_of(path))) is not None
        ]
        ranking.sort(key=lambda item: (self._sign * item[0], item[1]))
        return {path for _, _, path in ranking[: self._keep.best]}

    def _last_offered_step(self) -> int:
        """Latest step from which a child can have started; 0 without children. Steps up to it are not deleted.

        Children start from the last or the best checkpoint of a finished run. Such a run trains again only after a
        rewind, so any checkpoint up to the rewind, or up to a rewind that was undone, can have been the best. The
        folder of runs is searched once: later children start from checkpoints after the run is done again.
        """
        chain = branches.read(self._run)
        number, before = (chain[-1].number, chain[-1].from_step) if chain else (0, 0)
        undone = [
            record for record in archive.records(self._run) if record["event"] == "rewind" and record["number"] > number
        ]
        before = max([before, *(record["step"] for record in undone)])
        if not before:
            return 0
        if self._is_parent is None:
            self._is_parent = self._run.name in {name for name, _ in needed_by_children(self._run.parent)[0]}
            if self._is_parent:
                log.info(
                    "%s: another experiment starts from it, so checkpoints up to step %d are kept.", self._run, before
                )
        return before if self._is_parent else 0

    def _hide(self, deletable: Collection[Path]) -> None:
        """Rename unpinned checkpoints, so that no half deleted folder looks like a checkpoint."""
        folder = self._run / "checkpoints"
        with directory_lock(self._run, create=False), writing(folder):
            pinned = pins.find_pinned(self._run, deletable, self._silence)
            continued_steps = read_continued(self._run)
            for path in deletable:
                if path not in pinned and checkpoints.step_of(path) not in continued_steps:
                    with suppress(FileNotFoundError):  # deleted by another process just now
                        path.rename(path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.old"))
            sync_directory(folder)
