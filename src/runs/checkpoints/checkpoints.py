"""The checkpoints of a save directory: complete ones, the last one, the best one."""

import hashlib
import json
import logging
import re
from pathlib import Path

from src.errors import CheckpointError
from src.files import defect, read_json, read_manifest, write_json, writing
from src.runs.store import SavedRun

log = logging.getLogger(__name__)
_NAME = re.compile(r"step-(\d{8}|[1-9]\d{8,})")


def folder(run: Path, step: int) -> Path:
    """The folder of the checkpoint of `step`, which need not exist."""
    return run / "checkpoints" / f"step-{step:08d}"


def step_of(checkpoint: Path) -> int:
    """The step in the name of a checkpoint folder."""
    return int(checkpoint.name.removeprefix("step-"))


def list_all(run: Path) -> list[Path]:
    """All checkpoints by step, complete or not. Other folders, such as copies made by hand, are ignored."""
    return sorted((entry for entry in (run / "checkpoints").glob("step-*") if _NAME.fullmatch(entry.name)), key=step_of)


def newest_complete(run: Path) -> Path | None:
    """The newest checkpoint without a defect, from which a run resumes, or None.

    Damaged checkpoints are skipped with a warning that names the file.
    """
    for checkpoint in reversed(list_all(run)):
        problem = defect(checkpoint)
        if problem is None:
            return checkpoint
        log.warning("%s: damaged, so it is skipped (%s).", checkpoint, problem)
    return None


def last(run: SavedRun, hashes: bool = True) -> Path:
    """The checkpoint of the last step of a finished run, from which its children start. Never an earlier one.

    hashes: see `files.defect`.

    Raises:
        CheckpointError: the run is not done, or the checkpoint is gone or damaged.
        RunError: status.json is damaged.
    """
    advice = f"Start the run again with --exp_id {run.name} -r 1, or restore it from a copy."
    status = run.status
    if status["state"] != "done":
        raise CheckpointError(
            f"{run.path}: has no last checkpoint yet, as it is {status['state']}, not done. "
            f"Train it to the end first: --exp_id {run.name}"
        )
    if type(status.get("step")) is not int:
        raise CheckpointError(f"{run.path}: status.json has no step. {advice}")
    checkpoint = folder(run.path, status["step"])
    if not checkpoint.exists():
        raise CheckpointError(f"{checkpoint}: the last checkpoint is missing. {advice}")
    if problem := defect(checkpoint, hashes):
        raise CheckpointError(f"{checkpoint}: the last checkpoint is damaged ({problem}). {advice}")
    return checkpoint


def of_step(run: Path, step: int, hashes: bool = True) -> Path:
    """The complete checkpoint of `step`. hashes: see `files.defect`.

    Raises:
        CheckpointError: it is missing or damaged. Names the steps of the other checkpoints.
    """
    checkpoint = folder(run, step)
    problem = defect(checkpoint, hashes) if checkpoint.exists() else "missing"
    if problem is None:
        return checkpoint
    steps = ", ".join(str(step_of(path)) for path in list_all(run) if path != checkpoint)
    raise CheckpointError(
        f"{checkpoint}: cannot be used: {problem.rstrip('.')}. Steps of the other checkpoints: {steps or 'none'}. "
        f"Start from one of them, or train the run again with a --keep_every that divides {step}."
    )


def best(run: Path, hashes: bool = True) -> Path | None:
    """The checkpoint that `mark_best` recorded, if any. hashes: see `files.defect`.

    Raises:
        CheckpointError: the checkpoint is missing or damaged, or best.json is damaged.
    """
    step = best_step(run)
    if step is None:
        return None
    checkpoint = folder(run, step)
    problem = defect(checkpoint, hashes)
    if problem:
        raise CheckpointError(
            f"{checkpoint}: the best checkpoint is damaged ({problem}). Use the last one, or train again with -r 1."
        )
    return checkpoint


def best_step(run: Path) -> int | None:
    """The step that `mark_best` recorded, if any. Its checkpoint can be missing.

    Raises:
        CheckpointError: best.json is damaged.
    """
    if not _pointer(run).exists():
        return None
    content = read_json(_pointer(run), CheckpointError)
    if not isinstance(content, dict) or type(content.get("step")) is not int:
        raise CheckpointError(
            f'{_pointer(run)}: expected {{"step": …}}, got {json.dumps(content)}. Restore it from a copy, or use the '
            "last checkpoint."
        )
    return content["step"]


def fingerprint(checkpoint: Path) -> str:
    """Hex digest of the weights and the tokenizer of a complete checkpoint, from its manifest.

    Raises:
        CheckpointError: the manifest is missing or damaged.
    """
    files = read_manifest(checkpoint, CheckpointError)["files"]
    digests = {
        name: entry for name, entry in files.items() if name == "model.safetensors" or name.startswith("tokenizer/")
    }
    return hashlib.sha256(json.dumps(digests, sort_keys=True).encode()).hexdigest()


def mark_best(run: Path, step: int) -> None:
    """Record the checkpoint of `step` as the best."""
    write_json(_pointer(run), {"step": step})


def forget_best(run: Path) -> None:
    """Undo `mark_best`, for a run that resumes from before its first evaluation.

    Raises:
        RunError: the disk refuses.
    """
    with writing(_pointer(run)):
        _pointer(run).unlink(missing_ok=True)


def set_aside_newer(run: Path, step: int) -> None:
    """Rename the checkpoints newer than `step`, which a resume skipped, to damaged-step-….

    Raises:
        RunError: the disk refuses.
    """
    for checkpoint in list_all(run):
        if step_of(checkpoint) > step:
            number, target = 0, checkpoint.with_name(f"damaged-{checkpoint.name}")
            while target.exists():
                number += 1
                target = checkpoint.with_name(f"damaged-{checkpoint.name}.{number}")
            with writing(checkpoint):
                checkpoint.rename(target)
            log.warning("%s: renamed to %s, as the run resumes from step %d.", checkpoint, target.name, step)


def _pointer(run: Path) -> Path:
    return run / "checkpoints" / "best.json"
