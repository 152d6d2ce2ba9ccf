"""Which checkpoints of runs that rest may go, by rule: none that a run resumes from, another experiment starts from or somebody works on.

What a training deletes while it goes on is `rotation`'s.
"""

import os
import shutil
import uuid
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path

from src.errors import CheckpointError, RunError, UserError
from src.files import defect, read_json, writing
from src.runs import parents
from src.runs.checkpoints import folder as checkpoints
from src.runs.checkpoints import pins
from src.runs.lease import guarded, holder_is_dead
from src.runs.metadata import EXP_DICT, JOB, STATUS, read_exp_dict, read_status

_LEFT = ("damaged-step-", ".step-", ".damaged-step-")
"""How copies that a resume set aside, and what killed writers left, begin."""
Needed = AbstractSet[tuple[str, str]]
"""(id, "last" or "best") of what other experiments start from."""


@dataclass(frozen=True)
class Rule:
    """What to keep besides what must be kept."""

    keep_last: int = 1
    """Newest whole checkpoints of each run."""
    keep_best: bool = True
    older_than_seconds: float = 0.0
    """Only what was written before that goes."""


@dataclass(frozen=True)
class Plan:
    """What may go of one run, and what it was decided from."""

    run: Path
    doomed: tuple[Path, ...] = ()
    spared: str = ""
    """Why nothing of this run may go."""
    seen: tuple[bytes, ...] = ()


def needed(runs: Path) -> tuple[set[tuple[str, str]], list[str]]:
    """What the experiments in the folder `runs` start from; and a warning for each whose dict cannot be read.

    What these start from is not known: then the last and the best checkpoint of every run are needed.
    """
    found: set[tuple[str, str]] = set()
    warnings = []
    names = [entry.name for entry in runs.iterdir() if not entry.name.startswith(".") and _says_something(entry)]
    for name in sorted(names):
        try:
            found.update(parents.named(read_exp_dict(runs / name)))
        except UserError as error:
            warnings.append(f"{error} What it starts from is not known, so the last and the best checkpoint of every run stay.")
    if warnings:
        found.update((name, which) for name in names for which in ("last", "best"))
    return found, warnings


def plan(run: Path, rule: Rule, by_others: Needed, now: float) -> Plan:
    """What may go of the save directory `run`. by_others: see `needed`. now: seconds since the epoch, of the clock that files are dated by.

    Copies that were set aside as damaged, and what killed writers left, may go as well.

    Raises:
        RunError, CheckpointError: status.json, best.json or a pin is damaged.
    """
    if holder_is_dead(run) is not True:
        return Plan(run, spared="it is running, or its holder on another machine may be")
    seen = _seen(run)
    whole, torn = [], []
    for checkpoint in checkpoints.every(run):
        (torn if defect(checkpoint, hashes=False) else whole).append(checkpoint)
    torn += [path for path in sorted((run / "checkpoints").glob("*")) if path.name.startswith(_LEFT) and path.is_dir()]
    kept = set(whole[len(whole) - rule.keep_last :]) if rule.keep_last else set()
    state = read_status(run)
    best = _best_step(run)
    if best is not None and (rule.keep_best or state["state"] != "done" or (run.name, "best") in by_others):
        kept.add(checkpoints.folder(run, best))
    if (run.name, "last") in by_others and type(state.get("step")) is int:
        kept.add(checkpoints.folder(run, state["step"]))
    before = now - rule.older_than_seconds
    old = [path for path in (*whole, *torn) if path not in kept and not path.is_symlink() and path.stat().st_mtime <= before]
    if state["state"] != "done" and set(old) & set(whole):
        newest = checkpoints.newest_whole(run)  # reads every byte, as a resume does
        old = [path for path in old if path != newest]
    pinned = _pinned(run, old)
    if old and len(pinned) == len(old):
        return Plan(run, spared=f"what could go is worked on: see {next(iter(pinned.values()))}")
    return Plan(run, tuple(path for path in old if path not in pinned), seen=seen)


def remove(decided: Plan) -> None:
    """Delete what `plan` found, if nothing has happened to the run since. A crash at any moment leaves whole checkpoints or none.

    Raises:
        RunError: the run was started, or has changed; nothing of it is deleted. Or the disk refuses.
    """
    run = decided.run
    if not decided.doomed:
        return
    renamed = []
    with guarded(run, create=False), writing(run):  # nobody can start the run in here, so it must not last
        if holder_is_dead(run) is not True or _seen(run) != decided.seen:
            raise RunError(f"{run}: has changed meanwhile, so nothing of it was deleted. Look again.")
        for path, pin in _pinned(run, decided.doomed).items():
            raise RunError(f"{path}: somebody works on it since a moment ago (see {pin}), so nothing of {run} was deleted. Look again.")
        best = _best_step(run)
        if best is not None and checkpoints.folder(run, best) in decided.doomed:
            checkpoints.forget_best(run)
        for path in decided.doomed:
            # Renamed first: a half deleted folder must not look like a checkpoint.
            hidden = path if path.name.startswith(".") else path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.old")
            renamed.append(path.rename(hidden))
    for path in renamed:
        with writing(path):
            shutil.rmtree(path)


def size(path: Path) -> int:
    """Bytes of the files below a folder."""
    return sum(entry.lstat().st_size for entry in path.rglob("*") if not entry.is_dir())


def _pinned(run: Path, among: Sequence[Path]) -> dict[Path, str]:
    """Those that somebody works on, who may be on another machine; copies that were set aside are nobody's."""
    return pins.held(run, [path for path in among if not path.name.startswith(_LEFT)], pins.Silence())


def _says_something(run: Path) -> bool:
    """Whether it is the save directory of an experiment: one whose dict was lost can be started again all the same."""
    try:
        return any((run / name).exists() for name in (EXP_DICT, STATUS, JOB))
    except PermissionError:
        return True


def _best_step(run: Path) -> int | None:
    pointer = run / "checkpoints" / "best.json"
    if not pointer.exists():
        return None
    named = read_json(pointer, CheckpointError)
    if not isinstance(named, dict) or type(named.get("step")) is not int:
        raise CheckpointError(f'{pointer}: expected {{"step": …}}. Nothing of this run is deleted, as its best checkpoint is not known.')
    return named["step"]


def _seen(run: Path) -> tuple[bytes, ...]:
    """What tells whether a run has moved on: its status, its best checkpoint, and the names of all."""
    contents = [path.read_bytes() if path.exists() else b"" for path in (run / STATUS, run / "checkpoints" / "best.json")]
    folder = run / "checkpoints"
    return (*contents, *(name.encode(errors="replace") for name in sorted(os.listdir(folder) if folder.exists() else [])))
