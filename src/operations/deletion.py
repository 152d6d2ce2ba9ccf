"""Deletion of runs: `plan` selects runs, `delete` removes them.

A run is not deleted if it is alive, has a queued job, is pinned by an evaluation, or is an ancestor of a remaining run.
"""

import os
import re
import shutil
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from src.errors import RunError, UserError
from src.files import reading, writing
from src.launch import tracking
from src.runs.checkpoints import checkpoints, pins, retention
from src.runs.lease import Lease
from src.runs.parents import parent_ids
from src.runs.scores import SCORES
from src.runs.store import DELETED_FOLDER, EXP_DICT, JOB, LOGS, STATUS, RunStore, SavedRun

_AGES = (STATUS, SCORES, EXP_DICT)
_LEFTOVER = re.compile(r"\.[0-9a-f]{32,128}\.[0-9a-f]{8}\.old")
"""Names of runs after an interrupted deletion."""


@dataclass
class Deletion:
    """The result of `plan`."""

    runs: list[Path] = field(default_factory=list)
    """Save directories to delete."""
    resets: list[Path] = field(default_factory=list)
    """Save directories in <runs>/deleted, from restarts with -r 1, and leftovers of an interrupted deletion."""
    warnings: list[str] = field(default_factory=list)
    """One line for each selected run that is not deleted."""

    def paths(self) -> list[Path]:
        """All files and folders to delete."""
        return [*self.runs, *(path for run in self.runs for path in _logs(run)), *self.resets]


def plan(runs: Path, selected_runs: Sequence[Path], before: float) -> Deletion:
    """The `selected_runs` that can be deleted, and the content of <runs>/deleted, if unchanged since `before`.

    Raises:
        RunError: the folder cannot be read.
    """
    deletion, younger = Deletion(), 0
    for run in dict.fromkeys(selected_runs):
        try:
            with reading(run):
                if _change_time(run) > before:
                    younger += 1
                    continue
                reason = _reason_to_stay(run)
        except UserError as error:
            reason = str(error)
        if reason:
            deletion.warnings.append(f"{run}: not deleted: {reason}")
        else:
            deletion.runs.append(run)
    if younger:
        deletion.warnings.append(
            f"{younger} of {len(set(selected_runs))} runs are not deleted: they are younger than --older-than."
        )
    _exclude_queued(runs, deletion)
    _exclude_ancestors(runs, deletion)
    folder = runs / DELETED_FOLDER
    with reading(folder):
        resets = sorted(folder.iterdir()) if folder.is_dir() else []
        resets += [runs / name for name in sorted(os.listdir(runs)) if _LEFTOVER.fullmatch(name)]
    deletion.resets = [path for path in resets if _change_time(path) <= before]
    return deletion


def _reason_to_stay(run: Path) -> str:
    if run.is_symlink():
        return f"it is a link to {os.readlink(run)}. Delete both by hand."
    if SavedRun(run).is_foreign:
        return "another program made this directory. Delete it by hand."
    if holder := retention.describe_holder(run):
        return f"{holder}."
    if pinned := pins.find_pinned(run, checkpoints.list_all(run), pins.StalenessProbe()):
        return f"a checkpoint is in use: see {next(iter(pinned.values()))}."
    return ""


def _exclude_queued(runs: Path, deletion: Deletion) -> None:
    """Exclude runs with a queued or running job, or with a scheduler that cannot be queried."""
    with_job = [run.name for run in deletion.runs if (run / JOB).exists() and SavedRun(run).state_or_damage != "done"]
    jobs, problems = tracking.track(RunStore(runs), with_job)
    reasons = {
        name: f"{problem} It is not deleted until its job is known to have ended." for name, problem in problems.items()
    }
    reasons |= {
        name: f"its job {job.job_id} is queued or running."
        for name, job in jobs.items()
        if job.is_alive or job.is_unknown
    }
    deletion.warnings += [f"{run}: not deleted: {reasons[run.name]}" for run in deletion.runs if run.name in reasons]
    deletion.runs = [run for run in deletion.runs if run.name not in reasons]


def _exclude_ancestors(runs: Path, deletion: Deletion) -> None:
    """Exclude the ancestors of remaining runs; exclude all runs if the parents of a remaining run are unknown."""
    deletable = {run.name: run for run in deletion.runs}
    with reading(runs):
        names = [name for name in os.listdir(runs) if not name.startswith(".") and name not in deletable]
        remaining_names = [name for name in names if (runs / name / EXP_DICT).exists()]
    while remaining_names:
        name = remaining_names.pop()
        try:
            run = SavedRun(runs / name)
            ancestors = [] if run.is_foreign else parent_ids(run.exp)
        except UserError as error:
            deletion.warnings.append(
                f"{error} Its parents are unknown, so no run is deleted. Repair it, or delete it by its id."
            )
            deletion.runs = []
            return
        for parent in ancestors:
            if ancestor := deletable.pop(parent, None):
                deletion.warnings.append(f"{ancestor}: not deleted: {name} starts from it.")
                remaining_names.append(parent)
    deletion.runs = list(deletable.values())


def _change_time(run: Path) -> float:
    """When the run, its status or its scores last changed, in seconds since the epoch by the clock of the disk."""
    times = [path.stat().st_mtime for path in (run / name for name in _AGES) if path.is_file()]
    return max(times, default=run.lstat().st_mtime)


def _logs(run: Path) -> list[Path]:
    return sorted((run.parent / LOGS).glob(f"{run.name}.*"))


def delete(deletion: Deletion) -> list[str]:
    """Delete the runs and folders of a plan; return a message for each that could not be deleted.
    A crash leaves each run complete or gone."""
    failed = []
    for run in deletion.runs:
        try:
            lease = Lease.acquire(run)
            try:
                hidden = run.with_name(f".{run.name}.{uuid.uuid4().hex[:8]}.old")
                lease.move_directory(hidden)
            except BaseException:
                lease.release()
                raise
            with writing(run):
                shutil.rmtree(hidden)
                for path in _logs(run):
                    path.unlink()
        except RunError as error:
            failed.append(str(error))
    for path in deletion.resets:
        try:
            with writing(path):
                if path.is_symlink() or not path.is_dir():
                    os.unlink(path)
                else:
                    shutil.rmtree(path)
        except RunError as error:
            failed.append(str(error))
    return failed
