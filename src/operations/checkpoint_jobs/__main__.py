"""Runs the convert, evaluate, upload and clean-up stages of a plan over checkpoints.
Any number of workers may run concurrently, anywhere.

python -m src.operations.checkpoint_jobs results/runs --plan resources/checkpoint_jobs.yaml --dry-run
python -m src.operations.checkpoint_jobs results/runs --plan resources/checkpoint_jobs.yaml --every 300

A worker holds a stage of a checkpoint with a lease while it runs it. If the worker dies, its command is ended and the
next worker repeats the stage. Each attempt ends with a line in <run>/checkpoint_jobs.jsonl; scores are appended to
<run>/evaluations.jsonl. While a worker is alive, trainings delete no checkpoint that its plan is not done with. With
--once the exit code is 0 if all is done or waits, 3 if something failed, 1 if the plan is wrong.
"""

import argparse
import contextlib
import logging
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from src.errors import ConfigError, RunError, UserError
from src.files import defect
from src.launch.status import select_runs
from src.operations.checkpoint_jobs import plan as checkpoint_plan
from src.operations.checkpoint_jobs import stages
from src.operations.checkpoint_jobs.pins import Pins
from src.operations.checkpoint_jobs.plan import Plan, Stage
from src.operations.checkpoint_jobs.stages import JOBS, CheckpointStage, CommandResult
from src.runs import events, jsonl_records
from src.runs.checkpoints import folder as checkpoints
from src.runs.history import branches
from src.runs.lease import BEAT_SECONDS, STALE_SECONDS, Lease, holder_is_dead, this_process
from src.runs.metadata import read_status
from src.support.command_line import make_parser, run_command

FAILED = 3
State = Literal["done", "ready", "waits", "held", "later", "given up"]

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StageStatus:
    """Whether a stage is done, and if not, what it waits for."""

    state: State
    reason: str = ""


def plan_stages(run: Path, plan: Plan) -> list[list[CheckpointStage]]:
    """For each checkpoint of the run that the plan selects, by step, its stages in their order.
    Damaged checkpoints are left out.

    Raises:
        CheckpointError, RunError: best.json, branch.json or status.json is damaged.
    """
    rules, best, status = plan.checkpoints, checkpoints.best_step(run), read_status(run)
    last = status.get("step") if status["state"] == "done" else None
    tasks = list(plan.evaluate.tasks) if plan.evaluate else []
    planned = []
    for checkpoint in checkpoints.list_all(run):
        step = checkpoints.step_of(checkpoint)
        selected = (
            (rules.every and step % rules.every == 0) or (rules.best and step == best) or (rules.last and step == last)
        )
        if selected and defect(checkpoint, hashes=False) is None:
            branch = max(branches.branch_numbers(branches.read(run), step), default=0)
            names: list[tuple[Stage, str | None]] = [
                (stage, task) for stage in plan.stages for task in (tasks if stage == "evaluate" else [None])
            ]
            planned.append([CheckpointStage(run, checkpoint, branch, stage, task, plan) for stage, task in names])
    return planned


def stage_status(
    unit: CheckpointStage, siblings: Sequence[CheckpointStage], retry: bool = False, ours: bool = False
) -> StageStatus:
    """The status of `unit`. siblings: all stages of its checkpoint. retry: what was given up may be tried again.
    ours: we hold its lease.

    Raises:
        DataError, RunError: a file of the run is damaged.
    """
    lines = jsonl_records.rows(unit.run / JOBS)
    if _is_done(unit, lines):
        return StageStatus("done")
    if not unit.checkpoint.is_dir():
        return StageStatus("waits", "the checkpoint is gone")
    before = unit.plan.prerequisites(unit.stage)
    missing = [other.name for other in siblings if other.stage in before and not _is_done(other, lines)]
    if missing:
        return StageStatus("waits", f"for {', '.join(missing)}")
    if not ours and holder_is_dead(unit.folder) is False:
        return StageStatus("held", "by a process of this machine")
    failed = _recent_failures(unit, lines)
    trials = unit.trials
    if len(failed) >= trials.attempts and not retry:
        return StageStatus("given up", f"after {len(failed)} attempts: {failed[-1].get('reason', '')}")
    if failed and not retry:
        pause = trials.retry_seconds * 2 ** (len(failed) - 1)
        left = datetime.fromisoformat(failed[-1]["time"]).timestamp() + pause - time.time()
        if left > 0:
            return StageStatus("later", f"in {left:.0f} s, after: {failed[-1].get('reason', '')}")
    if unit.stage == "clean_up" and (reason := stages.reason_to_keep(unit)):
        return StageStatus("waits", f"it is {reason}")
    return StageStatus("ready")


def _is_done(unit: CheckpointStage, lines: Sequence[dict[str, Any]]) -> bool:
    last = next((line for line in reversed(lines) if unit.is_named_by(line)), None)
    return last is not None and last.get("result") == "ok" and stages.is_result_present(unit)


def _recent_failures(unit: CheckpointStage, lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Failed attempts since the last success. Interruptions of the worker do not count."""
    failures: list[dict[str, Any]] = []
    for line in lines:
        if unit.is_named_by(line) and line.get("result") != "interrupted":
            failures = [] if line.get("result") == "ok" else [*failures, line]
    return failures


def work(
    unit: CheckpointStage,
    siblings: Sequence[CheckpointStage],
    retry: bool = False,
    stale_seconds: float = STALE_SECONDS,
) -> StageStatus:
    """Make one attempt if the stage is ready and no other worker holds it; the status afterwards.

    Raises:
        DataError, RunError: a file of the run is damaged, or its disk refuses.
    """
    try:
        lease = Lease.acquire(unit.folder, stale_seconds, min(BEAT_SECONDS, stale_seconds / 6))
    except RunError as error:
        if unit.folder.is_dir() and holder_is_dead(unit.folder) is not True:
            return StageStatus("held", str(error))
        raise
    try:
        status = stage_status(unit, siblings, retry, ours=True)
        if status.state != "ready":
            return status
        _attempt(unit, lease)
        status = stage_status(unit, siblings, ours=True)
        return (
            StageStatus("later", "at the next look") if status.state == "ready" else status
        )  # it failed, and may be tried again at once
    finally:
        lease.release()


def _attempt(unit: CheckpointStage, lease: Lease) -> None:
    """Run the stage once, and append how it ended to the run's file."""
    number = 1 + max(
        (line.get("attempt", 0) for line in jsonl_records.rows(unit.run / JOBS) if unit.is_named_by(line)), default=0
    )
    logged = unit.folder / f"attempt-{number}.log"
    holder, began = this_process(), time.monotonic()

    def record(result: CommandResult, outcome: str) -> str:
        why = result.reason or ("" if outcome == "ok" else f"exit code {result.exit_code}")
        line = {"time": events.now(), "run": unit.run.name, **unit.identity(), "attempt": number, "result": outcome}
        line |= {"exit_code": result.exit_code, "seconds": round(time.monotonic() - began, 3), "reason": why}
        line |= {"log": str(logged.relative_to(unit.run)), "by": f"{holder['host']}:{holder['pid']}"}
        with jsonl_records.open_locked(unit.run / JOBS) as rows:
            rows.append(line)
        return why

    log.info("%s step %d: %s", unit.run.name, unit.step, unit.name)
    try:
        result = stages.run_stage(unit, logged, lease.confirm)
    except UserError as error:
        lease.confirm()
        result = CommandResult(None, str(error))
    except (KeyboardInterrupt, SystemExit):
        record(CommandResult(None, "interrupted"), "interrupted")
        raise
    why = record(result, "ok" if result.exit_code == 0 else "failed")
    if result.exit_code != 0:
        log.warning("%s step %d: %s failed: %s; see %s", unit.run.name, unit.step, unit.name, why, logged)


def run_once(
    runs: Path, exp_ids: Sequence[str], plan: Plan, retry: bool, pins: Pins | None
) -> Iterator[tuple[CheckpointStage, StageStatus]]:
    """Work through all runs once: each stage with its status afterwards.
    A run that cannot be read is named, and the others go on.

    pins: None: only look.
    """
    for exp_id in exp_ids:
        run = runs / exp_id
        try:
            planned = plan_stages(run, plan)
            statuses = [
                [_status_or_error(stage_status, unit, siblings, retry) for unit in siblings] for siblings in planned
            ]
            if pins:
                pins.renew(run, *_split_by_end(planned, statuses))
        except UserError as error:
            log.warning("%s", error)
            continue
        for siblings, known in zip(planned, statuses, strict=True):
            worked = False
            for i, unit in enumerate(siblings):
                if worked:
                    known[i] = _status_or_error(stage_status, unit, siblings, retry)
                if known[i].state == "ready" and pins:
                    known[i], worked = _status_or_error(work, unit, siblings, retry), True
                yield unit, known[i]
        try:
            if pins:
                pins.renew(run, *_split_by_end(planned, statuses))
        except UserError as error:
            log.warning("%s", error)


def _status_or_error(
    action: Callable[..., StageStatus], unit: CheckpointStage, siblings: Sequence[CheckpointStage], retry: bool
) -> StageStatus:
    """`stage_status` or `work` of the unit; an error becomes a status."""
    try:
        return action(unit, siblings, retry)
    except UserError as error:
        log.warning("%s step %d: %s: %s", unit.run.name, unit.step, unit.name, error)
        return StageStatus("later", str(error))


def _split_by_end(
    planned: Sequence[Sequence[CheckpointStage]], statuses: Sequence[Sequence[StageStatus]]
) -> tuple[list[Path], list[Path]]:
    """The checkpoints that the plan is done with, and the others.
    If an upload was given up it is not done: there is no other copy."""
    ended, others = [], []
    for siblings, known in zip(planned, statuses, strict=True):
        pairs = zip(siblings, known, strict=True)
        done = all(one.state == "done" or (one.state == "given up" and unit.stage != "upload") for unit, one in pairs)
        (ended if done else others).append(siblings[0].checkpoint)
    return ended, others


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The arguments."""
    parser = make_parser("src.operations.checkpoint_jobs", __doc__)
    parser.add_argument("runs", type=Path, metavar="RUNS", help="folder of save directories, or one of them")
    parser.add_argument(
        "--plan", type=Path, required=True, metavar="FILE", help="the plan; example: resources/checkpoint_jobs.yaml"
    )
    parser.add_argument("-e", "--group", metavar="GROUP", help="only the runs of this group")
    parser.add_argument("--once", action="store_true", help="work through all runs once; see the exit code above")
    parser.add_argument(
        "--every", type=float, default=300.0, metavar="SECONDS", help="repeat at this interval (default: 300)"
    )
    parser.add_argument("--retry", action="store_true", help="first retry what failed once, even if given up")
    parser.add_argument(
        "--dry-run", "--dry_run", action="store_true", help="show each stage and its command; do nothing"
    )
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    return run_command(lambda: repeat(parse(argv)))


def repeat(args: argparse.Namespace) -> int:
    """Work through all runs once, or again and again; returns the exit code."""
    if args.every <= 0:
        raise ConfigError(f"--every: expected a number above 0, got {args.every:g}.")
    plan = checkpoint_plan.read(args.plan)
    runs, _ = select_runs(args.runs, args.group)
    with contextlib.nullcontext() if args.dry_run else Pins(runs, plan) as pins:
        while True:
            code = _round(args, plan, pins)
            if args.once or args.dry_run:
                return code
            args.retry = False
            time.sleep(args.every)


def _round(args: argparse.Namespace, plan: Plan, pins: Pins | None) -> int:
    """Work through all once; returns the exit code."""
    runs, exp_ids = select_runs(args.runs, args.group)
    code = 0
    for unit, status in run_once(runs, exp_ids, plan, args.retry, pins):
        if args.dry_run:
            line = f"{unit.run.name}  {unit.key}  {unit.name:20}  {status.state:8}  {status.reason}".rstrip()
            sys.stdout.write(
                f"{line}\n" + (f"    {stages.describe_command(unit, unit.folder)}\n" if status.state != "done" else "")
            )
        elif status.state in ("given up", "later"):
            code = FAILED
    return code


if __name__ == "__main__":
    sys.exit(main())
