"""Crash-safe multi-file transactions on a save directory: write a journal, apply its steps, delete it.

The steps are idempotent. A process that finds a journal repeats all of its steps, so the next process that opens the
run finishes an interrupted change. Nothing is deleted before it is stored elsewhere. Paths are relative to the run.
"""

import contextlib
import errno
import fcntl
import hashlib
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from src.errors import RunError
from src.files import TEMPORARY, read_bytes, read_json, sync_directory, write_atomic, write_json, writing
from src.runs import ledger
from src.runs.scores import SCORES, Scores
from src.runs.store import STATUS
from src.runs.summary import SUMMARY, summarize
from src.support.parsing import parse_json

FILE = "intervention.json"
Step = dict[str, Any]
"""{"do": one of `_STEPS`, "to": path, …}"""
_NO_LINKS = {errno.EPERM, errno.EXDEV, errno.EMLINK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}
_IN_PATH = re.compile(r"(?:^|/)(?:opt_step|step|checkpoint)-0*(\d+)(?:/|$)")

log = logging.getLogger(__name__)


def begin(run: Path, steps: Sequence[Step], event: Mapping[str, Any]) -> None:
    """Apply `steps` to the save directory `run`, and add `event`, which has an "id", to the ledger.
    The caller must hold the lease.

    Raises:
        RunError: the disk refuses. The next `finish` completes the transaction.
    """
    assert event.get("id"), "without an id, an interrupted event would be recorded twice"
    write_json(run / FILE, {"steps": list(steps), "event": dict(event)})
    finish(run)


def finish(run: Path) -> dict[str, Any] | None:
    """Complete an interrupted transaction of `run`; return its event, if any. The caller must hold the lease.

    Writers call it before they read any file of the run.

    Raises:
        RunError: the disk refuses, or the journal is damaged.
    """
    path = run / FILE
    if not path.exists():
        return None
    plan = read_json(path, RunError)
    try:
        steps, event = [(_STEPS[step["do"]], step) for step in plan["steps"]], dict(plan["event"])
    except (KeyError, TypeError, ValueError):
        raise RunError(
            f"{path}: not a list of steps that this version knows. Finish it with the version that started it: "
            f"{describe_event(plan)}"
        ) from None
    with _lock_rows(run, plan["steps"]):
        for do, step in steps:
            do(run, step)
    _sweep(run)
    ledger.append(run, event)
    with writing(path):
        path.unlink()
        sync_directory(run)
    return event


def describe_unfinished(run: Path) -> str | None:
    """Description of the unfinished transaction of `run`, or None."""
    return describe_event(read_json(run / FILE, RunError)) if (run / FILE).exists() else None


def describe_event(journal: Any) -> str:
    """Description of the event of a journal."""
    event = journal.get("event") if isinstance(journal, dict) else None
    return (
        f"{event.get('event')} by {event.get('who')} at {event.get('when')}" if isinstance(event, dict) else "unknown"
    )


def rows_after(content: bytes, step: int) -> tuple[bytes, bytes]:
    """Split the lines of a file: those up to `step` or without a step, and later ones. Both parts end with a newline.

    A last line without newline was truncated by a crash; it is in the second part.
    """
    earlier, later = [], []
    *lines, partial = content.split(b"\n")
    for line in lines:
        at = step_of(line)
        (later if at is not None and at > step else earlier).append(line + b"\n")
    return b"".join(earlier), b"".join(later) + (partial + b"\n" if partial else b"")


def step_of(line: bytes) -> int | None:
    """The step of a JSON line: its "step", "opt_step" or "iteration", or that of the checkpoint it evaluates."""
    try:
        row = parse_json(line, "", RunError)
    except RunError:
        return None
    if not isinstance(row, dict):
        return None
    for name in ("step", "opt_step", "iteration"):
        if type(row.get(name)) is int:
            return row[name]
    for name in ("model_name_or_path", "checkpoint"):
        if isinstance(row.get(name), str) and (steps := _IN_PATH.findall(row[name])):
            return int(steps[-1])
    return None


def manifest_hash(checkpoint: Path) -> str | None:
    """sha256 of the manifest, which contains the hash of every file; None without a manifest."""
    with contextlib.suppress(FileNotFoundError):
        return hashlib.sha256(read_bytes(checkpoint / "manifest.json")).hexdigest()
    return None


@contextlib.contextmanager
def _lock_rows(run: Path, steps: Sequence[Step]) -> Iterator[None]:
    """Lock the row files that the steps change: evaluations of checkpoints append to them without the lease."""
    names = {step["to"] for step in steps if step["do"] in ("cut", "put") and step["to"].endswith(".jsonl")}
    with contextlib.ExitStack() as stack:
        for path in (run / name for name in sorted(names) if (run / name).exists()):
            with writing(path):
                file = stack.enter_context(open(path, "rb"))
                fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _sweep(run: Path) -> None:
    """Delete temporary files of killed processes in subfolders of the run; the next start cleans the run itself."""
    with writing(run):
        for path in run.glob("*/**/.*"):
            if TEMPORARY.fullmatch(path.name) and path.is_file():
                path.unlink()


def _move(run: Path, step: Step) -> None:
    """Rename a folder. If "to" exists, an earlier attempt already moved it."""
    source, target = run / step["from"], run / step["to"]
    if target.exists() or _is_gone(source):
        return
    with writing(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        os.rename(source, target)
        sync_directory(target.parent)
        sync_directory(source.parent)


def _link(run: Path, step: Step) -> None:
    """Copy a folder with hard links to its files, or with copies if links are not supported."""
    source, target = run / step["from"], run / step["to"]
    if target.exists() or _is_gone(source):
        return
    temporary = target.with_name(f".{target.name}.linking")
    with writing(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(temporary, ignore_errors=True)
        shutil.copytree(source, temporary, copy_function=_link_or_copy)
        for folder in (temporary, *(path for path in temporary.rglob("*") if path.is_dir())):
            sync_directory(folder)
        os.rename(temporary, target)
        sync_directory(target.parent)


def _is_gone(source: Path) -> bool:
    """Whether the folder was deleted since the plan, for example by retention. The other steps are still applied."""
    if not source.is_dir():
        log.warning("%s: deleted meanwhile, so it is skipped.", source)
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
    """Copy a file, unless the copy exists."""
    source, target = run / step["from"], run / step["to"]
    if not target.exists():
        with writing(target):
            target.parent.mkdir(parents=True, exist_ok=True)
            content = read_bytes(source)
        write_atomic(target, content)


def _restore(run: Path, step: Step) -> None:
    """Replace a file by a copy of another."""
    with writing(run / step["to"]):
        content = read_bytes(run / step["from"])
    write_atomic(run / step["to"], content)


def _cut_rows(run: Path, step: Step) -> None:
    """Move the lines after "step" from "to" to "rest". If "to" does not start with its copy "from", this is done."""
    target = run / step["to"]
    with writing(target):
        before, content = read_bytes(run / step["from"]), read_bytes(target)
    if content.startswith(before[: before.rfind(b"\n") + 1]):
        earlier, later = rows_after(content, step["step"])
        write_atomic(run / step["rest"], later)
        write_atomic(target, earlier)


def _write(run: Path, step: Step) -> None:
    with writing(run / step["to"]):
        (run / step["to"]).parent.mkdir(parents=True, exist_ok=True)
    write_json(run / step["to"], step["json"])


def _remove(run: Path, step: Step) -> None:
    """Delete a file that is already copied to the archive."""
    with writing(run / step["to"]):
        (run / step["to"]).unlink(missing_ok=True)
        sync_directory((run / step["to"]).parent)


def _conclude(run: Path, step: Step) -> None:
    """Write the files that depend on the scores: haven's, and the status with the summary."""
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
