"""Run each experiment as one job of the toolkit, through haven."""

import contextlib
import re
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from src.errors import LaunchError, UserError
from src.files import write_atomic, write_json, writing
from src.launch.job import Job, Note, SchedulerState
from src.launch.toolkit.client import Client, create, find_packages
from src.launch.toolkit.script import GAVE_UP, parents_to_await, render_script
from src.launch.toolkit.service import (
    PAGE,
    JobConfig,
    ListedJob,
    NameTaken,
    OutcomeUnknown,
    Spec,
    call_with_retries,
    has_ended,
    scheduler_state,
)

LEFTOVERS = "left.json"
"""In the submission's folder: jobs that can still be queued after a failed submission that could not be undone."""


class Config(JobConfig):
    """`JobConfig` with the methods of a launcher."""

    def submit(self, jobs: Sequence[Job], folder: Path, note: Note) -> list[str]:
        """Queue each job under the name hv_<exp id>_<submission>.
        A second call with the same folder queues nothing twice.

        A child is queued at once and waits inside its job (see script.py), as the toolkit has no dependencies.

        Raises:
            LaunchError: the service refuses or does not answer. If the cancellation of other jobs could not be
                confirmed, <folder>/left.json names them.
        """
        folder = folder.absolute()
        accounts = {config.account: config for config in (self.settings_of(job) for job in jobs)}
        clients = {account: config._client() for account, config in accounts.items()}
        specs = [self._write_spec(job, jobs, folder) for job in jobs]
        job_ids: dict[str, str] = {}
        stop, lock = threading.Event(), threading.Lock()

        def queue(job: Job, spec: Spec) -> None:
            if stop.is_set():
                return
            try:
                job_id = create(config := self.settings_of(job), clients[config.account], spec)
                with lock:
                    job_ids[job.exp_id] = job_id
                    note({job.exp_id: job_id})
            except BaseException:
                stop.set()
                raise

        with ThreadPoolExecutor(self.max_parallel_calls) as pool:
            futures = [pool.submit(queue, job, spec) for job, spec in zip(jobs, specs, strict=True)]
            try:
                for future in futures:
                    future.result()
            except BaseException as error:
                stop.set()
                pool.shutdown(wait=True, cancel_futures=True)
                if not isinstance(error, UserError):
                    raise
                ends = [future.exception() for future in futures if not future.cancelled()]
                in_doubt = bool(job_ids) or any(isinstance(end, OutcomeUnknown | NameTaken) for end in ends)
                raise type(error)(
                    f"{error}{self._undo(specs, folder, job_ids) if in_doubt else ' Nothing was queued.'}"
                ) from error
        return [job_ids[job.exp_id] for job in jobs]

    def states(self, job_ids: Sequence[str]) -> dict[str, SchedulerState]:
        """Uses one call for all jobs in the toolkit's list, and one for each other job.
        If only the latter fails, the job is "unknown"."""
        requested_ids = list(dict.fromkeys(job_ids))
        if not requested_ids:
            return {}
        client = self._client()
        listed_jobs = {
            job.job_id: job
            for job in call_with_retries(self, lambda: client.list_jobs(max(PAGE, 2 * len(requested_ids))))
        }
        seen = {name: self._state(listed_jobs[name]) for name in requested_ids if name in listed_jobs}
        down = threading.Event()

        def ask(name: str) -> SchedulerState | None:
            if down.is_set():
                return SchedulerState("unknown", reason="the toolkit does not answer")
            try:
                job = call_with_retries(self, lambda: client.get(name))
            except LaunchError as error:
                down.set()
                return SchedulerState("unknown", reason=str(error))
            return job and self._state(job)

        absent = [name for name in requested_ids if name not in listed_jobs]  # older than the list, or gone
        with ThreadPoolExecutor(self.max_parallel_calls) as pool:
            answers = dict(zip(absent, pool.map(ask, absent), strict=True))
        return seen | {name: answer for name, answer in answers.items() if answer}

    def kill(self, job_ids: Sequence[str]) -> None:
        """End the jobs and wait until they have ended.
        Raises LaunchError with the ids of those not known to have ended."""
        requested_ids = list(dict.fromkeys(job_ids))
        if not requested_ids:
            return
        client, refusals = self._client(), {}

        def end(name: str) -> None:
            try:
                call_with_retries(self, lambda: client.cancel(name))
            except LaunchError as error:  # the states show whether it matters
                refusals[name] = str(error)

        with ThreadPoolExecutor(self.max_parallel_calls) as pool:
            list(pool.map(end, requested_ids))
        deadline = time.monotonic() + self.kill_seconds
        remaining, reason = requested_ids, ""
        while remaining:
            try:
                states = self.states(remaining)
                remaining = [name for name in remaining if name in states and not has_ended(states[name])]
                words = ", ".join(sorted({states[name].word or states[name].state for name in remaining}))
                reason = f"Their last known state: {words}."
            except LaunchError as error:
                reason = str(error)
            if remaining and time.monotonic() >= deadline:
                reasons = dict.fromkeys([refusals[name] for name in remaining if name in refusals] or [reason])
                raise LaunchError(
                    f"toolkit: {len(remaining)} of {len(requested_ids)} killed jobs are not known to have ended after "
                    f"{self.kill_seconds:g} s: {', '.join(remaining)}. {' '.join(reasons)} "
                    "Check them with --job_option status, then kill them again."
                )
            if remaining:
                time.sleep(min(2.0, self.kill_seconds / 20))

    def find(self, folder: Path, exp_ids: Sequence[str]) -> dict[str, str]:
        """The live job of each experiment, else its last one.
        Misses jobs that are older than the toolkit's list (a day)."""
        client = self._client()
        listed_jobs = call_with_retries(self, lambda: client.list_jobs(max(PAGE, 4 * len(exp_ids))))
        job_by_experiment: dict[str, ListedJob] = {}
        for job in sorted(
            listed_jobs, key=lambda job: (not has_ended(scheduler_state(self, job)), len(job.name), job.name)
        ):
            if job.exp_id in exp_ids and job.submission == folder.name:
                job_by_experiment[job.exp_id] = job
        return {exp_id: job.job_id for exp_id, job in job_by_experiment.items()}

    def check(self) -> None:
        """Raise LaunchError if haven or its client is missing, or the account's variable is not set."""
        self.account_id()
        find_packages()

    def scheduler(self) -> tuple[str, bool]:
        return self.account, self.restartable

    def _state(self, job: ListedJob) -> SchedulerState:
        """The state of a job. If its queue was stopped before it started, the reason comes from its script."""
        seen = scheduler_state(self, job)
        if seen.state == "failed" and self.submissions and re.fullmatch(r"[\w-]+", job.submission):
            with contextlib.suppress(OSError):
                if (
                    why := Path(self.submissions, job.submission, f"{job.exp_id}.sh{GAVE_UP}")
                    .read_text(errors="replace")
                    .strip()
                ):
                    return replace(seen, state="cancelled", word="CANCELLED", reason=why)
        return seen

    def _client(self) -> Client:
        return call_with_retries(self, lambda: Client(self))

    def _write_spec(self, job: Job, jobs: Sequence[Job], folder: Path) -> Spec:
        """Write the script of `job` and return the specification to queue."""
        config = self.settings_of(job)
        config._check_mounts(job, folder)
        path = folder / f"{job.exp_id}.sh"
        text = render_script(job, parents_to_await(job, [other.exp_id for other in jobs]), config)
        with writing(path):
            job.log_dir.mkdir(parents=True, exist_ok=True)
        write_atomic(path, text, private=True)
        name = re.sub(r"[^a-z0-9_]", "_", f"hv_{job.exp_id}_{folder.name}".lower())
        return Spec(name, ("/bin/bash", str(path)), job.cwd, folder.name, job.exp_id, config)

    def _check_mounts(self, job: Job, folder: Path) -> None:
        """Refuse paths outside the mounts: files that a job writes there are lost, and files there cannot be read."""
        mounts = self.mounts()
        for path, is_written in ((job.run, True), (job.log_dir, True), (job.cwd, False), (folder, False)):
            if not any(
                path.is_relative_to(mount) and (writable or not is_written) for mount, writable in mounts.items()
            ):
                mount_list = ", ".join(self.data) or "none"
                verb = "writes to" if is_written else "reads"
                raise LaunchError(
                    f"toolkit: a job {verb} {path}, "
                    f"which is below no {'writable ' * is_written}mount of `data` ({mount_list}). Add one."
                )

    def _undo(self, specs: Sequence[Spec], folder: Path, job_ids: dict[str, str]) -> str:
        """Cancel the queued jobs; return the end of the error message, which says whether that was confirmed."""
        names = {spec.exp_id: spec.name for spec in specs}
        try:
            job_ids |= self.find(folder, list(names))
            self.kill(list(job_ids.values()))
        except LaunchError as error:
            write_json(folder / LEFTOVERS, {"names": names, "job_ids": job_ids})
            return f"\nCancelling the jobs queued before failed; {folder / LEFTOVERS} names them: {error}"
        return f" The {len(job_ids)} jobs queued before were cancelled." if job_ids else " Nothing was queued."
