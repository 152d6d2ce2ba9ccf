"""Records of submissions, written before and after: an interruption leaves neither orphaned nor duplicate jobs."""

import contextlib
import fcntl
import logging
import os
import re
import shlex
import time
import uuid
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from src.errors import ConfigError, LaunchError, RunError
from src.files import defer_sync, read_json, reading, write_json, writing
from src.launch import resources
from src.launch.job import LauncherConfig, query_schedulers
from src.runs.store import SavedRun

FOLDER = "submissions"
INTENT = "submission.json"
JOBS = "jobs.json"
"""{"jobs": {exp_id: job id}, "complete": bool}: the job ids so far, and whether these are all."""
LOCK_SECONDS = 600.0
"""How long to wait for another submission to the same runs folder."""


log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Submission:
    """One batch of jobs."""

    folder: Path
    launcher: dict[str, Any]
    """Its resolved config, without `environment`."""
    snapshot: str
    experiments: tuple[str, ...]
    commands: Mapping[str, str]
    """The command line of each job, for display."""

    @property
    def name(self) -> str:
        """The id of the submission."""
        return self.folder.name

    def load_launcher(self) -> LauncherConfig:
        """Its launcher. Raises LaunchError if this version does not know it or its config."""
        try:
            launcher = resources.bind_at(self.launcher, str(self.folder / INTENT))
        except ConfigError as error:
            raise LaunchError(str(error)) from None
        return resources.with_submissions(launcher, self.folder.parent)


@dataclass(frozen=True)
class UnresolvedSubmission:
    """An interrupted submission; its launcher cannot list the jobs."""

    folder: Path
    experiments: tuple[str, ...]
    """Empty if unknown."""
    error: str

    @property
    def message(self) -> str:
        """A line for display."""
        return f"submission {self.folder.name} was interrupted, and its jobs are unknown: {self.error}"


@contextlib.contextmanager
def lock(runs: Path, wait_seconds: float = LOCK_SECONDS) -> Iterator[None]:
    """Lock `runs` against other submissions, from the decision until the jobs are recorded.

    Raises:
        LaunchError: another process holds the lock for longer than `wait_seconds`, or locks are not supported.
        RunError: the disk refuses.
    """
    folder = runs / FOLDER
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o666)
    until, is_reported = time.monotonic() + wait_seconds, False
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > until:
                    raise LaunchError(
                        f"{folder}: another submission has held the lock for {wait_seconds:g} s. Try again later."
                    ) from None
            except OSError as error:
                raise LaunchError(
                    f"{folder}: this file system does not support locks (flock: {error.strerror}). "
                    "Choose another folder."
                ) from None
            if not is_reported:
                log.info("%s: waiting for another submission to end", folder)
                is_reported = True
            time.sleep(0.05)
        yield
    finally:
        os.close(descriptor)


def create(
    runs: Path, launcher: Mapping[str, Any], job_config: str, snapshot: str, commands: Mapping[str, Sequence[str]]
) -> Submission:
    """Record a submission before it is made. commands: exp_id -> trainval.py and its arguments.

    Raises:
        RunError: the disk refuses; nothing must be submitted.
    """
    launcher = _without_variables(launcher)
    now = datetime.now(UTC)
    name = f"{now:%Y%m%d-%H%M%S}-{now.microsecond:05x}{uuid.uuid4().hex[:3]}"  # sorted by time
    folder = runs.resolve() / FOLDER / name
    command_lines = {exp_id: shlex.join(words) for exp_id, words in commands.items()}
    intent = {
        "launcher": launcher,
        "job_config": job_config,
        "snapshot": snapshot,
        "experiments": list(commands),
        "commands": command_lines,
    }
    with writing(folder):
        folder.mkdir(parents=True)
    write_json(folder / INTENT, {**intent, "created": now.isoformat(timespec="seconds")})
    return Submission(folder, dict(launcher), snapshot, tuple(commands), command_lines)


def _without_variables(launcher: Mapping[str, Any]) -> dict[str, Any]:
    """A launcher's config without the variables of its jobs and the setup of their scripts, which can hold secrets."""
    return {key: value for key, value in launcher.items() if key not in ("environment", "setup")}


def read(runs: Path, name: str) -> Submission:
    """The submission called `name`.

    Raises:
        LaunchError: no such submission, or its file is damaged.
    """
    folder = runs.resolve() / FOLDER / name
    if not re.fullmatch(r"[\w-]+", name):
        raise LaunchError(
            f"{runs / FOLDER}: {name!r} is not the name of a submission. Use the name of a folder in there."
        )
    result = read_json(folder / INTENT, LaunchError)
    try:
        experiments = tuple(map(str, result["experiments"]))
        return Submission(
            folder,
            _without_variables(result["launcher"]),
            str(result["snapshot"]),
            experiments,
            dict(result["commands"]),
        )
    except (AttributeError, KeyError, TypeError, ValueError):
        raise LaunchError(f"{folder / INTENT}: not a record of a submission. Look for its jobs by hand.") from None


def note(submission: Submission, jobs: Mapping[str, str], complete: bool = False) -> None:
    """Record job ids by experiment: first in one file, then in each save directory.

    Raises:
        RunError: the disk refuses.
    """
    before = _read_noted_jobs(submission.folder)[0] or {}
    write_json(submission.folder / JOBS, {"jobs": {**before, **jobs}, "complete": complete})
    _note_in_runs(submission, {exp_id: job_id for exp_id, job_id in jobs.items() if before.get(exp_id) != job_id})


def _note_in_runs(submission: Submission, jobs: Mapping[str, str]) -> None:
    runs = submission.folder.parent.parent
    with defer_sync(runs):
        for exp_id, job_id in jobs.items():
            SavedRun(runs / exp_id).write_job(job_id, submission.commands.get(exp_id, ""), submission.name)


def interrupted_names(runs: Path) -> list[str]:
    """Names of the submissions without a complete list of jobs.

    Raises:
        RunError: the folder cannot be read.
    """
    return [name for name in _submission_names(runs) if not _read_noted_jobs(runs / FOLDER / name)[1]]


def _submission_names(runs: Path) -> list[str]:
    """Names of all submissions, the oldest first."""
    try:
        with reading(runs / FOLDER), os.scandir(runs / FOLDER) as entries:
            return sorted(entry.name for entry in entries if re.fullmatch(r"\d{8}-\d{6}-[0-9a-f]{8}", entry.name))
    except FileNotFoundError:
        return []


def reconcile(runs: Path, seconds: float | None = None) -> list[UnresolvedSubmission]:
    """Query the launchers of interrupted submissions for their jobs, and record them.
    Returns the submissions that stay unresolved. Call it under `lock`.

    seconds: total time to wait for schedulers; None: as long as the launchers do.

    Raises:
        RunError: the disk refuses.
    """
    result: list[UnresolvedSubmission] = []
    until = None if seconds is None else time.monotonic() + seconds
    for name in interrupted_names(runs):
        folder = runs / FOLDER / name
        if not (folder / INTENT).exists():
            continue  # interrupted before it was recorded, so nothing was queued
        experiments: tuple[str, ...] = ()
        try:
            submission = read(runs, name)
            experiments = submission.experiments
            _reconcile_one(runs, submission, None if until is None else max(0.0, until - time.monotonic()))
        except LaunchError as error:
            result.append(UnresolvedSubmission(folder, experiments, str(error)))
    return result


def refuse(unclear: Sequence[UnresolvedSubmission], exp_ids: Collection[str]) -> None:
    """Raise LaunchError for unresolved submissions that can have queued one of `exp_ids`; log the rest as warnings."""
    messages = []
    for submission in unclear:
        if submission.experiments and not set(exp_ids).intersection(submission.experiments):
            log.warning("%s", submission.message)
        else:
            messages.append(
                f"{submission.message}\n{submission.folder}: nothing is submitted until its jobs are known. "
                "If they stay unknown, find its jobs by hand, end them, and move the folder away."
            )
    if messages:
        raise LaunchError("\n".join(messages))


def _reconcile_one(runs: Path, submission: Submission, seconds: float | None) -> None:
    launcher = submission.load_launcher()

    def find() -> Mapping[str, str]:
        with _in_doubt():
            return launcher.find(submission.folder, list(submission.experiments))

    (result,) = query_schedulers([find], seconds)
    if isinstance(result, LaunchError):
        raise result
    with _in_doubt():
        launcher.forbid(submission.folder, [exp_id for exp_id in submission.experiments if exp_id not in result])
    log.info("%s: was interrupted; found %d of its %d jobs", submission.name, len(result), len(submission.experiments))
    before, _ = _read_noted_jobs(submission.folder)
    if before is None:  # damaged; if an experiment was submitted again later, that job counts
        result = {
            exp_id: job_id for exp_id, job_id in result.items() if _submission_of(runs / exp_id) <= submission.name
        }
    _note_in_runs(submission, result)
    note(submission, result, complete=True)


@contextlib.contextmanager
def _in_doubt() -> Iterator[None]:
    """Turn a file error into a LaunchError, so that only this submission stays unresolved."""
    try:
        yield
    except RunError as error:
        raise LaunchError(str(error)) from None


def _submission_of(run: Path) -> str:
    with contextlib.suppress(RunError):
        return (SavedRun(run).job or {"submission": ""})["submission"]
    return ""


def last_jobs(runs: Path, exp_ids: Collection[str]) -> dict[str, tuple[str, str]]:
    """The last (job id, submission) of each of `exp_ids` that was ever submitted.

    Raises:
        RunError: the folder cannot be read.
    """
    result: dict[str, tuple[str, str]] = {}
    for name in _submission_names(runs):
        jobs = _read_noted_jobs(runs / FOLDER / name)[0] or {}
        result |= {exp_id: (jobs[exp_id], name) for exp_id in exp_ids if isinstance(jobs.get(exp_id), str)}
    return result


def _read_noted_jobs(folder: Path) -> tuple[dict[str, Any] | None, bool]:
    """The recorded job ids, and whether these are all. None: the file is damaged, so query the launcher again."""
    try:
        result = read_json(folder / JOBS, RunError, {"jobs": {}, "complete": False})
        return dict(result["jobs"]), result["complete"] is True
    except (RunError, KeyError, TypeError, ValueError):
        return None, False
