"""Watch trainings for hangs, deaths, divergence, and errors in their logs.
Each incident is recorded once, in <run>/events.jsonl.

python -m src.operations.watchdog results/runs --once                  for cron
python -m src.operations.watchdog results/runs -e base_tiny --every 60 \\
    --notify 'mail -s "$WATCHDOG_RULE $WATCHDOG_RUN" me'

A run is hung if its process is alive but its last step is older than FACTOR times its median step, plus the time of an
evaluation. It is dead if its process is gone without a final status. The command of --notify gets each new event as
JSON on its standard input. With --once the exit code is 0 without incidents, 3 for a new incident or an unreadable run,
4 if all incidents are known, 1 for an invalid command.
"""

import argparse
import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

from src.errors import ConfigError, RunError, UserError
from src.launch.logs import tail
from src.launch.status import Row, select_runs, table
from src.launch.tracking import ALIVE
from src.runs import heartbeat, lease
from src.runs.history import events
from src.runs.store import PERF, STATUS, RunStore, SavedRun
from src.support.command_line import make_parser, run_command
from src.support.parsing import parse_json

NEW_INCIDENT_EXIT, KNOWN_INCIDENT_EXIT = 3, 4
SILENT_SECONDS = lease.SILENT_SECONDS
"""A lease holder without a heartbeat for this long is dead or stopped."""
_ROWS = 50
"""Newest rows of perf.jsonl from which durations are estimated."""
_NOTIFY_SECONDS = 60.0

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Limits:
    """Limits for the age of the last step."""

    factor: float = 10.0
    """Multiple of the median step."""
    least_seconds: float = 60.0
    """Lower bound, for fast steps."""
    start_seconds: float = 1800.0
    """Limit until the first step (reading data, compiling kernels), and for an evaluation before one was measured."""


@dataclass(frozen=True)
class Verdict:
    """The judgement of one run."""

    exp_id: str
    state: str
    """"hung" or "dead", else the state in the status table."""
    reason: str
    attempt: int
    step: int | None

    @property
    def needs_attention(self) -> bool:
        """Whether a person should look at it."""
        return self.state in ("hung", "dead", "failed")


@dataclass(frozen=True)
class Pace:
    """Durations in a run, in seconds, from perf.jsonl and the heartbeat."""

    step: float | None
    """Median duration of an optimizer step."""
    row: float
    """The longest time between two rows."""
    pause: float | None
    """The longest evaluation with its checkpoint; None before the first."""


def pace(run: Path, beat: heartbeat.Beat | None) -> Pace:
    """The durations in the newest rows of perf.jsonl; malformed lines are ignored."""
    steps, rows, pauses = [], [], []
    for line in tail(run / PERF, _ROWS).splitlines():
        try:
            row = parse_json(line, run / PERF, RunError)
            seconds, rate, at = float(row["seconds"]), float(row["steps_per_second"]), int(row["step"])
        except (RunError, ValueError, TypeError, KeyError):
            continue
        if seconds > 0 and rate > 0:
            steps.append(1 / rate)
            rows.append((at, seconds))
    for (before, _), (after, seconds) in pairwise(rows):
        if after > before:
            pauses.append(max(0.0, seconds - (after - before) * median(steps)))
    step = beat.step_seconds if beat and beat.step_seconds else median(steps) if steps else None
    return Pace(step, max((seconds for _, seconds in rows), default=0.0), max(pauses, default=None))


def judge(run: Path, row: Row, limits: Limits) -> Verdict:
    """Judge the run in the save directory `run`, given its row of the status table.
    Raises RunError if status.json is damaged."""
    state, reason, step = row.state, row.reason, row.step
    if state == "lost":
        state, reason = "dead", reason or "its process is gone, without a reason"
    elif state == "running":
        beat = heartbeat.read(run)
        state, reason, step = _judge_running(
            SavedRun(run), row, beat if beat and beat.attempt == row.attempts else None, limits
        )
    return Verdict(row.exp_id, state, reason, row.attempts, step)


def _judge_running(run: SavedRun, row: Row, beat: heartbeat.Beat | None, limits: Limits) -> tuple[str, str, int | None]:
    """(state, reason, last step) of a run that is running by its scheduler or its save directory."""
    status, silent_seconds, dead = run.status, row.heartbeat_seconds, run.holder.is_dead
    if dead is None and silent_seconds is not None and silent_seconds > SILENT_SECONDS:
        return "dead", f"no sign of life from {run.holder.host} for {_format_seconds(silent_seconds)}", row.step
    if status["state"] != "running" or dead:
        # The job runs, but its training has not (re)started yet: torchrun restarts it, or modules are loading.
        waits = min((seconds for seconds in (row.seconds, _age(run.path / STATUS)) if seconds is not None), default=0.0)
        if waits > limits.start_seconds:
            return "hung", f"its job runs, but none of its processes has trained for {_format_seconds(waits)}", row.step
        return "running", "", row.step
    run_pace = pace(run.path, beat)
    step, age = status.get("step"), _age(run.path / STATUS) or 0.0
    if beat is not None and (beat.age_seconds <= age or type(step) is not int or beat.step >= step):
        step, age = beat.step, min(age, beat.age_seconds)
    elif status.get("updated") == status.get("started"):
        if age <= limits.start_seconds:
            return "running", "", row.step
        return (
            "hung",
            f"no step since it was started {_format_seconds(age)} ago{_silence_note(silent_seconds)}",
            row.step,
        )
    at_rest = 3 * run_pace.pause if run_pace.pause is not None else limits.start_seconds
    allowed = (
        max(limits.least_seconds, limits.factor * (run_pace.step or 0.0))
        + at_rest
        + (run_pace.row if beat is None else 0.0)
    )
    if age <= allowed:
        return "running", "", step
    pace_text = f"a step takes {_format_seconds(run_pace.step)}" if run_pace.step else "the time per step is unknown"
    limit = _format_seconds(allowed)
    description = f"its last step, {step}, was {_format_seconds(age)} ago; {pace_text}, and {limit} are allowed"
    return "hung", f"{description}{_silence_note(silent_seconds)}", step


def _silence_note(silent_seconds: float | None) -> str:
    if silent_seconds is None or silent_seconds <= SILENT_SECONDS / 5:
        return ""
    return ". Its lease does not beat either: is the process stopped (SIGSTOP), or its disk full?"


def _age(path: Path) -> float | None:
    """Seconds since the file was written; None if there is no file."""
    try:
        return max(0.0, time.time() - path.stat().st_mtime)
    except OSError:
        return None


def _format_seconds(seconds: float) -> str:
    return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s" if seconds < 600 else f"{seconds / 60:.0f} min"


def inspect_runs(
    runs: Path, exp_ids: Sequence[str], limits: Limits
) -> tuple[list[Verdict], list[tuple[str, events.Event]], list[str]]:
    """Judge each run, scan its logs, and record new events: the verdicts, (id, new event), and errors."""
    verdicts, new, errors = [], [], []
    for row in table(RunStore(runs), exp_ids):
        run = runs / row.exp_id
        if row.state == "unknown":
            errors.append(f"{run}: {row.reason}")
        try:
            verdict = judge(run, row, limits)
            verdicts.append(verdict)
            logs = SavedRun(runs / row.exp_id).logs
            new += [
                (row.exp_id, event)
                for event in events.scan(run, logs, row.attempts, is_complete=row.state not in ALIVE)
            ]
            new += [
                (row.exp_id, event) for event in [*events.scan_ledger(run, row.attempts), *_note_incident(run, verdict)]
            ]
        except UserError as error:
            errors.append(str(error))
    return verdicts, new, errors


def _note_incident(run: Path, verdict: Verdict) -> list[events.Event]:
    """Record the verdict as an event if it is a new incident; return it in a list."""
    facts = {"attempt": verdict.attempt, "step": verdict.step}
    if verdict.needs_attention:
        at = f":{verdict.step}" if verdict.state == "hung" else ""
        incident = f"{verdict.state}:{verdict.attempt}{at}"
        event = {"rule": verdict.state, "severity": "error", "line": verdict.reason, **facts, "incident": incident}
    elif (
        verdict.state in ("running", "done")
        and (last := events.latest_problem(run, verdict.attempt))
        and last["rule"] == "hung"
    ):
        event = {"rule": "recovered", "severity": "info", "line": f"continues after: {last['line']}", **facts}
        event["incident"] = f"recovered:{last['incident']}"
    else:
        return []
    return events.note_once(run, event)


def notify(command: str, exp_id: str, event: events.Event) -> None:
    """Run a shell command with the event on its standard input. A failure is only logged."""
    environment = {
        **os.environ,
        "WATCHDOG_RUN": exp_id,
        "WATCHDOG_RULE": str(event["rule"]),
        "WATCHDOG_SEVERITY": str(event["severity"]),
    }
    text = json.dumps({"exp_id": exp_id, **event}) + "\n"
    try:
        done = subprocess.run(
            ["/bin/sh", "-c", command],
            input=text,
            text=True,
            capture_output=True,
            env=environment,
            timeout=_NOTIFY_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        log.warning("--notify: %s", error)
        return
    if done.returncode:
        log.warning("--notify: the command ended with %d: %s", done.returncode, done.stderr.strip()[-500:])


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The arguments."""
    parser = make_parser("src.operations.watchdog", __doc__)
    parser.add_argument("runs", type=Path, metavar="RUNS", help="folder of save directories, or one of them")
    parser.add_argument("-e", "--group", metavar="GROUP", help="only the runs of this group")
    parser.add_argument("--once", action="store_true", help="check once; see the exit code above")
    parser.add_argument(
        "--every", type=float, default=60.0, metavar="SECONDS", help="repeat at this interval (default: 60)"
    )
    parser.add_argument(
        "--factor", type=float, default=10.0, help="allowed age of the last step, in median steps (default: 10)"
    )
    parser.add_argument(
        "--least",
        type=float,
        default=60.0,
        metavar="SECONDS",
        help="minimum allowed age of the last step (default: 60)",
    )
    parser.add_argument(
        "--start", type=float, default=1800.0, metavar="SECONDS", help="allowed until the first step (default: 1800)"
    )
    parser.add_argument("--notify", metavar="COMMAND", help="shell command for each new warning or error")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    return run_command(lambda: watch(parse(argv)))


def watch(args: argparse.Namespace) -> int:
    """Check the runs once, or repeatedly; return the exit code."""
    if min(args.every, args.factor, args.least, args.start) <= 0:
        raise ConfigError("--every, --factor, --least, --start: expected numbers above 0.")
    limits = Limits(args.factor, args.least, args.start)
    while True:
        code = _run_round(*select_runs(args.runs, args.group), limits, args.notify)
        if args.once:
            return code
        time.sleep(args.every)


def _run_round(runs: Path, exp_ids: Sequence[str], limits: Limits, command: str | None) -> int:
    """Check the runs once and report new events; return the exit code."""
    verdicts, new, errors = inspect_runs(runs, exp_ids, limits)
    for text in errors:
        log.warning("%s", text)
    for exp_id, event in new:
        log.info("%s %s %s", exp_id, event["severity"], events.describe(event))
        if command and event["severity"] != "info":
            notify(command, exp_id, event)
    if errors or any(event["severity"] == "error" for _, event in new):
        return NEW_INCIDENT_EXIT
    return KNOWN_INCIDENT_EXIT if any(verdict.needs_attention for verdict in verdicts) else 0


if __name__ == "__main__":
    sys.exit(main())
