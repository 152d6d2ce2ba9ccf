"""Run the convert, evaluate, upload and clean-up stages of a plan over checkpoints.

python -m src.operations.checkpoint_jobs results/runs --plan resources/checkpoint_jobs.yaml --dry-run
python -m src.operations.checkpoint_jobs results/runs --plan resources/checkpoint_jobs.yaml --every 300

Several processes can run this on any machines; one at a time works on a run. If it dies, its command is ended and the
next process repeats the stage. <run>/checkpoint_jobs.json records finished stages; scores are appended to
<run>/evaluations.jsonl. While a process is alive, trainings do not delete checkpoints with unfinished stages. With
--once the exit code is 0 if all stages are done or waiting, 3 if a stage failed, 1 if the plan is invalid.
"""

import argparse
import contextlib
import logging
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from src.errors import ConfigError, UserError
from src.files import defect
from src.launch.status import select_runs
from src.operations.checkpoint_jobs import stages
from src.operations.checkpoint_jobs.pins import Pins
from src.operations.checkpoint_jobs.plan import Plan, Stage
from src.operations.checkpoint_jobs.plan import read as read_plan
from src.operations.checkpoint_jobs.stages import CheckpointStage
from src.runs.checkpoints import checkpoints
from src.runs.history import branches
from src.runs.lease import Lease, holder_of
from src.runs.store import SavedRun
from src.support.command_line import make_parser, run_command

FAILED = 3
State = Literal["done", "ready", "waits", "later", "given up"]

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StageStatus:
    """The state of a stage, and the reason if it is not done."""

    state: State
    reason: str = ""


def plan_stages(run: Path, plan: Plan) -> list[list[CheckpointStage]]:
    """The stages of each selected checkpoint of the run, by step and in order. Damaged checkpoints are left out.

    Raises:
        CheckpointError, RunError: best.json, branch.json or status.json is damaged.
    """
    rules, best, status = plan.checkpoints, checkpoints.best_step(run), SavedRun(run).status
    last = status.get("step") if status["state"] == "done" else None
    tasks = list(plan.evaluate.tasks) if plan.evaluate else []
    stages_by_checkpoint = []
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
            stages_by_checkpoint.append(
                [CheckpointStage(run, checkpoint, branch, stage, task, plan) for stage, task in names]
            )
    return stages_by_checkpoint


def stage_status(unit: CheckpointStage, siblings: Sequence[CheckpointStage], retry: bool = False) -> StageStatus:
    """The status of `unit`. siblings: all stages of its checkpoint. retry: repeat failed stages, even if given up.

    Raises:
        DataError, RunError: a file of the run is damaged.
    """
    if stages.is_done(unit):
        return StageStatus("done")
    before = unit.plan.prerequisites(unit.stage)
    missing = [other.name for other in siblings if other.stage in before and not stages.is_done(other)]
    if missing:
        return StageStatus("waits", f"for {', '.join(missing)}")
    outcome, trials = stages.read_outcome(unit), unit.trials
    if not retry and (failures := outcome.get("failures", 0)):
        if failures >= trials.attempts:
            return StageStatus("given up", f"after {failures} attempts: {outcome['reason']}")
        seconds = outcome["time"] + trials.retry_seconds * 2 ** (failures - 1) - time.time()
        if seconds > 0:
            return StageStatus("later", f"in {seconds:.0f} s, after: {outcome['reason']}")
    if unit.stage == "clean_up" and (reason := stages.reason_to_keep(unit)):
        return StageStatus("waits", f"it is {reason}")
    return StageStatus("ready")


def work(
    run: Path,
    stages_by_checkpoint: Sequence[Sequence[CheckpointStage]],
    statuses: list[list[StageStatus]],
    retry: bool = False,
) -> list[list[StageStatus]]:
    """Make one attempt at each stage that is ready; return the new statuses. Skips a run that another process works on.

    Raises:
        DataError, RunError: a file of the run is damaged, or its disk refuses.
    """
    folder = run / stages.FOLDER
    if not any(one.state == "ready" for row in statuses for one in row) or holder_of(folder).is_dead is False:
        return statuses
    lease = Lease.acquire(folder)
    try:
        return [[_work_on(unit, siblings, retry, lease) for unit in siblings] for siblings in stages_by_checkpoint]
    finally:
        lease.release()


def _work_on(unit: CheckpointStage, siblings: Sequence[CheckpointStage], retry: bool, lease: Lease) -> StageStatus:
    status = stage_status(unit, siblings, retry)
    if status.state != "ready":
        return status
    log.info("%s step %d: %s", unit.run.name, unit.step, unit.name)
    reason = ""
    try:
        stages.run_stage(unit, lease.confirm)
    except UserError as error:
        reason = str(error)
        log.warning("%s step %d: %s failed: %s; see %s", unit.run.name, unit.step, unit.name, reason, unit.log)
    lease.confirm()
    stages.record(unit, reason)
    status = stage_status(unit, siblings)
    return StageStatus("later", reason) if status.state == "ready" else status


def _split_by_end(
    stages_by_checkpoint: Sequence[Sequence[CheckpointStage]], statuses: Sequence[Sequence[StageStatus]]
) -> tuple[list[Path], list[Path]]:
    """The checkpoints with all stages finished, and the rest.
    A checkpoint with a failed upload is not finished: there is no other copy."""
    finished_checkpoints, remaining_checkpoints = [], []
    for siblings, row in zip(stages_by_checkpoint, statuses, strict=True):
        pairs = zip(siblings, row, strict=True)
        done = all(
            status.state == "done" or (status.state == "given up" and unit.stage != "upload") for unit, status in pairs
        )
        (finished_checkpoints if done else remaining_checkpoints).append(siblings[0].checkpoint)
    return finished_checkpoints, remaining_checkpoints


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The arguments."""
    parser = make_parser("src.operations.checkpoint_jobs", __doc__)
    parser.add_argument("runs", type=Path, metavar="RUNS", help="folder of save directories, or one of them")
    parser.add_argument(
        "--plan", type=Path, required=True, metavar="FILE", help="the plan; example: resources/checkpoint_jobs.yaml"
    )
    parser.add_argument("-e", "--group", metavar="GROUP", help="only the runs of this group")
    parser.add_argument("--once", action="store_true", help="process all runs once; see the exit code above")
    parser.add_argument(
        "--every", type=float, default=300.0, metavar="SECONDS", help="repeat at this interval (default: 300)"
    )
    parser.add_argument("--retry", action="store_true", help="first retry failed stages once, even those given up")
    parser.add_argument(
        "--dry-run", "--dry_run", action="store_true", help="show each stage and its command; do nothing"
    )
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    return run_command(lambda: repeat(parse(argv)))


def repeat(args: argparse.Namespace) -> int:
    """Process all runs once, or repeatedly; return the exit code."""
    if args.every <= 0:
        raise ConfigError(f"--every: expected a number above 0, got {args.every:g}.")
    plan = read_plan(args.plan)
    runs, _ = select_runs(args.runs, args.group)
    with contextlib.nullcontext() if args.dry_run else Pins(runs, plan) as pins:
        while True:
            code = _round(args, plan, pins)
            if args.once or args.dry_run:
                return code
            args.retry = False
            time.sleep(args.every)


def _round(args: argparse.Namespace, plan: Plan, pins: Pins | None) -> int:
    """Process all runs once; return the exit code. Runs that cannot be read are logged and skipped."""
    runs, exp_ids = select_runs(args.runs, args.group)
    code = 0
    for run in (runs / exp_id for exp_id in exp_ids):
        try:
            stages_by_checkpoint = plan_stages(run, plan)
            statuses = [
                [stage_status(unit, siblings, args.retry) for unit in siblings] for siblings in stages_by_checkpoint
            ]
            if pins:
                pins.renew(run, *_split_by_end(stages_by_checkpoint, statuses))
                statuses = work(run, stages_by_checkpoint, statuses, args.retry)
                pins.renew(run, *_split_by_end(stages_by_checkpoint, statuses))
        except UserError as error:
            log.warning("%s", error)
            code = FAILED
            continue
        for siblings, row in zip(stages_by_checkpoint, statuses, strict=True):
            for unit, status in zip(siblings, row, strict=True):
                if args.dry_run:
                    sys.stdout.write(f"{run.name}  {unit.key}  {unit.name:20}  {status.state:8}  {status.reason}\n")
                    sys.stdout.write(f"    {unit.command(unit.log.parent)}\n" if status.state != "done" else "")
                elif status.state in ("given up", "later"):
                    code = FAILED
    return code


if __name__ == "__main__":
    sys.exit(main())
