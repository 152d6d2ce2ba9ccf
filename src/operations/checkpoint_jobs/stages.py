"""One stage of one checkpoint: its command, its result, and whether it may run.

A worker holds the lease of the stage's folder, <run>/checkpoint_jobs/<branch and step>/<stage>/, which has the log of
each attempt. The outcome of an attempt is a line of <run>/checkpoint_jobs.jsonl, scores are one of
<run>/evaluations.jsonl.
"""

import errno
import json
import math
import os
import shlex
import shutil
import signal
import tempfile
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from src.errors import RunError
from src.files import defect, new_directory, read_json, sha256, write_json, writing
from src.operations.checkpoint_jobs import uploads
from src.operations.checkpoint_jobs.plan import Plan, Stage, Trials
from src.runs import events, jsonl_records
from src.runs.checkpoints import folder as checkpoints
from src.runs.lease import directory_lock
from src.runs.metadata import read_status
from src.support.command_line import end_session, start_bound

FOLDER = "checkpoint_jobs"
JOBS = "checkpoint_jobs.jsonl"
EVALUATIONS = "evaluations.jsonl"
CONVERTED = "converted"
_UPLOAD = "upload.json"
POLL_SECONDS = 0.1
_END_SECONDS = 10.0
Check = Callable[[], object]


@dataclass(frozen=True)
class CommandResult:
    """How an attempt ended."""

    exit_code: int | None
    """Negative: the signal that ended it. None: it failed outside the command."""
    reason: str = ""


@dataclass(frozen=True)
class CheckpointStage:
    """A stage, or one evaluation, of one checkpoint."""

    run: Path
    checkpoint: Path
    branch: int
    """Number of the branch on which the step was trained; 0: no rewind before it."""
    stage: Stage
    task: str | None
    plan: Plan

    @property
    def step(self) -> int:
        return checkpoints.step_of(self.checkpoint)

    @property
    def key(self) -> str:
        """Identifies the checkpoint among those of all branches."""
        return f"branch-{self.branch}-step-{self.step:08d}"

    @property
    def name(self) -> str:
        """The stage, with the evaluation's name."""
        return self.stage if self.task is None else f"{self.stage}.{self.task}"

    @property
    def folder(self) -> Path:
        """Holds its lease and the logs of its attempts."""
        return self.run / FOLDER / self.key / self.name

    @property
    def converted_folder(self) -> Path:
        """The output of the stage convert."""
        return self.run / CONVERTED / self.key

    @property
    def trials(self) -> Trials:
        """How often it is retried."""
        if self.task is not None:
            assert self.plan.evaluate is not None
            return self.plan.evaluate.tasks[self.task]
        found = self.plan.stage(self.stage)
        assert isinstance(found, Trials)
        return found

    def is_named_by(self, row: dict[str, Any]) -> bool:
        """Whether a line of one of the files belongs to this stage."""
        return all(row.get(key) == value for key, value in self.identity().items())

    def identity(self) -> dict[str, Any]:
        """The fields that identify it in lines."""
        return {"branch": self.branch, "step": self.step, "stage": self.stage, "task": self.task}

    def fill(self, template: str, **more: object) -> str:
        """A shell command from a template."""
        values = {
            "run": self.run,
            "exp_id": self.run.name,
            "checkpoint": self.checkpoint,
            "converted": self.converted_folder,
        }
        values |= {"step": self.step, "branch": self.branch, **more}
        return template.format(**{name: shlex.quote(str(value)) for name, value in values.items()})


def describe_command(unit: CheckpointStage, work: Path) -> str:
    """The command of the stage, for /bin/sh or for people to read. work: folder for its output."""
    if unit.stage == "upload" and unit.plan.upload is not None and unit.plan.upload.to is not None:
        return f"copy {', '.join(unit.plan.upload.folders)} to {unit.plan.upload.to}"
    if unit.stage == "clean_up" and unit.plan.clean_up is not None:
        return f"delete {', '.join(unit.plan.clean_up.delete)}"
    where = {
        "output": work / "output",
        "scores": work / "scores.json",
        "task": unit.task,
        "file": "FILE",
        "name": "NAME",
    }
    return unit.fill(str(getattr(unit.trials, "command", "")), **where)


def read_scores(unit: CheckpointStage) -> dict[str, Any] | None:
    """The row of evaluations.jsonl of this evaluation; None if there is none.

    Raises:
        DataError, RunError: the file is damaged, or cannot be read.
    """
    key = {"run": unit.run.name, "branch": unit.branch, "step": unit.step, "task": unit.task}
    rows = jsonl_records.rows(unit.run / EVALUATIONS)
    return next((row for row in rows if all(row.get(name) == value for name, value in key.items())), None)


def is_result_present(unit: CheckpointStage) -> bool:
    """Whether the result of a stage is still there, if later ones need it."""
    if unit.stage == "convert":
        # An interrupted clean-up deletes it first, after it has verified the upload.
        return defect(unit.converted_folder, hashes=False) is None or any(
            (unit.folder.parent / "clean_up").glob("attempt-*")
        )
    return unit.task is None or read_scores(unit) is not None


def run_stage(unit: CheckpointStage, log: Path, check: Check) -> CommandResult:
    """Make one attempt, which may repeat an interrupted one. check: raises if the lease is lost.

    Raises:
        RunError: it failed, or must not run.
    """
    with writing(unit.folder):
        log.touch()  # records that it started
        if unit.stage == "upload":
            return _upload(unit, log, check)
        if unit.stage == "clean_up":
            return _clean_up(unit, log, check)
        for left in (*unit.folder.glob(".work-*"), unit.folder / "output"):
            shutil.rmtree(left, ignore_errors=True)
        work = Path(tempfile.mkdtemp(dir=unit.folder, prefix=".work-"))
        try:
            (work / "output").mkdir()
            result = run_bound(describe_command(unit, work), log, unit.trials.timeout_seconds, check)
            if result.exit_code == 0:
                check()
                _store_converted(unit, work / "output") if unit.stage == "convert" else _record_scores(
                    unit, work / "scores.json"
                )
            return result
        finally:
            shutil.rmtree(work, ignore_errors=True)


def run_bound(command: str, log: Path, timeout_seconds: float, check: Callable[[], object]) -> CommandResult:
    """Run a shell command to its end, or to ours, with its output in `log`.
    check: called all the while; what it raises ends the command.

    Raises:
        RunError: the disk refuses. The command was not started.
    """
    until = time.monotonic() + timeout_seconds
    with writing(log), open(log, "ab") as out:
        process = start_bound(["/bin/sh", "-c", command], signal.SIGKILL, out, out)
    try:
        while process.poll() is None:
            check()
            if time.monotonic() > until:
                end_session(process, _END_SECONDS)
                return CommandResult(process.returncode, f"ended after {timeout_seconds:g} s (timeout_seconds)")
            time.sleep(POLL_SECONDS)
    except BaseException:
        end_session(process, _END_SECONDS)
        raise
    if process.returncode < 0:  # something else killed the shell: the command must not go on beside the next attempt
        end_session(process, _END_SECONDS)
    return CommandResult(process.returncode)


def _store_converted(unit: CheckpointStage, output: Path) -> None:
    if not any(path.is_file() for path in output.rglob("*")):
        raise RunError(f"{output}: the command ended well, but wrote no file to {{output}}.")
    with new_directory(unit.converted_folder, {"made_from": sha256(unit.checkpoint / "manifest.json")}) as folder:
        shutil.copytree(output, folder, copy_function=_link, dirs_exist_ok=True)


def _link(source: str, target: str) -> None:
    """A hard link if possible, else a copy; for a symbolic link, a copy of its target."""
    try:
        if os.path.islink(source):
            shutil.copy2(source, target)
        else:
            os.link(source, target)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        shutil.copy2(source, target)


def _record_scores(unit: CheckpointStage, file: Path) -> None:
    found = read_json(file, RunError)
    if (
        not isinstance(found, dict)
        or not found
        or not all(isinstance(v, int | float) and not isinstance(v, bool) for v in found.values())
    ):
        raise RunError(f"{file}: expected a JSON object of numbers by name, got {json.dumps(found)[:100]}.")
    values = {name: value if math.isfinite(value) else None for name, value in found.items()}
    row = {
        "run": unit.run.name,
        "branch": unit.branch,
        "step": unit.step,
        "task": unit.task,
        "scores": values,
        "time": events.now(),
    }
    with jsonl_records.open_locked(unit.run / EVALUATIONS) as rows:
        if read_scores(unit) is None:
            rows.append(row)


def _destination(unit: CheckpointStage, log: Path) -> uploads.Destination:
    there = unit.plan.upload
    assert there is not None
    if there.to is not None:
        return uploads.Local(Path(there.to.removeprefix("file://")))
    send, read = str(there.command), str(there.readback)
    return uploads.Commands(
        lambda file, name: unit.fill(send, file=file, name=name),
        lambda name: unit.fill(read, name=name),
        there.timeout_seconds,
        log,
    )


def _folder(unit: CheckpointStage, which: str) -> Path:
    return unit.checkpoint if which == "checkpoint" else unit.converted_folder


def _upload(unit: CheckpointStage, log: Path, check: Check) -> CommandResult:
    assert unit.plan.upload is not None
    there = _destination(unit, log)
    sent: dict[str, uploads.FileDigest] = {}
    for which in unit.plan.upload.folders:
        sent |= uploads.upload(_folder(unit, which), f"{unit.run.name}/{unit.key}/{which}", there, check)
    check()
    write_json(unit.folder / _UPLOAD, {name: list(fact) for name, fact in sent.items()})
    return CommandResult(0, f"{len(sent)} files, {sum(fact[0] for fact in sent.values())} bytes read back")


def reason_to_keep(unit: CheckpointStage) -> str:
    """Why the checkpoint may not be deleted now; "" if it may.

    The last and the best checkpoint of a run stay, as other experiments may start from them.

    Raises:
        CheckpointError, RunError: best.json or status.json is damaged.
    """
    assert unit.plan.clean_up is not None
    whole = [path for path in checkpoints.list_all(unit.run) if not defect(path, hashes=False)]
    if unit.checkpoint in whole[-unit.plan.clean_up.keep_last :]:
        return f"one of the {unit.plan.clean_up.keep_last} newest"
    if checkpoints.best_step(unit.run) == unit.step:
        return "the best one"
    return "the last one" if read_status(unit.run).get("step") == unit.step else ""


def _clean_up(unit: CheckpointStage, log: Path, check: Check) -> CommandResult:
    assert unit.plan.clean_up is not None
    record = read_json(unit.folder.parent / "upload" / _UPLOAD, RunError)
    try:
        sent = {str(name): (int(size), str(digest)) for name, (size, digest) in record.items()}
    except (AttributeError, TypeError, ValueError):
        raise RunError(f"{unit.folder.parent / 'upload' / _UPLOAD}: damaged, so nothing is deleted.") from None
    there = _destination(unit, log)
    # The checkpoint last, so that an interrupted clean-up is found and repeated.
    doomed = sorted(unit.plan.clean_up.delete, reverse=True)
    for which in doomed:
        folder, prefix = _folder(unit, which), f"{unit.run.name}/{unit.key}/{which}/"
        if which == "converted" and not folder.exists():
            continue
        recorded = {name: fact for name, fact in sent.items() if name.startswith(prefix)}
        if recorded != {prefix + name: fact for name, fact in uploads.file_digests(folder).items()}:
            raise RunError(f"{folder}: is not what was uploaded, so nothing of it is deleted.")
        if problem := uploads.find_difference(recorded, there, check):
            raise RunError(f"{problem}. Nothing of {folder} is deleted.")
    check()
    for which in doomed:
        _delete(unit, _folder(unit, which), check)
    return CommandResult(0, f"deleted {', '.join(doomed)}")


def _delete(unit: CheckpointStage, folder: Path, check: Check) -> None:
    """Rename, so that it is gone at once, then delete. The run cannot start in between."""
    with directory_lock(unit.run, create=False), writing(folder):
        check()
        if reason := reason_to_keep(unit):
            raise RunError(f"{unit.checkpoint}: must stay, as it is {reason}. Nothing was deleted.")
        if not folder.exists():
            return
        hidden = folder.rename(folder.with_name(f".{folder.name}.{uuid.uuid4().hex[:8]}.old"))
    shutil.rmtree(hidden, ignore_errors=True)
