"""Run, retry, kill and reset jobs of experiments. Every action is idempotent."""

import contextlib
import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from src import files
from src.errors import LaunchError, RunError
from src.experiments import registry
from src.launch import snapshot, status, submissions, tracking
from src.launch.job import QUEUE_STOPPED, Job, LauncherConfig
from src.launch.resources import Resources
from src.launch.status import Row
from src.launch.tracking import ACT, ALIVE, track
from src.runs import run_dir
from src.runs.parents import parent_ids
from src.runs.plan import PlannedExperiment
from src.runs.store import LOGS, RunStore, SavedRun

SNAPSHOTS = "snapshots"
GONE_SECONDS = 120.0
"""How long to wait until killed jobs are gone."""
_POLL_SECONDS = 0.5
_SUBMITTED_STATES = {"run": ("never", "stopped", "lost"), "retry": ("failed", "lost"), "reset": status.STATES}
_HINTS = {
    "failed": "run skips it. --job_option retry resumes it, -r 1 starts it over",
    "stopped": "it is stopped, not failed: run restarts it, and so does a retry of its parents (--with-parents)",
    "done": "it is done",
    "queued": "it is queued already",
    "running": "it is running already",
    "unknown": "its state is unknown, so nothing is submitted",
}

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Request:
    """The request of a command line."""

    runs: Path
    experiments: Sequence[PlannedExperiment]
    """Parents before children."""
    selected_ids: Collection[str]
    """The ids that the command line selects; the rest are parents that were added."""
    root: Path
    """The folder that holds trainval.py."""
    command: Callable[[str], Sequence[str]]
    """exp_id -> trainval.py and its arguments, without a reset: a job can restart, and then resumes."""
    python_binary: str | None = None
    reset: int = 0
    leave_out: Sequence[Path] = ()
    """Folders that are not part of the code."""


def pending_parents(runs: Path, items: Sequence[PlannedExperiment]) -> set[str]:
    """Parents of `items` that are queued or running as jobs, so that a job can wait for them."""
    own_ids = {item.exp_id for item in items}
    parents = [parent for item in items for parent in parent_ids(item.exp) if parent not in own_ids]
    jobs = track(RunStore(runs), list(dict.fromkeys(parents)))[0] if parents else {}
    return {exp_id for exp_id, job in jobs.items() if job.is_alive}


def run(request: Request, target: Resources, option: str = "run") -> dict[str, str]:
    """Submit by `option`: "run" never started, stopped or lost experiments; "retry" failed or lost experiments, and
    those skipped by a queue that failures stopped; "reset" all of them from the start.

    Queued and running jobs are skipped, except that "reset" kills them first, or fails if the state of one is unknown.
    Returns the job ids by experiment when the jobs are queued, or have ended if the launcher waits for them.

    Raises:
        LaunchError: the launcher refuses; a parent has failed, or is a job of another launcher; jobs do not end.
    """
    with submissions.lock(request.runs):
        submissions.refuse(submissions.reconcile(request.runs), [item.exp_id for item in request.experiments])
        if option == "reset":
            _kill(
                request.runs,
                [item.exp_id for item in request.experiments if item.exp_id in request.selected_ids],
                all_or_none=True,
            )
        store = RunStore(request.runs)
        rows = {row.exp_id: row for row in status.table(store, [item.exp_id for item in request.experiments], ACT)}
        todo = _choose(request, rows, option)
        if not todo:
            log.info("nothing to submit")
            return {}
        new = [run for item in todo if not (run := store[item.exp_id]).path.exists()]
        jobs = _build_jobs(request, target, store, rows, todo, option)
        ids = _submit(request, target, jobs, new)
    target.launcher.wait_for(list(ids.values()))
    return ids


def _choose(request: Request, rows: Mapping[str, Row], option: str) -> list[PlannedExperiment]:
    """The experiments to submit. A retry adds children that were not started, or stopped, as their parent failed."""
    todo: dict[str, PlannedExperiment] = {}
    for item in request.experiments:
        row = rows[item.exp_id]
        is_orphan = option == "retry" and row.state in ("never", "stopped") and not row.doubt
        if (is_orphan and not todo.keys().isdisjoint(parent_ids(item.exp))) or _needs_job(request, row, option):
            todo[item.exp_id] = item
    return list(todo.values())


def _needs_job(request: Request, row: Row, option: str) -> bool:
    """Whether to submit a job for this row; logs the reason if not."""
    is_retry = row.state in _SUBMITTED_STATES["retry"] or (row.state == "stopped" and QUEUE_STOPPED in row.reason)
    starts_over = row.exp_id in request.selected_ids and (request.reset or option == "reset")
    if row.doubt:
        log.info("%s: %s (%s)", row.exp_id, _HINTS["unknown"], row.reason)
        return False
    if starts_over and row.state not in (*ALIVE, "unknown"):
        return option != "retry" or is_retry
    states = _SUBMITTED_STATES["run"] if option == "reset" else _SUBMITTED_STATES[option]
    if row.state in states or (option == "retry" and is_retry):
        return True
    hint = _HINTS.get(row.state, f"it is {row.state}, not failed")
    log.info(
        "%s: %s%s",
        row.exp_id,
        hint,
        f" ({row.reason})" if row.reason and row.state in ("failed", "stopped", "unknown") else "",
    )
    return False


def _build_jobs(
    request: Request,
    target: Resources,
    store: RunStore,
    rows: Mapping[str, Row],
    todo: Sequence[PlannedExperiment],
    option: str,
) -> list[Job]:
    """Prepare the save directories of `todo` and return their jobs. Nothing is queued yet."""
    after_jobs = _jobs_to_await(target, store, rows, todo)
    overrides = {item.exp_id: target.config_for(item.exp) for item in todo}
    code = snapshot.take(request.root, request.runs.resolve() / SNAPSHOTS, (request.runs, *request.leave_out))
    runs = request.runs.resolve()
    with files.defer_sync(runs):
        for item in todo:
            run = store[item.exp_id]
            if item.exp_id in request.selected_ids and (request.reset or option == "reset") and run.path.exists():
                run_dir.start_over(run.path)
            run.write_exp(item.exp, item.groups)
    return [
        Job(
            item.exp_id,
            tuple(request.command(item.exp_id)),
            code,
            runs / item.exp_id,
            runs / LOGS,
            request.python_binary,
            tuple(parent_ids(item.exp)),
            after_jobs[item.exp_id],
            overrides[item.exp_id],
        )
        for item in todo
    ]


def _jobs_to_await(
    target: Resources, store: RunStore, rows: Mapping[str, Row], todo: Sequence[PlannedExperiment]
) -> dict[str, tuple[str, ...]]:
    """Job ids from earlier submissions that each experiment must wait for.

    Raises:
        LaunchError: a parent is neither done nor queued nor running, or is a job of another launcher.
    """
    own_ids = {item.exp_id for item in todo}
    outside = list(dict.fromkeys(p for item in todo for p in parent_ids(item.exp) if p not in own_ids))
    outside_rows = status.table(store, [parent for parent in outside if parent not in rows], ACT)
    rows = {**rows, **{row.exp_id: row for row in outside_rows}}
    jobs = track(store, [parent for parent in outside if rows[parent].state in ALIVE])[0]
    waits_by_id, messages = {}, []
    for item in todo:
        waits = []
        for parent in parent_ids(item.exp):
            if parent in own_ids or rows[parent].state == "done":
                continue
            row, job = rows[parent], jobs.get(parent)
            if row.state in ALIVE and job and job.launcher and job.is_alive:
                if tracking.same_scheduler(job.launcher, target.launcher):
                    waits.append(job.job_id)
                else:
                    messages.append(
                        f"{item.where}: it starts from experiment {parent}, which is {row.state} as job {row.job_id} "
                        f"of the launcher {job.launcher.name}; {target.launcher.name} cannot wait for that. "
                        "Submit it when the parent is done, or use that launcher."
                    )
            else:
                reason = f" ({row.reason})" if row.reason else ""
                advice = "Repair it first: --job_option retry" if row.state == "failed" else "Run it first"
                messages.append(
                    f"{item.where}: it starts from experiment {parent}, which is {row.state}, not done{reason}. "
                    f"{advice}."
                )
        waits_by_id[item.exp_id] = tuple(waits)
    if messages:
        raise LaunchError("\n".join(dict.fromkeys(messages)))
    return waits_by_id


def _submit(request: Request, target: Resources, jobs: Sequence[Job], new: Sequence[SavedRun]) -> dict[str, str]:
    """Record the submission, submit the jobs, record their ids, and return them by experiment.
    new: save directories to remove again if the jobs are refused."""
    resolved = registry.resolved_dict(target.launcher, key="launcher")
    commands = {job.exp_id: job.args for job in jobs}
    submission = submissions.create(request.runs, resolved, target.name, jobs[0].cwd.name, commands)
    try:
        ids = target.launcher.submit(jobs, submission.folder, lambda new_ids: submissions.note(submission, new_ids))
    except (LaunchError, RunError):
        # A launcher that refuses leaves nothing queued. If it did, reconciling finds it.
        with contextlib.suppress(LaunchError, RunError):
            if submission.name not in [each.folder.name for each in submissions.reconcile(request.runs)]:
                for run in new:
                    run.remove_unused()
        raise
    job_ids = {job.exp_id: job_id for job, job_id in zip(jobs, ids, strict=True)}
    submissions.note(submission, job_ids, complete=True)
    log.info("submitted as %s: %d", submission.name, len(ids))
    return job_ids


def kill(runs: Path, exp_ids: Sequence[str]) -> dict[str, str]:
    """Kill the queued and running jobs of these experiments, and return their ids by experiment when they are gone.

    Raises:
        LaunchError: a scheduler does not answer or refuses, or jobs do not end.
    """
    with submissions.lock(runs):
        unclear = submissions.reconcile(runs)
        killed_jobs = _kill(runs, exp_ids)
        submissions.refuse(unclear, exp_ids)
    return killed_jobs


def throttle(runs: Path, exp_ids: Sequence[str], max_running: int) -> dict[str, str]:
    """Change how many of the queued jobs of these experiments, and of those submitted with them, run at a time.
    Returns the ids of the queued jobs by experiment.

    Raises:
        LaunchError: no job is queued, the launcher cannot do this, or a scheduler does not answer or refuses.
    """
    jobs, messages = track(RunStore(runs), exp_ids)
    queued_jobs = [
        (job.launcher, job.job_id) for job in jobs.values() if job.launcher and job.seen and job.seen.state == "queued"
    ]
    if not queued_jobs:
        raise LaunchError(
            "\n".join(dict.fromkeys(messages.values()))
            or "--job_option throttle: none of these experiments is queued. Check them with --job_option status."
        )
    for launcher, job_ids in tracking.group_by_scheduler(queued_jobs):
        launcher.throttle(job_ids, max_running)
    log.info(
        "throttled: %d queued, %s at a time",
        len(queued_jobs),
        f"at most {max_running}" if max_running else "any number",
    )
    return {exp_id: job.job_id for exp_id, job in jobs.items() if job.seen and job.seen.state == "queued"}


def _kill(runs: Path, exp_ids: Sequence[str], all_or_none: bool = False) -> dict[str, str]:
    """Kill all jobs with a known state, then raise for the rest. all_or_none: raise before killing any."""
    store = RunStore(runs)
    jobs, messages = track(store, exp_ids)
    alive = {exp_id: job for exp_id, job in jobs.items() if job.is_alive}
    for exp_id in exp_ids:
        job = jobs.get(exp_id)
        if exp_id in alive or exp_id in messages:
            continue
        state = store[exp_id].state_or_damage
        if job and job.seen and job.is_unknown and state != "done":
            messages[exp_id] = (
                f"{exp_id}: the state of job {job.job_id} is unknown, so it is not killed: {job.seen.reason}"
            )
        else:
            by_hand = "runs, but not as a job: stop it where it was started"
            log.info("%s: %s", exp_id, by_hand if state == "running" else "has no job to kill")
    if messages and all_or_none:
        raise LaunchError(
            "\n".join([*dict.fromkeys(messages.values()), "Nothing was killed or started over. Try again later."])
        )
    launchers = tracking.group_by_scheduler((job.launcher, job.job_id) for job in alive.values() if job.launcher)
    for launcher, ids in launchers:
        launcher.kill(ids)
    if alive:
        _wait_until_gone(launchers)
        log.info("killed: %d", len(alive))
    if messages:
        raise LaunchError("\n".join([*dict.fromkeys(messages.values()), "Try again later."]))
    return {exp_id: job.job_id for exp_id, job in alive.items()}


def _wait_until_gone(launchers: Sequence[tuple[LauncherConfig, list[str]]]) -> None:
    until = time.monotonic() + GONE_SECONDS
    while True:
        remaining: list[str] = []
        scheduler_error = ""
        for launcher, ids in launchers:
            try:
                states = launcher.states(ids)
                remaining += [job_id for job_id in ids if job_id in states and states[job_id].state in ALIVE]
            except LaunchError as error:
                remaining += ids
                scheduler_error = f" {error}"
        if not remaining:
            return
        if time.monotonic() > until:
            message = f"{', '.join(remaining)}: still running {GONE_SECONDS:g} s after the kill."
            raise LaunchError(f"{message} Check again later with --job_option status.{scheduler_error}")
        time.sleep(_POLL_SECONDS)
