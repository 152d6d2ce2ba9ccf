"""Changes of a save directory that happen wholly, whenever they are interrupted: written down first, then done, then crossed out.

The journal lists steps that may be done any number of times in their order. A process that finds one does them all again: what was
decided is finished by whoever opens the run next. Nothing is deleted but what stands elsewhere by then. Paths are relative to the run.
"""

import contextlib
import errno
import fcntl
import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from src.errors import RunError
from src.files import TEMPORARY, read_json, reading, sync_directory, write_atomic, write_json, writing
from src.runs import ledger
from src.runs.metadata import STATUS
from src.runs.scores import SCORES, Scores
from src.runs.summary import SUMMARY, summarize

FILE = "intervention.json"
Step = dict[str, Any]
"""{"do": one of `_STEPS`, "to": path, …}"""
_NO_LINKS = {errno.EPERM, errno.EXDEV, errno.EMLINK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}
_IN_PATH = re.compile(r"(?:^|/)(?:opt_step|step|checkpoint)-0*(\d+)(?:/|$)")

log = logging.getLogger(__name__)


def begin(run: Path, steps: Sequence[Step], event: Mapping[str, Any]) -> None:
    """Do `steps` in the save directory `run`, whose lease the caller holds, and put `event` into the ledger. It needs an "id".

    Raises:
        RunError: the disk refuses. What is not done yet is done by the next `finish`.
    """
    assert event.get("id"), "without an id an interrupted event would be told twice"
    write_json(run / FILE, {"steps": list(steps), "event": dict(event)})
    finish(run)


def finish(run: Path) -> dict[str, Any] | None:
    """End what an interrupted `begin` has left to do in `run`, whose lease the caller holds; the event that was finished, if any.

    To be called before anything of the run is read by who is going to write there.

    Raises:
        RunError: the disk refuses, or the journal is damaged.
    """
    path = run / FILE
    if not path.exists():
        return None
    found = read_json(path, RunError)
    try:
        steps, event = [(_STEPS[step["do"]], step) for step in found["steps"]], dict(found["event"])
    except (KeyError, TypeError, ValueError):
        raise RunError(
            f"{path}: not a list of steps that this version knows. Finish with the version that began: {describe_event(found)}"
        ) from None
    with _lock_rows(run, found["steps"]):
        for do, step in steps:
            do(run, step)
    _sweep(run)
    ledger.append(run, event)
    with writing(path):
        path.unlink()
        sync_directory(run)
    return event


def describe_unfinished(run: Path) -> str | None:
    """What was begun in `run` and is not ended, for people; None where nothing is."""
    return describe_event(read_json(run / FILE, RunError)) if (run / FILE).exists() else None


def describe_event(journal: Any) -> str:
    """In a few words."""
    event = journal.get("event") if isinstance(journal, dict) else None
    return f"{event.get('event')} by {event.get('who')} at {event.get('when')}" if isinstance(event, dict) else "unknown"


def rows_after(content: bytes, step: int) -> tuple[bytes, bytes]:
    """Lines of a file by whether they are of a step up to `step` (or of none that is known), and of a later one; both end as lines do.

    A last line without its newline was cut by a crash; it goes with the later ones, lest the next be glued to it.
    """
    kept, later = [], []
    *lines, torn = content.split(b"\n")
    for line in lines:
        at = step_of(line)
        (later if at is not None and at > step else kept).append(line + b"\n")
    return b"".join(kept), b"".join(later) + (torn + b"\n" if torn else b"")


def step_of(line: bytes) -> int | None:
    """The step that a JSON line is of: its "step", "opt_step" or "iteration", or the checkpoint in the path that it evaluates."""
    try:
        row = json.loads(line)
    except ValueError:
        return None
    if not isinstance(row, dict):
        return None
    for name in ("step", "opt_step", "iteration"):
        if type(row.get(name)) is int:
            return row[name]
    for name in ("model_name_or_path", "checkpoint"):
        if isinstance(row.get(name), str) and (found := _IN_PATH.findall(row[name])):
            return int(found[-1])
    return None


def manifest_hash(checkpoint: Path) -> str | None:
    """sha256 of the manifest, which holds the hash of every file; None where there is none."""
    with contextlib.suppress(FileNotFoundError), reading(checkpoint):
        return hashlib.sha256((checkpoint / "manifest.json").read_bytes()).hexdigest()
    return None


@contextlib.contextmanager
def _lock_rows(run: Path, steps: Sequence[Step]) -> Iterator[None]:
    """Nobody adds a row to the files that are changed: those who evaluate checkpoints need no lease for it, but this lock."""
    names = {step["to"] for step in steps if step["do"] in ("cut", "put") and step["to"].endswith(".jsonl")}
    with contextlib.ExitStack() as stack:
        for path in (run / name for name in sorted(names) if (run / name).exists()):
            with writing(path):
                file = stack.enter_context(open(path, "rb"))
                fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _sweep(run: Path) -> None:
    """Delete what a killed process left half written below the run's folders; in the run itself the next start does."""
    with writing(run):
        for path in run.glob("*/**/.*"):
            if TEMPORARY.fullmatch(path.name) and path.is_file():
                path.unlink()


def _move(run: Path, step: Step) -> None:
    """Rename a folder. It is never put over another: what lies at "to" was moved there by this journal."""
    source, target = run / step["from"], run / step["to"]
    if target.exists() or _is_gone(source):
        return
    with writing(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        os.rename(source, target)
        sync_directory(target.parent)
        sync_directory(source.parent)


def _link(run: Path, step: Step) -> None:
    """Let the files of a folder have a second name, so that who deletes one leaves the other; copies where there are no links."""
    source, target = run / step["from"], run / step["to"]
    if target.exists() or _is_gone(source):
        return
    beside = target.with_name(f".{target.name}.linking")
    with writing(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(beside, ignore_errors=True)
        shutil.copytree(source, beside, copy_function=_link_or_copy)
        for folder in (beside, *(path for path in beside.rglob("*") if path.is_dir())):
            sync_directory(folder)
        os.rename(beside, target)
        sync_directory(target.parent)


def _is_gone(source: Path) -> bool:
    """Whether a folder was deleted since it was looked at, as retention may: the rest is done all the same."""
    if not source.is_dir():
        log.warning("%s: gone in the meantime, so it stays gone.", source)
        return True
    return False


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        shutil.copy2(source, target)
        with open(target, "rb") as file:
            os.fsync(file.fileno())


def _copy_aside(run: Path, step: Step) -> None:
    """Copy a file to where none is yet."""
    source, target = run / step["from"], run / step["to"]
    if not target.exists():
        with writing(target):
            target.parent.mkdir(parents=True, exist_ok=True)
            content = source.read_bytes()
        write_atomic(target, content)


def _restore(run: Path, step: Step) -> None:
    """Replace a file by a copy of another."""
    with writing(run / step["to"]):
        content = (run / step["from"]).read_bytes()
    write_atomic(run / step["to"], content)


def _cut_rows(run: Path, step: Step) -> None:
    """Move the lines of later steps than "step" from "to" to "rest". It is done where "to" does not begin as its copy "from" any more."""
    target = run / step["to"]
    with writing(target):
        before, content = (run / step["from"]).read_bytes(), target.read_bytes()
    if content.startswith(before[: before.rfind(b"\n") + 1]):
        kept, later = rows_after(content, step["step"])
        write_atomic(run / step["rest"], later)
        write_atomic(target, kept)


def _write(run: Path, step: Step) -> None:
    with writing(run / step["to"]):
        (run / step["to"]).parent.mkdir(parents=True, exist_ok=True)
    write_json(run / step["to"], step["json"])


def _remove(run: Path, step: Step) -> None:
    """Delete a file, of which a copy was kept."""
    with writing(run / step["to"]):
        (run / step["to"]).unlink(missing_ok=True)
        sync_directory((run / step["to"]).parent)


def _conclude(run: Path, step: Step) -> None:
    """Write what follows from the scores: haven's file and the status, which says what they come to."""
    if (run / SCORES).exists():
        Scores(run / SCORES).export_haven()
    write_json(run / STATUS, {**step["json"], SUMMARY: summarize(run / SCORES).to_json()})


_STEPS: Mapping[str, Callable[[Path, Step], None]] = {
    "move": _move,
    "link": _link,
    "keep": _copy_aside,
    "put": _restore,
    "cut": _cut_rows,
    "write": _write,
    "remove": _remove,
    "conclude": _conclude,
}
