"""One stage of one checkpoint: its command and its result.

The outcome of the last attempt is in <run>/checkpoint_jobs.json, the output of its command in
<run>/checkpoint_jobs/<branch and step>/<stage>.log. Scores are lines of <run>/evaluations.jsonl.
"""

import contextlib
import hashlib
import json
import math
import shlex
import shutil
import signal
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from src.errors import RunError
from src.files import MANIFEST, defect, new_directory, read_json, read_manifest, sha256, write_json, writing
from src.operations.checkpoint_jobs.plan import Plan, Stage, Trials, open_destination
from src.runs import jsonl_records
from src.runs.checkpoints import checkpoints
from src.runs.history import events
from src.runs.lease import directory_lock
from src.runs.store import SavedRun
from src.support.command_line import end_session, start_bound

FOLDER = "checkpoint_jobs"
OUTCOMES = "checkpoint_jobs.json"
EVALUATIONS = "evaluations.jsonl"
CONVERTED = "converted"
POLL_SECONDS = 0.1
_END_SECONDS = 10.0
_PIECE = 1 << 20
Check = Callable[[], object]


@dataclass(frozen=True)
class CheckpointStage:
    """A stage, or one evaluation, of one checkpoint."""

    run: Path
    checkpoint: Path
    branch: int
    """Number of the branch on which the step was trained; 0 without a rewind before it."""
    stage: Stage
    task: str | None
    plan: Plan

    @property
    def step(self) -> int:
        return checkpoints.step_of(self.checkpoint)

    @property
    def key(self) -> str:
        """Identifies the checkpoint among all branches."""
        return f"branch-{self.branch}-step-{self.step:08d}"

    @property
    def name(self) -> str:
        """The stage, with the evaluation's name."""
        return self.stage if self.task is None else f"{self.stage}.{self.task}"

    @property
    def log(self) -> Path:
        return self.run / FOLDER / self.key / f"{self.name}.log"

    @property
    def converted_folder(self) -> Path:
        """The output of the stage convert."""
        return self.run / CONVERTED / self.key

    @property
    def trials(self) -> Trials:
        """The settings of the stage: its command and its retries."""
        settings = getattr(self.plan, self.stage)
        return settings if self.task is None else settings.tasks[self.task]

    def command(self, work: Path) -> str:
        """The command for /bin/sh, or a description of the stage. work: the folder for its output."""
        if self.plan.upload and self.stage == "upload":
            return f"copy {', '.join(self.plan.upload.folders)} to {self.plan.upload.to}"
        if self.plan.clean_up and self.stage == "clean_up":
            return f"delete {', '.join(self.plan.clean_up.delete)}"
        values = {
            "run": self.run,
            "exp_id": self.run.name,
            "checkpoint": self.checkpoint,
            "converted": self.converted_folder,
            "step": self.step,
            "branch": self.branch,
            "output": work,
            "scores": work / "scores.json",
            "task": self.task,
        }
        template = getattr(self.trials, "command")  # noqa: B009  convert and evaluate have one
        return template.format(**{name: shlex.quote(str(value)) for name, value in values.items()})


def read_outcome(unit: CheckpointStage) -> dict[str, Any]:
    """{"done": bool, "failures": int, "reason": str, "time": float} of the last attempt; {} without an attempt.

    Raises:
        RunError: the file is damaged.
    """
    return _read_outcomes(unit.run).get(unit.key, {}).get(unit.name, {})


def _read_outcomes(run: Path) -> dict[str, dict[str, dict[str, Any]]]:
    path = run / OUTCOMES
    outcomes = read_json(path, RunError) if path.exists() else {}
    keys = {"done", "failures", "reason", "time"}
    if not isinstance(outcomes, dict) or not all(
        isinstance(names, dict) and all(isinstance(one, dict) and one.keys() == keys for one in names.values())
        for names in outcomes.values()
    ):
        raise RunError(f"{path}: not a record of the outcomes of stages. Delete the file to repeat all stages.")
    return outcomes


def record(unit: CheckpointStage, reason: str) -> None:
    """Record the outcome of an attempt. reason: of its failure; empty if it succeeded."""
    outcomes, before = _read_outcomes(unit.run), read_outcome(unit)
    failures = before.get("failures", 0) + 1 if reason else 0
    outcome = {"done": not reason, "failures": failures, "reason": reason, "time": time.time()}
    outcomes[unit.key] = outcomes.get(unit.key, {}) | {unit.name: outcome}
    write_json(unit.run / OUTCOMES, outcomes)


def is_done(unit: CheckpointStage) -> bool:
    """Whether the stage succeeded; an evaluation also needs its row, which a rollback can remove."""
    return bool(read_outcome(unit).get("done")) and (unit.task is None or _has_scores(unit))


def _has_scores(unit: CheckpointStage) -> bool:
    key = {"run": unit.run.name, "branch": unit.branch, "step": unit.step, "task": unit.task}
    return any(key.items() <= row.items() for row in jsonl_records.rows(unit.run / EVALUATIONS))


def run_stage(unit: CheckpointStage, check: Check) -> None:
    """Make one attempt, also after an interrupted one. check: raises if the lease is lost.

    Raises:
        RunError: it failed, or must not run.
    """
    with writing(unit.log):
        unit.log.parent.mkdir(parents=True, exist_ok=True)
        {"convert": _convert, "evaluate": _evaluate, "upload": _upload, "clean_up": _clean_up}[unit.stage](unit, check)


def _convert(unit: CheckpointStage, check: Check) -> None:
    with new_directory(unit.converted_folder) as output:
        run_command(unit, output, check)
        if not any(path.is_file() for path in output.rglob("*")):
            raise RunError(f"{output}: the command succeeded, but wrote no file into this folder. Write to {{output}}.")


def _evaluate(unit: CheckpointStage, check: Check) -> None:
    work = unit.log.with_suffix(".work")
    shutil.rmtree(work, ignore_errors=True)
    try:
        work.mkdir()
        run_command(unit, work, check)
        file = work / "scores.json"
        scores = read_json(file, RunError)
        if not isinstance(scores, dict) or not scores or not all(type(v) in (int, float) for v in scores.values()):
            raise RunError(f"{file}: expected a JSON object of numbers by name, got {json.dumps(scores)[:100]}.")
    finally:
        shutil.rmtree(work, ignore_errors=True)
    values = {name: value if math.isfinite(value) else None for name, value in scores.items()}
    row = {"run": unit.run.name, "branch": unit.branch, "step": unit.step, "task": unit.task, "scores": values}
    with jsonl_records.open_locked(unit.run / EVALUATIONS) as rows:
        if not _has_scores(unit):
            rows.append({**row, "time": events.now()})


def run_command(unit: CheckpointStage, work: Path, check: Check) -> None:
    """Run the command, with its output in the log. It is ended if this process ends.

    Raises:
        RunError: it failed or timed out.
    """
    limit = unit.trials.timeout_seconds
    until = time.monotonic() + limit
    with open(unit.log, "ab") as out:
        process = start_bound(["/bin/sh", "-c", unit.command(work)], signal.SIGKILL, out, out)
    try:
        while process.poll() is None:
            check()
            if time.monotonic() > until:
                raise RunError(f"stopped after {limit:g} s. Increase timeout_seconds if it needs more time")
            time.sleep(POLL_SECONDS)
    except BaseException:
        end_session(process, _END_SECONDS)
        raise
    if process.returncode < 0:  # the shell was killed: its command must not continue during the next attempt
        end_session(process, _END_SECONDS)
    if process.returncode:
        raise RunError(f"exit code {process.returncode}")
    check()


def file_digests(folder: Path) -> dict[str, tuple[int, str]]:
    """Size and sha256 of the files of a folder made by `files.new_directory`, the manifest last.

    Raises:
        RunError: the manifest is missing or damaged.
    """
    files = read_manifest(folder, RunError)["files"]
    digests = {name: (facts["bytes"], facts["sha256"]) for name, facts in files.items()}
    return {**digests, MANIFEST: ((folder / MANIFEST).stat().st_size, sha256(folder / MANIFEST))}


class Destination:
    """The remote and the local folder of a checkpoint."""

    def __init__(self, unit: CheckpointStage, which: str) -> None:
        assert unit.plan.upload is not None
        self.folder = unit.checkpoint if which == "checkpoint" else unit.converted_folder
        self.files, root = open_destination(unit.plan.upload.to)
        self.path = f"{root}/{unit.run.name}/{unit.key}/{which}"

    def differs(self, name: str, expected: tuple[int, str]) -> str:
        """Compare the remote file `name` with a size and sha256; "" if equal, else a description of the remote file."""
        digest, size, path = hashlib.sha256(), 0, f"{self.path}/{name}"
        with self._reaching(name):
            if not self.files.isfile(path):
                return "nothing"
            with self.files.open(path, "rb") as file:
                while piece := cast(bytes, file.read(_PIECE)):
                    digest.update(piece)
                    size += len(piece)
        sha256 = digest.hexdigest()
        return "" if (size, sha256) == expected else f"{size} bytes of sha256 {sha256[:12]}…"

    def send(self, name: str) -> None:
        target = f"{self.path}/{name}"
        with self._reaching(name):
            self.files.makedirs(target.rpartition("/")[0], exist_ok=True)
            self.files.put_file(str(self.folder / name), target)

    @contextlib.contextmanager
    def _reaching(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # each file system of fsspec has its own
            raise RunError(f"{self.path}/{name}: {error or type(error).__name__}") from error


def _upload(unit: CheckpointStage, check: Check) -> None:
    assert unit.plan.upload is not None
    for which in unit.plan.upload.folders:
        destination = Destination(unit, which)
        for name, digest in file_digests(destination.folder).items():
            check()
            if not destination.differs(name, digest):
                continue
            path = destination.folder / name
            if (path.stat().st_size, sha256(path)) != digest:
                raise RunError(
                    f"{path}: damaged, its hash differs from {MANIFEST}. It is not uploaded; repeat its conversion."
                )
            destination.send(name)
            if difference := destination.differs(name, digest):
                raise RunError(
                    f"{destination.path}/{name}: damaged by the upload: expected {digest[0]} bytes, "
                    f"read back {difference}. Check the storage; the next attempt uploads it again."
                )
    check()


def reason_to_keep(unit: CheckpointStage) -> str:
    """Why the checkpoint cannot be deleted now; "" if it can.

    The last and the best checkpoint of a run are never deleted, as other experiments can start from them.

    Raises:
        CheckpointError, RunError: best.json or status.json is damaged.
    """
    assert unit.plan.clean_up is not None
    complete = [path for path in checkpoints.list_all(unit.run) if not defect(path, hashes=False)]
    if unit.checkpoint in complete[-unit.plan.clean_up.keep_last :]:
        return f"one of the {unit.plan.clean_up.keep_last} newest"
    if checkpoints.best_step(unit.run) == unit.step:
        return "the best one"
    return "the last one" if SavedRun(unit.run).status.get("step") == unit.step else ""


def _clean_up(unit: CheckpointStage, check: Check) -> None:
    assert unit.plan.clean_up is not None
    # The checkpoint is deleted last, so that an interrupted clean-up is repeated.
    places = [Destination(unit, which) for which in sorted(unit.plan.clean_up.delete, reverse=True)]
    places = [destination for destination in places if destination.folder.exists()]
    for destination in places:
        for name, digest in file_digests(destination.folder).items():
            check()
            if difference := destination.differs(name, digest):
                raise RunError(
                    f"{destination.path}/{name}: expected {digest[0]} bytes of sha256 {digest[1][:12]}…, read back "
                    f"{difference}. Nothing in {destination.folder} is deleted. Upload it again."
                )
    for destination in places:
        with directory_lock(unit.run, create=False):  # the run cannot start in between
            check()
            if reason := reason_to_keep(unit):
                raise RunError(f"{unit.checkpoint}: not deleted, as it is {reason}.")
            hidden = destination.folder.rename(
                destination.folder.with_name(f".{destination.folder.name}.{uuid.uuid4().hex[:8]}.old")
            )
        shutil.rmtree(hidden, ignore_errors=True)
