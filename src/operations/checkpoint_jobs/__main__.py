"""Does with the checkpoints of runs what a plan says: convert, evaluate, upload, clean up. Several of these may work at once, anywhere.

python -m src.operations.checkpoint_jobs.__main__ results/runs --plan resources/checkpoint_jobs.yaml --dry-run
python -m src.operations.checkpoint_jobs.__main__ results/runs --plan resources/checkpoint_jobs.yaml --every 300

Each stage of each checkpoint is held with a lease while it runs, and done once: what a killed one of these left running is waited for by
the next. What came of each attempt is a line of <run>/checkpoint_jobs.jsonl, scores are one of <run>/evaluations.jsonl.
While one of these is alive, the trainings delete no checkpoint that it is not done with.
With --once the exit code is 0 where all is done or waits for its time, 3 where something failed, 1 where the plan is wrong.
"""

import argparse
import contextlib
import logging
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from src.errors import ConfigError, RunError, UserError
from src.files import defect
from src.launch import run_folders
from src.launch.interruption import signals_raise
from src.operations.checkpoint_jobs import plan as checkpoint_plan
from src.operations.checkpoint_jobs import process as stage_process
from src.operations.checkpoint_jobs import stages
from src.operations.checkpoint_jobs.pins import Pins
from src.operations.checkpoint_jobs.plan import Plan
from src.operations.checkpoint_jobs.process import Attempt, End
from src.operations.checkpoint_jobs.stages import JOBS, Unit
from src.runs import events, jsonl_records
from src.runs.checkpoints import folder as checkpoints
from src.runs.history import branches
from src.runs.lease import BEAT_SECONDS, STALE_SECONDS, Lease, holder_is_dead, this_process
from src.runs.metadata import read_status

FAILED = 3
State = Literal["done", "ready", "waits", "held", "later", "given up"]

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Standing:
    """How things stand with one stage."""

    state: State
    reason: str = ""


def units(run: Path, plan: Plan) -> list[list[Unit]]:
    """For each checkpoint of the run that the plan means, by step, its stages in their order. A damaged one is no checkpoint.

    Raises:
        RunError: best.json, branch.json or status.json is damaged.
    """
    chosen = []
    rules, best, status = plan.checkpoints, stages.best_step(run), read_status(run)
    last = status.get("step") if status["state"] == "done" else None
    for checkpoint in checkpoints.every(run):
        step = checkpoints.step_of(checkpoint)
        meant = (rules.every and step % rules.every == 0) or (rules.best and step == best) or (rules.last and step == last)
        if meant and defect(checkpoint, hashes=False) is None:
            chosen.append((checkpoint, _branch(run, step)))
    tasks = {stage: [None] if stage != "evaluate" or plan.evaluate is None else list(plan.evaluate.tasks) for stage in plan.stages}
    return [
        [Unit(run, checkpoint, branch, stage, task, plan) for stage in plan.stages for task in tasks[stage]]
        for checkpoint, branch in chosen
    ]


def _branch(run: Path, step: int) -> int:
    """Number of the last branch that step `step` was made under; 0 where there is none."""
    return max(branches.passed(branches.read(run), step), default=0)


def standing(unit: Unit, siblings: Sequence[Unit], retry: bool = False, ours: bool = False) -> Standing:
    """How things stand with `unit`. siblings: all stages of its checkpoint. retry: what was given up may be tried again. ours: we hold it.

    Raises:
        DataError, RunError: a file of the run is damaged.
    """
    lines = jsonl_records.rows(unit.run / JOBS)
    if _done(unit, lines):
        return Standing("done")
    if not unit.checkpoint.is_dir():
        return Standing("waits", "the checkpoint is gone")
    before = unit.plan.before(unit.stage)
    missing = [other.name for other in siblings if other.stage in before and not _done(other, lines)]
    if missing:
        return Standing("waits", f"for {', '.join(missing)}")
    if not ours and holder_is_dead(unit.folder) is False:
        return Standing("held", "by a process of this machine")
    failed = _failures(unit, lines)
    trials = unit.trials
    if len(failed) >= trials.attempts and not retry:
        return Standing("given up", f"after {len(failed)} attempts: {failed[-1].get('reason', '')}")
    if failed and not retry:
        pause = trials.retry_seconds * 2 ** (len(failed) - 1)
        left = datetime.fromisoformat(failed[-1]["time"]).timestamp() + pause - time.time()
        if left > 0:
            return Standing("later", f"in {left:.0f} s, after: {failed[-1].get('reason', '')}")
    if unit.stage == "clean_up" and (reason := stages.must_stay(unit)):
        return Standing("waits", f"it is {reason}")
    return Standing("ready")


def _done(unit: Unit, lines: Sequence[dict[str, Any]]) -> bool:
    last = next((line for line in reversed(lines) if unit.is_named_by(line)), None)
    return last is not None and last.get("result") == "ok" and stages.result_holds(unit)


def _failures(unit: Unit, lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Attempts that failed since the last that did not. What was interrupted together with us is nobody's failure."""
    found: list[dict[str, Any]] = []
    for line in lines:
        if unit.is_named_by(line) and line.get("result") != "interrupted":
            found = [] if line.get("result") == "ok" else [*found, line]
    return found


def work(unit: Unit, siblings: Sequence[Unit], retry: bool = False, stale_seconds: float = STALE_SECONDS) -> Standing:
    """Make one attempt at what is ready, unless another process is at it; says how things stand then.

    Raises:
        DataError, RunError: a file of the run is damaged, or its disk refuses.
    """
    try:
        lease = Lease.acquire(unit.folder, stale_seconds, min(BEAT_SECONDS, stale_seconds / 6))
    except RunError as error:
        if unit.folder.is_dir() and holder_is_dead(unit.folder) is not True:
            return Standing("held", str(error))
        raise
    try:
        begun = stage_process.last_begun(unit.folder)
        if begun > _last_recorded(unit):
            _record(unit, lease, Attempt(unit.folder, begun), adopted=True)
        now = standing(unit, siblings, retry, ours=True)
        if now.state != "ready":
            return now
        _record(unit, lease, Attempt(unit.folder, begun + 1), adopted=False)
        now = standing(unit, siblings, ours=True)
        return Standing("later", "at the next look") if now.state == "ready" else now  # it failed, and may be tried again at once
    finally:
        lease.release()


def _last_recorded(unit: Unit) -> int:
    return max((line.get("attempt", 0) for line in jsonl_records.rows(unit.run / JOBS) if unit.is_named_by(line)), default=0)


def _record(unit: Unit, lease: Lease, attempt: Attempt, adopted: bool) -> None:
    """Make the attempt, or wait for the end of one that another process began, and write down what came of it."""
    began = time.monotonic()
    log.info("%s step %d: %s%s", unit.run.name, unit.step, unit.name, f" goes on (attempt {attempt.number})" if adopted else "")
    try:
        if adopted:
            end = stage_process.adopt(attempt, unit.trials.timeout_seconds, lease.confirm)
            end = stages.conclude(unit, end) if end.exit_code == 0 else end
        else:
            end = replace(stages.act(unit, attempt, lease.confirm), seconds=time.monotonic() - began)
        result = "ok" if end.exit_code == 0 else "interrupted" if end.exit_code is None and adopted else "failed"
    except UserError as error:
        lease.confirm()
        end, result = End(None, time.monotonic() - began, str(error)), "failed"
    except (KeyboardInterrupt, SystemExit):
        _append(unit, attempt, End(None, time.monotonic() - began, "interrupted"), "interrupted")
        raise
    _append(unit, attempt, end, result)
    if result != "ok":
        log.warning("%s step %d: %s %s: %s; see %s", unit.run.name, unit.step, unit.name, result, _why(end), attempt.file("log"))


def _append(unit: Unit, attempt: Attempt, end: End, result: str) -> None:
    holder = this_process()
    line = {"time": events.now(), "run": unit.run.name, **unit.facts(), "attempt": attempt.number, "result": result}
    line |= {"exit_code": end.exit_code, "seconds": round(end.seconds, 3), "reason": _why(end) if result != "ok" else end.reason}
    line |= {"log": str(attempt.file("log").relative_to(unit.run)), "by": f"{holder['host']}:{holder['pid']}"}
    with jsonl_records.opened(unit.run / JOBS) as rows:
        rows.append(line)


def _why(end: End) -> str:
    return end.reason or (f"exit code {end.exit_code}" if end.exit_code is not None else "killed")


def look(runs: Path, exp_ids: Sequence[str], plan: Plan, retry: bool, pins: Pins | None) -> Iterator[tuple[Unit, Standing]]:
    """Work through all runs once: each stage with how it then stands. A run that cannot be read is named, and the others go on.

    pins: None: only look.
    """
    for exp_id in exp_ids:
        run = runs / exp_id
        try:
            every = units(run, plan)
            found = [[_looked(unit, siblings, retry) for unit in siblings] for siblings in every]
            if pins:
                pins.renew(run, *_by_end(every, found))
        except UserError as error:
            log.warning("%s", error)
            continue
        for siblings, standings in zip(every, found, strict=True):
            worked = False
            for i, unit in enumerate(siblings):
                if worked:
                    standings[i] = _looked(unit, siblings, retry)
                if standings[i].state == "ready" and pins:
                    standings[i], worked = _looked(unit, siblings, retry, work), True
                yield unit, standings[i]
        try:
            if pins:
                pins.renew(run, *_by_end(every, found))
        except UserError as error:
            log.warning("%s", error)


def _looked(unit: Unit, siblings: Sequence[Unit], retry: bool, what: Callable[..., Standing] = standing) -> Standing:
    """`what` of the unit, `standing` or `work`; where that cannot be told, it is told why."""
    try:
        return what(unit, siblings, retry)
    except UserError as error:
        log.warning("%s step %d: %s: %s", unit.run.name, unit.step, unit.name, error)
        return Standing("later", str(error))


def _by_end(every: Sequence[Sequence[Unit]], found: Sequence[Sequence[Standing]]) -> tuple[list[Path], list[Path]]:
    """The checkpoints that the plan is done with, and the others: those, too, whose upload was given up, as they lie nowhere else."""
    ended, others = [], []
    for siblings, standings in zip(every, found, strict=True):
        pairs = zip(siblings, standings, strict=True)
        done = all(one.state == "done" or (one.state == "given up" and unit.stage != "upload") for unit, one in pairs)
        (ended if done else others).append(siblings[0].checkpoint)
    return ended, others


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The arguments."""
    parser = argparse.ArgumentParser(
        prog="python -m src.operations.checkpoint_jobs.__main__",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("runs", type=Path, metavar="RUNS", help="folder of save directories, or one of them")
    parser.add_argument("--plan", type=Path, required=True, metavar="FILE", help="what to do: see resources/checkpoint_jobs.yaml")
    parser.add_argument("-e", "--group", metavar="GROUP", help="only the runs of this group")
    parser.add_argument("--once", action="store_true", help="work through all once, and tell by the exit code")
    parser.add_argument("--every", type=float, default=300.0, metavar="SECONDS", help="look again and again (default: 300)")
    parser.add_argument("--retry", action="store_true", help="at first, try what failed once more, given up or not")
    parser.add_argument("--dry-run", "--dry_run", action="store_true", help="show each stage and its command; do nothing")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    args = parse(argv)
    logging.basicConfig(format="%(message)s")
    logging.getLogger("src").setLevel(logging.INFO)
    try:
        if args.every <= 0:
            raise ConfigError(f"--every: expected a number above 0, got {args.every:g}.")
        plan = checkpoint_plan.read(args.plan)
        runs, _ = run_folders.chosen(args.runs, args.group)
        with signals_raise(), contextlib.nullcontext() if args.dry_run else Pins(runs, plan) as pins:
            while True:
                code = _round(args, plan, pins)
                if args.once or args.dry_run:
                    return code
                args.retry = False
                time.sleep(args.every)
    except UserError as error:
        for line in str(error).splitlines():
            sys.stderr.write(f"error: {line}\n")
        return 1
    except KeyboardInterrupt:
        return 130


def _round(args: argparse.Namespace, plan: Plan, pins: Pins | None) -> int:
    """Work through all once; returns the exit code."""
    runs, exp_ids = run_folders.chosen(args.runs, args.group)
    code = 0
    for unit, found in look(runs, exp_ids, plan, args.retry, pins):
        if args.dry_run:
            told = f"{unit.run.name}  {unit.key}  {unit.name:20}  {found.state:8}  {found.reason}".rstrip()
            sys.stdout.write(f"{told}\n" + (f"    {stages.command(unit)}\n" if found.state != "done" else ""))
        elif found.state in ("given up", "later"):
            code = FAILED
    return code


if __name__ == "__main__":
    sys.exit(main())
