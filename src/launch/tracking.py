"""The jobs of experiments, and what their schedulers say of them: one query per scheduler for any number of jobs."""

import threading
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from src.errors import LaunchError, UserError
from src.launch import submissions
from src.launch.job import LauncherConfig, SchedulerState, ask
from src.runs.store import RunStore

ALIVE = ("queued", "running")


@dataclass(frozen=True)
class Question:
    """How a scheduler is asked."""

    seconds: float | None = None
    """How long to wait for its answer; None: as long as the launcher's config says."""
    max_age_seconds: float = 0.0
    """An answer that another question of this process got is used again until it is so old."""


ACT = Question()
"""For those who submit or kill: the truth, however long it takes."""
LOOK = Question(seconds=5.0)
"""For those who only look."""
REFRESH = Question(seconds=5.0, max_age_seconds=30.0)
"""For those who look again and again, such as a page with several readers."""


@dataclass(frozen=True)
class TrackedJob:
    """The job of one experiment."""

    job_id: str
    submission: str
    launcher: LauncherConfig | None
    seen: SchedulerState | None
    """None: the scheduler does not know it, or was not asked."""

    @property
    def is_alive(self) -> bool:
        """Whether it is queued or running."""
        return self.seen is not None and self.seen.state in ALIVE

    @property
    def is_unknown(self) -> bool:
        """Whether its scheduler answered that it cannot tell."""
        return self.seen is not None and self.seen.state == "unknown"


def track(
    store: RunStore, exp_ids: Sequence[str], question: Question = ACT, settled: Collection[str] = ()
) -> tuple[dict[str, TrackedJob], dict[str, str]]:
    """The jobs of these experiments and what went wrong, by experiment. All jobs of a scheduler are asked for at once.

    A job that its save directory does not name, such as a removed one, counts only while it is queued or running, or
    may be.

    settled: experiments whose state is known without a scheduler, which is not asked for their jobs. Of the others
    that have a job, what `store` has read is forgotten: an end that the scheduler knows of is not missed.
    """
    noted: dict[str, dict[str, str]] = {}
    wrong: dict[str, str] = {}
    for exp_id in exp_ids:
        try:
            if (job := store[exp_id].job) is not None:
                noted[exp_id] = job
        except UserError as error:
            wrong[exp_id] = str(error)
    elsewhere = submissions.last_jobs(
        store.folder, [exp_id for exp_id in exp_ids if exp_id not in noted and exp_id not in settled]
    )
    noted |= {exp_id: {"job_id": job_id, "submission": name} for exp_id, (job_id, name) in elsewhere.items()}
    open_ids = [exp_id for exp_id in noted if exp_id not in settled]
    launchers: dict[str, LauncherConfig | UserError] = {}
    known: dict[str, LauncherConfig] = {}
    for exp_id in open_ids:
        if not (name := noted[exp_id]["submission"]):
            continue
        if name not in launchers:
            try:
                launchers[name] = submissions.read(store.folder, name).load_launcher()
            except UserError as error:
                launchers[name] = error
        if isinstance(found := launchers[name], UserError):
            wrong[exp_id] = f"job {noted[exp_id]['job_id']}: {found}"
        else:
            known[exp_id] = found
    groups = group_by_scheduler((launcher, exp_id) for exp_id, launcher in known.items())
    asked = [(launcher, [noted[exp_id]["job_id"] for exp_id in ids]) for launcher, ids in groups]
    seen: dict[str, SchedulerState] = {}
    for (_, ids), answer in zip(groups, _ask_states(store.folder, asked, question), strict=True):
        for exp_id in ids:
            if isinstance(answer, LaunchError):
                wrong[exp_id] = str(answer)
            elif (state := answer.get(noted[exp_id]["job_id"])) is not None:
                seen[exp_id] = state
    for exp_id in open_ids:
        store.pop(exp_id, None)
    tracked = {
        exp_id: TrackedJob(job["job_id"], job["submission"], known.get(exp_id), seen.get(exp_id))
        for exp_id, job in noted.items()
    }
    tracked = {
        exp_id: job for exp_id, job in tracked.items() if exp_id not in elsewhere or job.is_alive or job.is_unknown
    }
    return tracked, {
        exp_id: text for exp_id, text in wrong.items() if exp_id not in tracked or not tracked[exp_id].is_alive
    }


def same_scheduler(one: LauncherConfig, other: LauncherConfig) -> bool:
    """Whether jobs of the two launchers can be listed, killed and waited for together."""
    return (one.name, one.scheduler()) == (other.name, other.scheduler())


def group_by_scheduler(pairs: Iterable[tuple[LauncherConfig, str]]) -> list[tuple[LauncherConfig, list[str]]]:
    """For each scheduler a launcher, and all ids that come with launchers of that scheduler."""
    groups: dict[Any, tuple[LauncherConfig, list[str]]] = {}
    for launcher, name in pairs:
        groups.setdefault((launcher.name, launcher.scheduler()), (launcher, []))[1].append(name)
    return list(groups.values())


Answer = dict[str, SchedulerState] | LaunchError
"""The states of the jobs that a scheduler knows, or why it did not say."""


class _Memory:
    """The last answer of each scheduler, for all threads of this process.
    One of them asks, the others wait for its answer."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.answers: dict[Any, tuple[float, frozenset[str], Answer]] = {}

    def find(self, key: Any, job_ids: Sequence[str], max_age_seconds: float) -> Answer | None:
        """An answer about all of `job_ids` that is young enough."""
        when, asked, answer = self.answers.get(key, (float("-inf"), frozenset(), {}))
        return answer if time.monotonic() - when <= max_age_seconds and asked.issuperset(job_ids) else None


_memory = _Memory()


def _ask_states(runs: Path, asked: Sequence[tuple[LauncherConfig, list[str]]], question: Question) -> list[Answer]:
    """What each launcher says of its jobs."""
    if question.max_age_seconds <= 0:
        return ask(
            [lambda launcher=launcher, ids=ids: launcher.states(ids) for launcher, ids in asked], question.seconds
        )
    with _memory.lock:
        keys = [(runs.resolve(), launcher.name, launcher.scheduler()) for launcher, _ in asked]
        found = [_memory.find(key, ids, question.max_age_seconds) for key, (_, ids) in zip(keys, asked, strict=True)]
        due = [place for place, answer in enumerate(found) if answer is None]
        fresh = _ask_states(runs, [asked[place] for place in due], Question(question.seconds))
        for place, answer in zip(due, fresh, strict=True):
            found[place] = answer
            _memory.answers[keys[place]] = time.monotonic(), frozenset(asked[place][1]), answer
        return [answer for answer in found if answer is not None]
