"""Save directories: `SavedRun` is one, with cached reads of its small files; `RunStore` is a folder of them."""

import contextlib
import errno
import os
import re
import shutil
import uuid
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, get_args

from src.errors import ConfigError, RunError
from src.experiments.identity import check_values, exp_id
from src.files import read_bytes, read_json, reading, write_json, writing
from src.runs import lease
from src.runs.lease import directory_lock
from src.runs.scores import SCORES, last_row

EXP_DICT = "exp_dict.json"
CONFIG = "config.json"
ENV = "env.json"
DIFF = "diff.patch"
PERF = "perf.jsonl"
"""Speed and durations of the training, written by `training.monitoring.reporter`."""
VALIDATION = "validation.json"
"""Sums of the last validation by sample, written by `evaluation.validation_record`."""
STATUS = "status.json"
GROUPS = "groups.json"
REMARKS = "remarks.json"
JOB = "job_dict.json"
CODE_VERSIONS = "code_versions"
"""Key of status.json: how many versions of the code have trained the run, if more than one."""
LOGS, DELETED_FOLDER = "logs", "deleted"
"""Folders next to the save directories: output of jobs, and backups of runs that were started over."""
_MOST_NAMED = 3
"""Number of runs that an error names."""
State = Literal["running", "done", "failed", "stopped"]


@dataclass
class SavedRun:
    """The save directory `path`. Each of its small files is read once, when first needed. Needs no lease.

    To read again, make a new object. Each property raises RunError if its file is damaged or cannot be read.
    """

    path: Path
    checkpoint_problems: dict[str | int, str | None] = field(default_factory=dict)
    """Problem with its "last" and "best" checkpoint, if checked; None: no problem."""

    @property
    def name(self) -> str:
        """Name of the directory: the id of its experiment."""
        return self.path.name

    @property
    def logs(self) -> list[Path]:
        """The output files of its jobs, stderr first, and the log of its training."""
        output_files = [self.path.parent / LOGS / f"{self.name}.{end}.log" for end in ("err", "out")]
        return [*output_files, self.path / "logs" / "train.log"]

    @cached_property
    def exp(self) -> dict[str, Any]:
        """The dict of the experiment. RunError also if its id is not the directory's name."""
        if (identity := exp_id(self.foreign_exp)) != self.name:
            raise RunError(
                f"{self.path / EXP_DICT}: its id is {identity}, not the name of its directory. "
                "Undo the edit, or give the directory its old name."
            )
        return self.foreign_exp

    @cached_property
    def foreign_exp(self) -> dict[str, Any]:
        """The dict, even if the directory's name is another hash of it. RunError also for values we never write."""
        file = self.path / EXP_DICT
        exp = read_json(file, RunError)
        if not isinstance(exp, dict):
            raise RunError(f"{file}: expected a dict, got {type(exp).__name__}.")
        try:
            check_values(exp, str(file))
        except ConfigError as error:
            raise RunError(str(error)) from None
        return exp

    @cached_property
    def is_foreign(self) -> bool:
        """Whether another program made the directory: its name is another hash, and none of our files exist."""
        if any((self.path / name).exists() for name in (CONFIG, ENV, STATUS, GROUPS, SCORES)):
            return False
        try:
            return exp_id(self.foreign_exp) != self.name
        except RunError:
            return False

    @cached_property
    def status(self) -> dict[str, Any]:
        """status.json, or {"state": "new"} without one."""
        new = {"state": "new"}
        hint = "Delete it: the run then resumes from its newest checkpoint."
        self._status_mark = _mark(self.path / STATUS)
        status = self._read(STATUS, new, hint)
        if status is not new and (not isinstance(status, dict) or status.get("state") not in get_args(State)):
            raise RunError(
                f"{self.path / STATUS}: expected a dict with one of the states {', '.join(get_args(State))}. {hint}"
            )
        return status

    @cached_property
    def state(self) -> str:
        """new, running, done, failed, stopped; or lost: running with a dead holder, or without contact.

        A holder on another machine counts as alive until `Holder.lost_contact`.
        """
        state = self.status["state"]
        if state != "running" or not (self.holder.is_dead or self.holder.lost_contact):
            return state
        if _mark(self.path / STATUS) == self._status_mark:
            return "lost"
        now = SavedRun(self.path)  # it has ended or restarted since
        self.status = now.status
        return now.state

    @property
    def state_or_damage(self) -> str:
        """The state; "damaged" if status.json is damaged."""
        try:
            return self.state
        except RunError:
            return "damaged"

    @cached_property
    def holder(self) -> lease.Holder:
        """The holder of the lease. Read this after `status`: a run takes its lease before it writes its status."""
        return lease.holder_of(self.path)

    @cached_property
    def groups(self) -> list[str]:
        """The recorded groups, in the order of recording; empty if unknown."""
        try:
            names = read_json(self.path / GROUPS, RunError, [])
        except RunError:
            return []
        return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []

    @cached_property
    def remarks(self) -> tuple[list[str], str]:
        """(tags, note) by a person. They are not part of the experiment's dict or id."""
        hint = "Repair it or delete it; nothing else reads it."
        content = self._read(REMARKS, {"tags": [], "note": ""}, hint)
        tags, note = (content.get("tags"), content.get("note")) if isinstance(content, dict) else (None, None)
        if not isinstance(tags, list) or not all(isinstance(tag, str) for tag in tags) or not isinstance(note, str):
            raise RunError(f'{self.path / REMARKS}: expected a dict with a list "tags" and a text "note". {hint}')
        return tags, note

    @cached_property
    def job(self) -> dict[str, str] | None:
        """The last submitted job: "job_id", "command" and "submission" ("" if haven wrote it). None without a job."""
        hint, absent = "Delete it once you know that its job has ended.", object()
        job = self._read(JOB, absent, hint)
        if job is absent:
            return None
        if not isinstance(job, dict) or not isinstance(job.get("job_id"), str):
            raise RunError(f'{self.path / JOB}: expected a dict with "job_id" and "command". {hint}')
        return {key: job[key] if isinstance(job.get(key), str) else "" for key in ("job_id", "command", "submission")}

    @cached_property
    def env(self) -> dict[str, Any]:
        """env.json of the last start: code, machine, versions; empty without one."""
        env = read_json(self.path / ENV, RunError, {})
        return env if isinstance(env, dict) else {}

    @cached_property
    def attempts(self) -> int:
        """Number of starts."""
        with reading(self.path):
            names = [entry.name for entry in (self.path / "attempts").glob("*") if re.fullmatch(r"\d{3,}", entry.name)]
        return max(map(int, names), default=0)

    @cached_property
    def patch(self) -> bytes:
        """The uncommitted changes of the code at the last start; empty if there were none, or they are unknown."""
        try:
            return read_bytes(self.path / "attempts" / f"{self.attempts:03d}" / DIFF)
        except FileNotFoundError:
            return b""

    @cached_property
    def last_row(self) -> dict[str, Any]:
        """The last complete row of its scores; empty before the first. DataError if the line is not a row."""
        return last_row(self.path / SCORES) or {}

    def _read(self, name: str, missing: object, hint: str) -> Any:
        try:
            return read_json(self.path / name, RunError, missing)
        except RunError as error:
            raise RunError(f"{error} {hint}") from None

    def join_groups(self, groups: Iterable[str]) -> None:
        """Record that `groups` contain the experiment, which is trained once for all groups.

        Raises:
            RunError: the disk refuses.
        """
        if set(requested := list(dict.fromkeys(groups))) <= set(self.groups):  # groups are never removed
            return
        with directory_lock(self.path):
            groups_on_disk = SavedRun(self.path).groups
            self.groups = [*groups_on_disk, *(group for group in requested if group not in groups_on_disk)]
            write_json(self.path / GROUPS, self.groups)

    def write_remarks(self, add: Iterable[str] = (), remove: Iterable[str] = (), note: str | None = None) -> None:
        """Add and remove tags, and replace the note unless `note` is None.

        Raises:
            RunError: the remarks are damaged, or the disk refuses.
        """
        if self.is_foreign:
            raise RunError(
                f"{self.path}: another program made this directory, so it cannot have remarks. "
                "Name a run of trainval.py."
            )
        with directory_lock(self.path):
            tags, old = SavedRun(self.path).remarks
            removed_tags = set(remove)
            self.remarks = (
                [tag for tag in dict.fromkeys([*tags, *add]) if tag not in removed_tags],
                old if note is None else note,
            )
            write_json(self.path / REMARKS, dict(zip(("tags", "note"), self.remarks, strict=True)))

    def write_exp(self, exp: Mapping[str, Any], groups: Iterable[str]) -> None:
        """Write the dict and the groups before a job starts, as haven does.

        A new directory is created atomically and without lock files, so that thousands can be written at once.

        Raises:
            RunError: the disk refuses.
        """
        path = self.path
        if not path.exists():
            temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
            with writing(path):
                temporary.mkdir(parents=True)
                write_json(temporary / EXP_DICT, exp)
                if group_names := list(dict.fromkeys(groups)):
                    write_json(temporary / GROUPS, group_names)
                try:
                    os.rename(temporary, path)
                    return
                except OSError as error:
                    shutil.rmtree(temporary, ignore_errors=True)
                    if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):  # another process was faster
                        raise
        if not (path / EXP_DICT).exists():
            with directory_lock(path):
                write_json(path / EXP_DICT, exp)
        self.join_groups(groups)

    def remove_unused(self) -> None:
        """Remove the directory if `write_exp` made it and nothing was written there since: no job, no lease.

        Raises:
            RunError: the disk refuses.
        """
        with writing(self.path), contextlib.suppress(FileNotFoundError):
            if set(os.listdir(self.path)) <= {EXP_DICT, GROUPS}:
                for name in (GROUPS, EXP_DICT):
                    (self.path / name).unlink(missing_ok=True)
                with contextlib.suppress(OSError):  # a start just wrote to it
                    self.path.rmdir()

    def write_job(self, job_id: str, command: str, submission: str = "") -> None:
        """Record the job that was submitted, as haven's job manager does.

        submission: name of the folder in <runs>/submissions that records the launcher of the job.

        Raises:
            RunError: the disk refuses.
        """
        self.job = {"job_id": job_id, "command": command, "submission": submission}
        if self.path.is_dir():
            with contextlib.suppress(RunError):  # moved away just now, or the disk refuses: the code below raises
                write_json(self.path / JOB, self.job)
                return
        with directory_lock(self.path):
            write_json(self.path / JOB, self.job)


class RunStore(dict[str, SavedRun]):
    """A folder of save directories: caches the `SavedRun` of each requested id."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def __missing__(self, name: str) -> SavedRun:
        run = self[name] = SavedRun(self.folder / name)
        return run

    def ids(self, prefix: str) -> list[str]:
        """The ids that start with `prefix`, sorted."""
        if not prefix.isalnum():
            return []
        return sorted(path.name for path in self.folder.glob(f"{prefix}*") if (path / EXP_DICT).is_file())

    def newest(self, count: int) -> list[str]:
        """The ids of the last `count` runs by the time that their dict was written, newest first."""
        marks = {file.parent.name: _mark(file) for file in self.folder.glob(f"*/{EXP_DICT}")}
        times = {name: (mark[1], name) for name, mark in marks.items() if mark}
        return sorted(times, key=lambda name: times[name], reverse=True)[:count]


def list_command(folder: Path, option: str = "--json") -> str:
    """The command that lists the runs of a folder, with all scores and keys."""
    return f"`python -m results.table -r {folder} {option}`"


def expand_run(path: Path, runs: Path = Path("results/runs")) -> Path:
    """`path`, or the save directory with an id that starts with its name. A bare name is looked up in `runs`. The path
    of a checkpoint need not exist.

    Raises:
        ConfigError: no id starts with it, or several do: see `unknown_run`.
    """
    if path.exists() or path.parent.name == "checkpoints":
        return path
    folder = runs if path.parent == Path() else path.parent
    matches = RunStore(folder).ids(path.name)
    if len(matches) != 1:
        raise unknown_run(str(path), path.name, folder, matches, "no such folder")
    return folder / matches[0]


def unknown_run(
    where: str, prefix: str, folder: Path, matches: Collection[str] = (), also: str = "expected a run"
) -> ConfigError:
    """The error of all commands for a run that is not in `folder`, or not unique. It names at most three runs.

    where: the argument. prefix: the start of the id. matches: the ids that start with it. also: why `prefix` is
    nothing else.
    """
    if matches:
        names = ", ".join(sorted(matches)[:_MOST_NAMED]) + ", ..." * (len(matches) > _MOST_NAMED)
        return ConfigError(f"{where}: {len(matches)} ids start with it: {names}. Use more digits.")
    if newest := RunStore(folder).newest(_MOST_NAMED):
        advice = (
            f"Name a save directory or the start of an id. Newest runs there: {', '.join(newest)}; "
            f"{list_command(folder)} lists all."
        )
    else:
        state = "It has no runs" if folder.is_dir() else "That folder does not exist"
        advice = f"{state}: name the --savedir_base of the training, then the start of an id."
    return ConfigError(f"{where}: {also}, and no run in {folder} has an id that starts with {prefix!r:.60}. {advice}")


def _mark(path: Path) -> tuple[int, int] | None:
    """Identifies the version of a file that is replaced atomically; None without the file."""
    with contextlib.suppress(OSError):
        facts = os.stat(path)
        return facts.st_ino, facts.st_mtime_ns
    return None
