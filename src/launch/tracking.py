"""The jobs of experiments and their states: one query per scheduler for any number of jobs."""

import threading
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from src.errors import LaunchError, UserError
from src.launch import submissions
from src.launch.job import LauncherConfig, SchedulerState, query_schedulers
from src.runs.store import RunStore

ALIVE = ("queued", "running")


@dataclass(frozen=True)
class QueryPolicy:
    """How to query a scheduler."""

    seconds: float | None = None
    """How long to wait for its answer; None: as long as the launcher's config says."""
    max_age_seconds: float = 0.0
    """Maximum age of a cached answer of this process."""


ACT = QueryPolicy()
"""Submit and kill: always query, no timeout."""
LOOK = QueryPolicy(seconds=5.0)
"""One look at the status: short timeout."""
REFRESH = QueryPolicy(seconds=5.0, max_age_seconds=30.0)
"""Repeated looks, such as a page with several readers: short timeout, cached answers."""


@dataclass(frozen=True)
class TrackedJob:
    """The job of one experiment."""

    job_id: str
    submission: str
    launcher: LauncherConfig | None
    seen: SchedulerState | None
    """None: the scheduler does not know it, or was not queried."""

    @property
    def is_alive(self) -> bool:
        """Whether it is queued or running."""
        return self.seen is not None and self.seen.state in ALIVE

    @property
    def is_unknown(self) -> bool:
        """Whether its scheduler reports an unknown state."""
        return self.seen is not None and self.seen.state == "unknown"


def track(
    store: RunStore, exp_ids: Sequence[str], policy: QueryPolicy = ACT, settled_ids: Collection[str] = ()
) -> tuple[dict[str, TrackedJob], dict[str, str]]:
    """The jobs and the error messages of these experiments, by experiment. Each scheduler is queried once.

    A job that is not recorded in its save directory, for example because that was removed, counts only while it is or
    can be queued or running.

    settled_ids: experiments with a state that is known without a scheduler. The remaining experiments with a job are
    dropped from the cache `store`, so that they are read again after the query.
    """
    noted_jobs: dict[str, dict[str, str]] = {}
    messages: dict[str, str] = {}
    for exp_id in exp_ids:
        try:
            if (job := store[exp_id].job) is not None:
                noted_jobs[exp_id] = job
        except UserError as error:
            messages[exp_id] = str(error)
    elsewhere = submissions.last_jobs(
        store.folder, [exp_id for exp_id in exp_ids if exp_id not in noted_jobs and exp_id not in settled_ids]
    )
    noted_jobs |= {exp_id: {"job_id": job_id, "submission": name} for exp_id, (job_id, name) in elsewhere.items()}
    open_ids = [exp_id for exp_id in noted_jobs if exp_id not in settled_ids]
    launchers: dict[str, LauncherConfig | UserError] = {}
    launcher_by_experiment: dict[str, LauncherConfig] = {}
    for exp_id in open_ids:
        if not (name := noted_jobs[exp_id]["submission"]):
            continue
        if name not in launchers:
            try:
                launchers[name] = submissions.read(store.folder, name).load_launcher()
            except UserError as error:
                launchers[name] = error
        if isinstance(launcher_or_error := launchers[name], UserError):
            messages[exp_id] = f"job {noted_jobs[exp_id]['job_id']}: {launcher_or_error}"
        else:
            launcher_by_experiment[exp_id] = launcher_or_error
    groups = group_by_scheduler((launcher, exp_id) for exp_id, launcher in launcher_by_experiment.items())
    queries = [(launcher, [noted_jobs[exp_id]["job_id"] for exp_id in ids]) for launcher, ids in groups]
    seen: dict[str, SchedulerState] = {}
    for (_, ids), answer in zip(groups, _query_states(store.folder, queries, policy), strict=True):
        for exp_id in ids:
            if isinstance(answer, LaunchError):
                messages[exp_id] = str(answer)
            elif (state := answer.get(noted_jobs[exp_id]["job_id"])) is not None:
                seen[exp_id] = state
    for exp_id in open_ids:
        store.pop(exp_id, None)
    tracked_jobs = {
        exp_id: TrackedJob(job["job_id"], job["submission"], launcher_by_experiment.get(exp_id), seen.get(exp_id))
        for exp_id, job in noted_jobs.items()
    }
    tracked_jobs = {
        exp_id: job for exp_id, job in tracked_jobs.items() if exp_id not in elsewhere or job.is_alive or job.is_unknown
    }
    return tracked_jobs, {
        exp_id: text
        for exp_id, text in messages.items()
        if exp_id not in tracked_jobs or not tracked_jobs[exp_id].is_alive
    }


def same_scheduler(first: LauncherConfig, second: LauncherConfig) -> bool:
    """Whether two launchers use the same scheduler, so that their jobs can be listed, killed and awaited together."""
    return (first.name, first.scheduler()) == (second.name, second.scheduler())


def group_by_scheduler(pairs: Iterable[tuple[LauncherConfig, str]]) -> list[tuple[LauncherConfig, list[str]]]:
    """(a launcher, all ids with launchers of the same scheduler) for each scheduler."""
    groups: dict[Any, tuple[LauncherConfig, list[str]]] = {}
    for launcher, name in pairs:
        groups.setdefault((launcher.name, launcher.scheduler()), (launcher, []))[1].append(name)
    return list(groups.values())


Answer = dict[str, SchedulerState] | LaunchError
"""The states of the jobs that a scheduler knows, or its error."""


class _Memory:
    """The last answer of each scheduler, for all threads of this process.
    One thread queries, and the rest wait for its answer."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.answers: dict[Any, tuple[float, frozenset[str], Answer]] = {}

    def find(self, key: Any, job_ids: Sequence[str], max_age_seconds: float) -> Answer | None:
        """A cached answer about all of `job_ids` that is recent enough, or None."""
        when, asked_ids, answer = self.answers.get(key, (float("-inf"), frozenset(), {}))
        return answer if time.monotonic() - when <= max_age_seconds and asked_ids.issuperset(job_ids) else None


_memory = _Memory()


def _query_states(runs: Path, queries: Sequence[tuple[LauncherConfig, list[str]]], policy: QueryPolicy) -> list[Answer]:
    """The answer of each launcher about its jobs."""
    if policy.max_age_seconds <= 0:
        return query_schedulers(
            [lambda launcher=launcher, ids=ids: launcher.states(ids) for launcher, ids in queries], policy.seconds
        )
    with _memory.lock:
        keys = [(runs.resolve(), launcher.name, launcher.scheduler()) for launcher, _ in queries]
        answers = [_memory.find(key, ids, policy.max_age_seconds) for key, (_, ids) in zip(keys, queries, strict=True)]
        due = [place for place, answer in enumerate(answers) if answer is None]
        fresh = _query_states(runs, [queries[place] for place in due], QueryPolicy(policy.seconds))
        for place, answer in zip(due, fresh, strict=True):
            answers[place] = answer
            _memory.answers[keys[place]] = time.monotonic(), frozenset(queries[place][1]), answer
        return [answer for answer in answers if answer is not None]
