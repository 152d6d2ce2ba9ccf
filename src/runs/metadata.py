"""The small JSON files of a save directory: dict, status, groups and job; read without locking it."""

import contextlib
import errno
import json
import os
import re
import shutil
import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, get_args

from src.errors import ConfigError, RunError
from src.experiments.config import join
from src.experiments.identity import check_values, exp_id
from src.files import read_json, reading, write_json, writing
from src.runs.lease import directory_lock, holder_is_dead, lost_contact

EXP_DICT = "exp_dict.json"
CONFIG = "config.json"
ENV = "env.json"
DIFF = "diff.patch"
STATUS = "status.json"
GROUPS = "groups.json"
REMARKS = "remarks.json"
JOB = "job_dict.json"
CODE_VERSIONS = "code_versions"
"""The key of status.json that says how many versions of the code have trained a run, where it is more than one."""
State = Literal["running", "done", "failed", "stopped"]


def expand_run(path: Path, runs: Path = Path("results/runs")) -> Path:
    """`path`, or the save directory with its name as prefix of the id. A bare name is looked up in `runs`.

    Raises:
        RunError: several ids start with it.
    """
    if path.exists() or not path.name.isalnum():
        return path
    folder = runs if path.parent == Path() else path.parent
    matches = [each for each in sorted(folder.glob(f"{path.name}*")) if (each / EXP_DICT).is_file()]
    if len(matches) > 1:
        raise RunError(
            f"{path}: {len(matches)} ids start with this: {', '.join(each.name for each in matches)}. Use more digits."
        )
    return matches[0] if matches else path


def read_exp_dict(path: Path) -> dict[str, Any]:
    """The dict of the experiment in the save directory `path`.

    Raises:
        RunError: missing, damaged, or the id of the dict is not the directory's name.
    """
    exp = read_foreign_dict(path)
    if exp_id(exp) != path.name:
        raise RunError(
            f"{path / EXP_DICT}: its id is {exp_id(exp)}, not the name of its directory. "
            "It was changed by hand, or moved."
        )
    return exp


def read_foreign_dict(path: Path) -> dict[str, Any]:
    """The dict in the directory `path`, whatever hash of it is the directory's name.

    Raises:
        RunError: missing, damaged, or with values that no dict of ours has.
    """
    exp = read_json(path / EXP_DICT, RunError)
    if not isinstance(exp, dict):
        raise RunError(f"{path / EXP_DICT}: expected a dict, got {type(exp).__name__}.")
    try:
        check_values(exp, str(path / EXP_DICT))
    except ConfigError as error:
        raise RunError(str(error)) from None
    return exp


def is_foreign(path: Path) -> bool:
    """Whether another program made the directory `path`, and named it by another hash of its dict:
    there is nothing of ours in it."""
    if any((path / name).exists() for name in (CONFIG, ENV, STATUS, GROUPS, "scores.jsonl")):
        return False
    try:
        return exp_id(read_foreign_dict(path)) != path.name
    except RunError:
        return False


def read_status(path: Path) -> dict[str, Any]:
    """status.json of the save directory `path`, or {"state": "new"} without one.

    Raises:
        RunError: it is damaged, or cannot be read.
    """
    hint, new = "Delete it: the run then resumes from its newest checkpoint.", {"state": "new"}
    try:
        status = read_json(path / STATUS, RunError, new)
    except RunError as error:
        raise RunError(f"{error} {hint}") from None
    if status is new:
        return new
    if not isinstance(status, dict) or status.get("state") not in get_args(State):
        raise RunError(f"{path / STATUS}: expected a dict with one of the states {', '.join(get_args(State))}. {hint}")
    return status


def state_of(path: Path, status: Mapping[str, Any] | None = None) -> str:
    """State of the save directory `path`: new, running, done, failed, stopped; or lost:
    running with a dead holder, or without contact.

    A holder on another machine counts as alive until `lost_contact`. status: `read_status(path)`, if it was just read.

    Raises:
        RunError: status.json is damaged.
    """
    state = (read_status(path) if status is None else status)["state"]
    return "lost" if state == "running" and (holder_is_dead(path) or lost_contact(path)) else state


def attempts(path: Path) -> int:
    """How often the experiment in `path` was started.

    Raises:
        RunError: the directory cannot be read.
    """
    with reading(path):
        names = [entry.name for entry in (path / "attempts").glob("*") if re.fullmatch(r"\d{3,}", entry.name)]
    return max(map(int, names), default=0)


def join_groups(path: Path, groups: Iterable[str]) -> None:
    """Record that `groups` contain the experiment in `path`. It is trained once for all groups. Needs no lease.

    Raises:
        RunError: the disk refuses.
    """
    if not (requested := dict.fromkeys(groups)):
        return
    with directory_lock(path):
        noted = read_groups(path)
        if joined := [group for group in requested if group not in noted]:
            write_json(path / GROUPS, [*noted, *joined])


def read_groups(path: Path) -> list[str]:
    """The recorded groups of the experiment in `path`, in the order of recording; empty if not known."""
    try:
        matches = read_json(path / GROUPS, RunError)
    except RunError:
        return []
    return [name for name in matches if isinstance(name, str)] if isinstance(matches, list) else []


def read_remarks(path: Path) -> tuple[list[str], str]:
    """Tags and note that a person gave the experiment in `path`; neither belongs to its dict or id.

    Raises:
        RunError: remarks.json is damaged, or cannot be read.
    """
    hint = "Repair it or delete it; nothing else reads it."
    try:
        matches = read_json(path / REMARKS, RunError, {"tags": [], "note": ""})
    except RunError as error:
        raise RunError(f"{error} {hint}") from None
    tags, note = (matches.get("tags"), matches.get("note")) if isinstance(matches, dict) else (None, None)
    if not isinstance(tags, list) or not all(isinstance(tag, str) for tag in tags) or not isinstance(note, str):
        raise RunError(f'{path / REMARKS}: expected a dict with a list "tags" and a text "note". {hint}')
    return tags, note


def write_remarks(path: Path, add: Iterable[str] = (), remove: Iterable[str] = (), note: str | None = None) -> None:
    """Add and remove tags of the experiment in `path`, and replace its note unless that is None. Needs no lease.

    Raises:
        RunError: its remarks are damaged, or the disk refuses.
    """
    if is_foreign(path):
        raise RunError(f"{path}: another program made this directory; it is only read, so it takes no remarks.")
    with directory_lock(path):
        tags, old = read_remarks(path)
        gone = set(remove)
        tags = [tag for tag in dict.fromkeys([*tags, *add]) if tag not in gone]
        write_json(path / REMARKS, {"tags": tags, "note": old if note is None else note})


def prepare(path: Path, exp: Mapping[str, Any], groups: Iterable[str]) -> None:
    """Write the dict and the groups of an experiment before its job starts, as haven does. Needs no lease.

    A new directory appears atomically and without lock files: a thousand of them are written at once.

    Raises:
        RunError: the disk refuses.
    """
    if not path.exists():
        beside = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
        with writing(path):
            beside.mkdir(parents=True)
            write_json(beside / EXP_DICT, exp)
            if named := list(dict.fromkeys(groups)):
                write_json(beside / GROUPS, named)
            try:
                os.rename(beside, path)
                return
            except OSError as error:
                shutil.rmtree(beside, ignore_errors=True)
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):  # another process was faster
                    raise
    if not (path / EXP_DICT).exists():
        with directory_lock(path):
            write_json(path / EXP_DICT, exp)
    join_groups(path, groups)


def undo_prepare(path: Path) -> None:
    """Remove the save directory `path` if `prepare` made it and nothing was written there since: no job, no lease.

    Raises:
        RunError: the disk refuses.
    """
    with writing(path), contextlib.suppress(FileNotFoundError):
        if set(os.listdir(path)) <= {EXP_DICT, GROUPS}:
            for name in (GROUPS, EXP_DICT):
                (path / name).unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # a start has just written to it
                path.rmdir()


def write_job(path: Path, job_id: str, command: str, submission: str = "") -> None:
    """Record the job that was submitted for the experiment in `path`, as haven's job manager does. Needs no lease.

    submission: name of the folder below <runs>/submissions that says which launcher has the job.

    Raises:
        RunError: the disk refuses.
    """
    job = {"job_id": job_id, "command": command, "submission": submission}
    if path.is_dir():
        with contextlib.suppress(RunError):  # moved away just now, or refused: the next line raises
            write_json(path / JOB, job)
            return
    with directory_lock(path):
        write_json(path / JOB, job)


def read_job(path: Path) -> dict[str, str] | None:
    """The last job submitted for the experiment in `path`:
    "job_id", "command" and "submission" ("" if haven wrote it); None if none.

    Raises:
        RunError: job_dict.json is damaged, or cannot be read.
    """
    hint = "Delete it once you know that its job has ended."
    try:
        job = read_json(path / JOB, RunError, None)
    except RunError as error:
        raise RunError(f"{error} {hint}") from None
    if job is None and not (path / JOB).exists():
        return None
    if not isinstance(job, dict) or not isinstance(job.get("job_id"), str):
        raise RunError(f'{path / JOB}: expected a dict with "job_id" and "command". {hint}')
    return {key: job[key] if isinstance(job.get(key), str) else "" for key in ("job_id", "command", "submission")}


def differences(old: Any, new: Any) -> list[tuple[str, str, str]]:
    """(dotted path, old, new) for each value that differs in value or type; "absent" for a missing key."""
    before, after = flatten(old), flatten(new)
    keys = [*before, *(key for key in after if key not in before)]
    shown = [(key, _json(before, key), _json(after, key)) for key in keys]
    return [change for change in shown if change[1] != change[2]]


def flatten(value: Any, path: str = "") -> dict[str, Any]:
    """{"model": {"depth": 2}} -> {"model.depth": 2}. Lists and empty dicts are values."""
    if not isinstance(value, dict) or (not value and path):
        return {path: value}
    return {key: leaf for name, item in value.items() for key, leaf in flatten(item, join(path, name)).items()}


def _json(values: Mapping[str, Any], key: str) -> str:
    return json.dumps(values[key], sort_keys=True) if key in values else "absent"
