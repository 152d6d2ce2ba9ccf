"""The checkpoints of a save directory: which are whole, which is the last, which is the best."""

import logging
import shutil
from pathlib import Path

from src.errors import CheckpointError
from src.files import defect, read_json, write_json

log = logging.getLogger(__name__)
KEEP = 2
"""Newest checkpoints kept besides the best one: one to resume from, one to fall back to."""


def folder(run: Path, step: int) -> Path:
    """Where the checkpoint of `step` lies."""
    return run / "checkpoints" / f"step-{step:08d}"


def step_of(checkpoint: Path) -> int:
    """The step that a checkpoint folder is named by."""
    return int(checkpoint.name.removeprefix("step-"))


def newest_whole(run: Path) -> Path | None:
    """The newest checkpoint whose files are all as they were written; None where there is none.

    A damaged one is passed over with a warning that names the file.
    """
    for checkpoint in sorted((run / "checkpoints").glob("step-*"), reverse=True):
        problem = defect(checkpoint)
        if problem is None:
            return checkpoint
        log.warning("%s: damaged, so it is passed over (%s).", checkpoint, problem)
    return None


def best(run: Path) -> Path | None:
    """The checkpoint that `mark_best` named, or None where none was.

    Raises:
        CheckpointError: the one named is gone or damaged.
    """
    pointer = run / "checkpoints" / "best.json"
    if not pointer.exists():
        return None
    checkpoint = folder(run, read_json(pointer, CheckpointError)["step"])
    problem = defect(checkpoint)
    if problem:
        raise CheckpointError(f"{checkpoint}: the best checkpoint is damaged ({problem}). Use the last one, or train again with -r 1.")
    return checkpoint


def mark_best(run: Path, step: int) -> None:
    """Name the checkpoint of `step` as the best."""
    write_json(run / "checkpoints" / "best.json", {"step": step})


def rotate(run: Path, best_step: int | None) -> None:
    """Delete all but the newest KEEP checkpoints and the best, and what a killed writer left half done."""
    checkpoints = run / "checkpoints"
    for old in sorted(checkpoints.glob("step-*"))[:-KEEP]:
        if step_of(old) != best_step:
            # Renamed first: a crash in the middle of the deletion must not leave something that looks like a checkpoint.
            shutil.rmtree(old.rename(old.with_name(f".{old.name}.old")))
    for torn in checkpoints.glob(".step-*"):
        shutil.rmtree(torn)
