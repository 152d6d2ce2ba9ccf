"""The save directory of one experiment: locked, checked against its dict, and written atomically."""

import contextlib
import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, Self, get_args

from src.errors import ConfigError, RunError, UserError
from src.experiments.config import Config, fill_absences, flatten
from src.experiments.identity import check_values, exp_id
from src.experiments.registry import operational_values
from src.files import TEMPORARY, read_json, write_atomic, write_json, writing
from src.runs import ledger
from src.runs.environment import now
from src.runs.history import journal
from src.runs.lease import GUARD, LEASE, Lease, directory_lock
from src.runs.scores import SCORES, Scores
from src.runs.store import CONFIG, DELETED_FOLDER, DIFF, ENV, EXP_DICT, GROUPS, JOB, REMARKS, STATUS, SavedRun, State
from src.runs.summary import SUMMARY, summarize

_SHOWN_CHANGES = 10
"""Maximum number of changed settings in a message."""
_BEFORE_A_START = (LEASE, GUARD, EXP_DICT, GROUPS, JOB, REMARKS)

log = logging.getLogger(__name__)


@dataclass
class RunDir:
    """Opened for writing by one process (`open`), or for reading by any process (`attach`).
    A context manager that unlocks on exit."""

    path: Path
    exp_id: str
    exp: dict[str, Any]
    """Canonical dict of the experiment."""
    attempt: int
    lease: Lease | None
    """None if attached (read-only)."""
    saved_run: SavedRun
    """The run as it was when it was opened."""

    @classmethod
    def open(
        cls,
        runs: Path,
        exp: dict[str, Any],
        resolved: Mapping[str, Any],
        *,
        recipe: Config | None = None,
        reset: int = 0,
        facts: Mapping[str, Any] | None = None,
    ) -> "RunDir":
        """Lock <runs>/<id>, created if missing, and check that it belongs to `exp`.

        Sets the status to "running", except for a finished run, of which only the groups change.

        exp: canonical (`registry.canonical_dict`). resolved: with all defaults (`registry.resolved_dict`).
        recipe: the typed experiment. Fields that were added (`added_field`) after the run started can be missing in
        config.json.
        reset: 1 first moves an existing directory to <runs>/deleted/<id>, or <id>.1, <id>.2, … if that exists.
            The recorded groups and the submitted job remain.
        facts: for env.json; "groups" lists the groups of this start, and "diff", if any, goes to diff.patch.

        An unreadable exp_dict.json is rewritten, as the directory's name is the hash of its content.

        Raises:
            ConfigError: `exp` has a value that cannot be hashed faithfully.
            RunError: another process holds the lease; another dict has the same id; defaults have changed since the
                start; a file is damaged; or the disk refuses.
        """
        if reset not in (0, 1):
            raise ConfigError(f"-r: expected 0 (continue) or 1 (start over), got {reset}.")
        check_values(exp, "experiment")
        identity = exp_id(exp)
        path = runs / identity
        lease = Lease.acquire(path)
        try:
            _sweep(path)
            journal.finish(path)
            if reset and _is_used(path):
                backup = _free_backup_path(runs / DELETED_FOLDER, identity)
                lease.move_directory(backup)
                lease = Lease.acquire(path)
                _restore_notes(backup, path)
            saved_run = SavedRun(path)
            run = cls(path, identity, exp, saved_run.attempts, lease, saved_run)
            run._check_dict()
            run._check_config(dict(resolved), recipe)
            run._begin(dict(facts or {}))
        except BaseException:
            lease.release()
            raise
        return run

    @classmethod
    def attach(cls, path: Path) -> "RunDir":
        """Open a directory for reading, without the lock: every writing method raises RunError.

        Raises:
            RunError: `path` has no experiment, or its exp_dict.json is damaged.
        """
        saved_run = SavedRun(path)
        return cls(path, path.name, saved_run.exp, saved_run.attempts, None, saved_run)

    @property
    def logs(self) -> Path:
        """Folder of the log files; it need not exist yet."""
        return self.path / "logs"

    @cached_property
    def scores(self) -> Scores:
        """The scores of this run. One cached object, as it remembers the last step."""
        return Scores(self.path / SCORES, read_only=self.lease is None)

    def confirm(self) -> None:
        """Check that this process still holds the lock; call it before writing checkpoints and scores.

        Raises:
            RunError: attached for reading, or the lease was lost.
        """
        if self.lease is None:
            raise RunError(f"{self.path}: opened for reading only; the process that holds the lease writes.")
        self.lease.confirm()

    def set_status(self, state: State, **facts: Any) -> None:
        """Replace status.json: the state, this attempt's number, the time, and `facts` such as step and reason.

        Earlier facts of this attempt remain, except for a reason. Adds the last value of each score: see `summary`.

        Raises:
            RunError: attached for reading, the lease was lost, or the disk refuses.
        """
        self._replace_status(self.status(), state, facts)

    def _replace_status(self, before: Mapping[str, Any], state: State, facts: dict[str, Any]) -> None:
        assert state in get_args(State), state
        self.confirm()
        time = now()
        if before.get("attempt") == self.attempt:
            earlier = {key: value for key, value in before.items() if key not in ("reason", SUMMARY)}
        else:
            earlier = {"started": time} | {key: value for key, value in before.items() if key == "step"}
        with contextlib.suppress(UserError):  # readers of the scores report damage
            facts[SUMMARY] = summarize(self.path / SCORES, before.get(SUMMARY)).to_json()
        write_json(self.path / STATUS, {**earlier, **facts, "state": state, "attempt": self.attempt, "updated": time})

    def status(self) -> dict[str, Any]:
        """The content of status.json: at least "state", which is "new" before the first start.

        Raises:
            RunError: status.json is damaged.
        """
        return SavedRun(self.path).status

    def close(self) -> None:
        """Unlock. Can be called twice."""
        if self.lease is not None:
            self.lease.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _check_dict(self) -> None:
        file = self.path / EXP_DICT
        if file.exists():
            try:
                saved = read_json(file, RunError)
            except RunError as error:
                log.warning("%s Rewriting it: the id determines its content.", error)
            else:
                changes = differences(saved, self.exp)
                if changes:
                    raise RunError(
                        f"{file}: another experiment has the id {self.exp_id}: {_describe(changes)}. "
                        "Both have the same hash in haven; change a string in one of them."
                    )
                return
        write_json(file, self.exp)

    def _check_config(self, resolved: dict[str, Any], recipe: Config | None) -> None:
        file = self.path / CONFIG
        resolved = json.loads(json.dumps(resolved, allow_nan=False))
        if file.exists():
            try:
                saved = read_json(file, RunError)
            except RunError as error:
                raise RunError(
                    f"{error} Delete it if no default has changed since the run started, or start over with -r 1."
                ) from None
            paths = tuple(operational_values(resolved, recipe))
            changes = differences(fill_absences(saved, recipe), resolved)
            policy = [change for change in changes if f"{change[0]}.".startswith(tuple(f"{path}." for path in paths))]
            if len(policy) < len(changes):
                raise RunError(
                    f"{file}: this run was started with different defaults: "
                    f"{_describe([c for c in changes if c not in policy])}. "
                    "To resume it, restore the old defaults; to run both, write the value into the dict (a new id); "
                    "to start over, use -r 1."
                )
            if not policy or self.saved_run.status["state"] == "done":
                return
            ledger.append(self.path, ledger.event("policy", changes={path: [old, new] for path, old, new in policy}))
            log.info("%s: %s, from this start on", self.path, _describe(policy))
        write_json(file, resolved)

    def _begin(self, facts: dict[str, Any]) -> None:
        """Record the environment of this attempt, and the status "running"."""
        self.saved_run.join_groups(facts.get("groups", ()))
        if self.saved_run.status["state"] == "done":
            return
        self.attempt += 1
        diff = facts.pop("diff", None)
        history = self.path / "attempts" / f"{self.attempt:03d}"
        with writing(history):
            history.mkdir(parents=True, exist_ok=True)
        if diff:
            write_atomic(history / DIFF, diff.encode("utf-8", "surrogateescape"))
        for folder in (history, self.path):
            write_json(folder / ENV, {"attempt": self.attempt, **facts})
        self._replace_status(self.saved_run.status, "running", {})


def start_over(path: Path) -> None:
    """Move the content of the save directory `path` to <runs>/deleted, as `RunDir.open` with reset does,
    and forget its submitted job.

    For a job that will be submitted, and can start several times. The recorded groups remain.

    Raises:
        RunError: a process holds it, or the disk refuses.
    """
    with Lease.acquire(path) as lease:
        _sweep(path)
        if _is_used(path):
            backup = _free_backup_path(path.parent / DELETED_FOLDER, path.name)
            lease.move_directory(backup)
            SavedRun(path).join_groups(SavedRun(backup).groups)
        with writing(path):
            (path / JOB).unlink(missing_ok=True)


def differences(old: Any, new: Any) -> list[tuple[str, str, str]]:
    """(dotted path, old, new) for each value that differs in value or type; "absent" for a missing key."""
    before, after = (
        {key: json.dumps(value, sort_keys=True) for key, value in flatten(each).items()} for each in (old, new)
    )
    values = [(key, before.get(key, "absent"), after.get(key, "absent")) for key in before | after]
    return [change for change in values if change[1] != change[2]]


def _describe(changes: list[tuple[str, str, str]]) -> str:
    lines = [f"{key or 'value'} was {old:.60}, is now {new:.60}" for key, old, new in changes[:_SHOWN_CHANGES]]
    return "; ".join(lines + ([f"and {more} more"] if (more := len(changes) - _SHOWN_CHANGES) > 0 else []))


def _is_used(path: Path) -> bool:
    """Whether the directory has files other than those written before a start."""
    return any(entry.name not in _BEFORE_A_START for entry in path.iterdir())


def _free_backup_path(folder: Path, identity: str) -> Path:
    """The first unused name for a backup."""
    with writing(folder):
        os.makedirs(folder, exist_ok=True)
    number, target = 0, folder / identity
    while target.exists():
        number += 1
        target = folder / f"{identity}.{number}"
    return target


def _sweep(path: Path) -> None:
    """Delete temporary files of killed writers. All writers hold the lease, as this process does, or the guard."""
    with directory_lock(path), writing(path):
        for folder in (path, path / "checkpoints", *path.glob("attempts/*")):
            for entry in folder.glob(".*"):
                if TEMPORARY.fullmatch(entry.name) and entry.is_file():
                    entry.unlink()


def _restore_notes(backup: Path, path: Path) -> None:
    """Copy the groups and the submitted job from `backup`: they survive a reset."""
    SavedRun(path).join_groups(SavedRun(backup).groups)
    if (backup / JOB).exists() and not (path / JOB).exists():
        write_atomic(path / JOB, (backup / JOB).read_bytes())
