"""The state of each experiment, from its scheduler and its save directory."""

import contextlib
import itertools
import os
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from src.errors import ConfigError, UserError
from src.experiments.config import unknown
from src.files import reading
from src.launch import submissions
from src.launch.arguments import STATES
from src.launch.tracking import LOOK, QueryPolicy, TrackedJob, track
from src.runs import lease, parents
from src.runs.history import events
from src.runs.store import EXP_DICT, RunStore, SavedRun, expand_run, list_command
from src.support.command_line import aligned_lines
from src.support.read_cache import ReadCache

_MAX_DIFFERENCE = 80
"""Maximum characters of the column "differs by"."""
_ID = re.compile(r"[0-9a-f]{32}")
State = Literal["never", "queued", "running", "done", "failed", "stopped", "lost", "unknown"]


@dataclass(frozen=True)
class Row:
    """One experiment in the status table."""

    exp_id: str
    group: str
    state: State
    reason: str
    node: str
    seconds: float | None
    """Run time of the current or last attempt."""
    attempts: int
    step: int | None
    """The last step with scores, of `steps`."""
    steps: int | None
    loss: float | None
    heartbeat_seconds: float | None
    """Age of the last heartbeat; None if no process holds the save directory."""
    job_id: str | None
    log: Path | None
    doubt: str = ""
    """Why the scheduler could not be queried; empty if it could.
    The state is then the last known one, and nothing is submitted."""


RowCache = ReadCache[tuple[Row, TrackedJob | None]]
"""Rows of ended experiments, each with its job."""


def select_runs(path: Path, group: str | None = None) -> tuple[Path, list[str]]:
    """The folder of runs, and the selected ids: all in `path`, or one if `path` is a save directory or an id prefix.

    Raises:
        ConfigError: no such folder, no run in it, no run of `group`, or several ids have this prefix.
        RunError: the folder cannot be read.
    """
    path = expand_run(path).resolve()
    if not path.is_dir():
        raise ConfigError(f"{path}: no such folder. Expected a folder of save directories, or a save directory.")
    if _ID.fullmatch(path.name):
        runs, names = path.parent, [path.name]
    else:
        with reading(path):
            runs, names = path, sorted(name for name in os.listdir(path) if _ID.fullmatch(name))
        if not names:
            raise ConfigError(f"{path}: contains no runs. Expected save directories, named by ids of 32 hex digits.")
    if group is None:
        return runs, names
    groups = {name: SavedRun(runs / name).groups for name in names}
    selected = [name for name in names if group in groups[name]]
    if not selected:
        existing = set().union(*groups.values())
        raise unknown("group", group, existing, "-e", list_command(runs, "--by group"))
    return runs, selected


def table(
    store: RunStore, exp_ids: Sequence[str], policy: QueryPolicy = LOOK, saved: RowCache | None = None
) -> list[Row]:
    """One row for each experiment, in the same order. Never raises: a damaged run is "unknown", with the reason.

    saved: cached rows of ended experiments.

    Runs that are done, or held by a live process on this machine, need no scheduler. Each scheduler is queried once for
    the rest. Interrupted submissions are reconciled first, unless another process is submitting.
    """
    start = time.monotonic()
    reconcile_messages = _reconcile(store.folder, policy)
    remaining = policy.seconds and max(min(0.5, policy.seconds), policy.seconds - (time.monotonic() - start))
    valid, marks = saved.read([exp_id for exp_id in exp_ids if exp_id not in reconcile_messages]) if saved else ({}, {})
    unread = [exp_id for exp_id in exp_ids if exp_id not in valid]
    settled_ids = {exp_id for exp_id in unread if _is_settled(store[exp_id])}
    requeueable = [exp_id for exp_id, (row, _) in valid.items() if row.job_id and row.state != "done"]
    jobs, error_messages = track(store, unread + requeueable, replace(policy, seconds=remaining), settled_ids)
    rows = {exp_id: row for exp_id, (row, _) in valid.items()}
    unread += [exp_id for exp_id in requeueable if exp_id in error_messages or jobs.get(exp_id) != valid[exp_id][1]]
    for exp_id in unread:
        job = jobs.get(exp_id)
        run = store[exp_id]
        row = rows[exp_id] = _row(store, run, job, error_messages.get(exp_id) or reconcile_messages.get(exp_id) or "")
        if (
            saved
            and not row.doubt
            and (row.state == "done" or (row.state in ("failed", "stopped") and not _has_parents(run)))
        ):
            saved.save(exp_id, marks, (row, job))
    return [rows[exp_id] for exp_id in exp_ids]


def _has_parents(run: SavedRun) -> bool:
    """Whether the reason of a failure can change with the state of another run."""
    try:
        return bool(parents.parent_ids(run.exp))
    except UserError:
        return True


_reconcile_results: dict[Path, tuple[float, dict[str, str]]] = {}
"""Folder of runs -> (when interrupted submissions were last reconciled, messages by unresolved experiment)."""


def _reconcile(runs: Path, policy: QueryPolicy) -> dict[str, str]:
    """A message for each unresolved experiment of interrupted submissions."""
    when, messages = _reconcile_results.get(runs, (float("-inf"), {}))
    if time.monotonic() - when <= policy.max_age_seconds:
        return messages
    messages = {}
    with contextlib.suppress(UserError):
        if submissions.interrupted_names(runs):
            with submissions.lock(runs, wait_seconds=0.0):
                unclear = submissions.reconcile(runs, policy.seconds)
                messages = {exp_id: submission.message for submission in unclear for exp_id in submission.experiments}
    _reconcile_results[runs] = time.monotonic(), messages
    return messages


def _is_settled(run: SavedRun) -> bool:
    """Whether no scheduler needs to be queried: the run is done, or a live process on this machine trains it."""
    with contextlib.suppress(UserError):
        state = run.status["state"]
        return state == "done" or (state == "running" and run.holder.is_dead is False)
    return False


def _row(store: RunStore, run: SavedRun, job: TrackedJob | None, doubt: str) -> Row:
    """The row of one experiment."""
    scheduler_state = job.seen if job else None
    if scheduler_state and scheduler_state.state == "unknown":
        doubt = scheduler_state.reason or f"the scheduler reports {scheduler_state.word}"
    try:
        state, reason = _resolve_state(run, job, doubt)
        seconds = _elapsed_seconds(run.status, state)
    except UserError as error:
        doubt = doubt or str(error)
        state, reason, seconds = "unknown", doubt, None
    exp, exp_error = _try_read(lambda: run.exp, {})
    with contextlib.suppress(PermissionError):  # of an unreadable directory
        exp_error = exp_error if (run.path / EXP_DICT).exists() else ""
    last, score_error = _try_read(lambda: run.last_row, {})
    if (
        state in ("failed", "stopped", "lost", "queued")
        and (parent := _failed_parents(store, exp))
        and parent not in reason
    ):
        reason = f"{reason}; {parent}" if reason else parent
    starts = _try_read(lambda: run.attempts, 0)[0]
    event, event_error = None, ""
    if state not in ("done", "never"):
        event, event_error = _try_read(lambda: events.latest_problem(run.path, starts), None)
    notes = [
        text for text in (reason, events.describe(event) if event else "", exp_error, score_error, event_error) if text
    ]
    loop = exp.get("loop")
    steps = loop.get("steps") if isinstance(loop, dict) else None
    return Row(
        run.name,
        run.groups[0] if run.groups else "",
        "unknown" if exp_error and state not in ("done", "queued", "running") else state,
        "; ".join(dict.fromkeys(notes)),
        (scheduler_state.node if scheduler_state else "") or (run.holder.host if state in ("running", "lost") else ""),
        scheduler_state.seconds if scheduler_state and scheduler_state.seconds is not None else seconds,
        starts,
        last.get("step"),
        steps if type(steps) is int else None,
        next((last[name] for name in ("train_loss", "loss") if isinstance(last.get(name), int | float)), None),
        run.holder.seconds,
        job.job_id if job else None,
        next((path for path in run.logs if os.path.exists(path)), None),
        doubt if state not in ("done", "running") or doubt in reason else "",
    )


def _resolve_state(run: SavedRun, job: TrackedJob | None, doubt: str = "") -> tuple[State, str]:
    """State and reason: "done" if the save directory says so; else the scheduler's state; else the directory's.

    doubt: why the scheduler could not be queried. Raises RunError if status.json is damaged.
    """
    local_state, holder = run.state, run.holder
    message = str(run.status.get("reason") or "")
    if local_state == "lost":
        message = holder.lost_contact or message
    if local_state == "done":
        return "done", ""
    if local_state == "running" and holder.is_dead is False:
        # A process on this machine trains it now, whatever the state of the job.
        return "running", ""
    beats = local_state == "running" and holder.seconds is not None and holder.seconds < lease.SILENT_SECONDS
    if doubt:
        # Use the state in the save directory, unless the job can have started or ended since without updating it.
        has_known_state = job is not None and (beats or local_state in ("failed", "stopped"))
        return (local_state if has_known_state else "unknown"), "; ".join(text for text in (message, doubt) if text)  # type: ignore[return-value]
    scheduler_state = job.seen if job else None
    if job is None or (scheduler_state is None and local_state in ("failed", "stopped")):
        return ("never" if local_state == "new" else local_state), message  # type: ignore[return-value]
    if scheduler_state is None:
        if beats:
            return "running", f"job {job.job_id} is unknown to the scheduler, but its heartbeat is recent"
        if local_state == "new":
            return "lost", f"submitted as job {job.job_id}, which the scheduler no longer knows"
        holder_problem = holder.lost_contact or "its process is gone"
        return "lost", f"job {job.job_id} is no longer known to the scheduler, and {holder_problem}"
    if scheduler_state.state == "completed":
        return (
            "failed",
            f"the scheduler reports {scheduler_state.word or 'COMPLETED'}, but the run is {local_state}, not done",
        )
    if scheduler_state.state in ("failed", "cancelled"):
        word = (
            scheduler_state.word
            if scheduler_state.word and scheduler_state.word.lower() not in (scheduler_state.state, "")
            else ""
        )
        reason = ": ".join(text for text in (word, scheduler_state.reason) if text)
        if local_state in ("failed", "stopped") and message and message not in reason:
            reason = f"{message} ({reason})" if reason else message
        return ("failed" if scheduler_state.state == "failed" else "stopped"), reason
    return scheduler_state.state, scheduler_state.reason


def _try_read(read: Callable[[], Any], default: Any) -> tuple[Any, str]:
    """`read()` and "", or `default` and the error."""
    try:
        return read(), ""
    except UserError as error:
        return default, str(error)


def _failed_parents(store: RunStore, exp: Mapping[str, Any]) -> str:
    """Message that names failed and lost parents; "" if there are no such parents."""
    failed = []
    for parent in parents.parent_ids(dict(exp)):
        with contextlib.suppress(UserError):
            if (state := store[parent].state) in ("failed", "lost"):
                failed.append(f"its parent {parent} {'has failed' if state == 'failed' else 'is lost'}")
    return ", ".join(failed)


def _elapsed_seconds(status: Mapping[str, Any], state: str) -> float | None:
    """Duration of the last attempt by its own clock; until now if it is running."""
    with contextlib.suppress(KeyError, TypeError, ValueError):
        start = datetime.fromisoformat(status["started"]).timestamp()
        end = time.time() if state == "running" else datetime.fromisoformat(status["updated"]).timestamp()
        return max(0.0, end - start)
    return None


def format_table(rows: Iterable[Row], differences: Mapping[str, str] | None = None) -> list[str]:
    """The rows as lines of a table, with a header and without empty columns.
    differences: distinguishing settings by id, shortened here. `to_dicts` has all of them."""
    distinctions = {exp_id: _shorten(text) for exp_id, text in (differences or {}).items()}
    head = ("id", "group", "state", "job", "node", "time", "starts", "step", "loss", "beat", "differs by", "reason")
    lines = [_cells(row, distinctions.get(row.exp_id, "")) for row in rows]
    is_filled = [any(column) for column in zip(*lines, strict=True)]
    return aligned_lines([list(itertools.compress(line, is_filled)) for line in (head, *lines)])


def to_dicts(rows: Iterable[Row], differences: Mapping[str, str]) -> list[dict[str, Any]]:
    """The rows as dicts with the fields of `Row`, and "differs": its distinguishing settings."""
    return [{**vars(row), "differs": differences.get(row.exp_id, "")} for row in rows]


def summarize(rows: Sequence[Row]) -> str:
    """ "12 experiments: 3 running, 9 done", in the order of `STATES`."""
    counts = {state: sum(row.state == state for row in rows) for state in STATES}
    return (
        f"{len(rows)} experiment{'s' * (len(rows) != 1)}: "
        f"{', '.join(f'{count} {state}' for state, count in counts.items() if count)}"
    )


def _cells(row: Row, difference: str) -> tuple[str, ...]:
    step = "" if row.step is None else f"{row.step}/{row.steps}" if row.steps else str(row.step)
    loss = "" if row.loss is None else f"{row.loss:#.4g}"
    reason = row.reason.replace("\n", " ")
    starts = str(row.attempts) if row.attempts else ""
    spent, beat = _format_duration(row.seconds), _format_duration(row.heartbeat_seconds)
    return (
        row.exp_id,
        row.group or "-",
        row.state,
        row.job_id or "",
        row.node,
        spent,
        starts,
        step,
        loss,
        beat,
        difference,
        reason,
    )


def _shorten(text: str) -> str:
    return text if len(text) <= _MAX_DIFFERENCE else f"{text[: _MAX_DIFFERENCE - 3]}..."


def _format_duration(seconds: float | None) -> str:
    if seconds is None:
        return ""
    if seconds < 60:
        return f"{seconds:.0f}s"
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes}m{rest:02d}s" if minutes < 60 else f"{minutes // 60}h{minutes % 60:02d}m"
