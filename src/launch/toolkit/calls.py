"""Calls of a service that fails now and then: nothing is done twice, and a failed call is never taken for a failed job."""

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TypeVar

from src.errors import LaunchError
from src.launch.job import Seen
from src.launch.toolkit.service import EXPERIMENT, SUBMISSION, Doubtful, JobConfig, Listed, Service, Spec, Taken, Unreached

PAGE = 1000
"""Jobs of one listing, at least."""
_WAITING = {"QUEUING", "QUEUED", "PENDING"}
_INTERRUPTED = {"INTERRUPTED", "PREEMPTED"}
_STATES = {"RUNNING": "running", "CANCELLING": "running", "SUCCEEDED": "completed", "FAILED": "failed", "CANCELLED": "cancelled"}
T = TypeVar("T")
log = logging.getLogger(__name__)


def create(config: JobConfig, service: Service, spec: Spec) -> str:
    """Queue one job, once: whatever a call may have done is looked up by its name before anything is tried again.

    The service takes no name twice, so that even a request that arrives late cannot queue a second job.
    """
    pauses, name, doubt = _pauses(config), spec.name, False
    while True:
        try:
            return service.create(spec)
        except Unreached as error:
            failed: LaunchError = error
        except LaunchError as error:
            failed, known = error, _known(config, service, spec, error)
            over = known is not None and ended(seen(config, known))
            if known and (doubt or isinstance(error, Doubtful) or not over):
                return known.job_id
            if known and isinstance(error, Taken):  # of an earlier call for this submission; its name can never be used again
                number = int(spec.name.removeprefix(name).strip("_") or 1) + 1
                spec = replace(spec, name=f"{name}_{number}")
                continue
            if not isinstance(error, Doubtful | Taken):
                raise
            doubt = True
        pause = next(pauses, None)
        if pause is None:
            raise Doubtful(str(failed)) if doubt else failed
        log.warning("%s Trying again in %g seconds.", failed, pause)
        time.sleep(pause)


def _known(config: JobConfig, service: Service, spec: Spec, failed: LaunchError) -> Listed | None:
    """The job called `spec.name`, if there is one.

    Raises:
        LaunchError: it could not be looked up, or belongs to something else.
    """
    try:
        listed = patiently(config, lambda: service.listed(PAGE, name=spec.name))
    except LaunchError as error:
        raise Doubtful(f"{failed} Whether it is queued as {spec.name} could not be asked: {error}") from None
    job = next((job for job in listed if job.name == spec.name), None)
    if job and any(job.tags.get(tag) != spec.tags[tag] for tag in (SUBMISSION, EXPERIMENT)):
        raise LaunchError(f"toolkit: the name {spec.name} belongs to job {job.job_id}, which this submission has not queued.")
    return job


def seen(config: JobConfig, job: Listed) -> Seen:
    """The state that the toolkit's word stands for. A word that is not known is "unknown", never a failure."""
    if job.word in _WAITING or (job.word in _INTERRUPTED and config.restartable):
        state = "queued"
    else:
        state = "failed" if job.word in _INTERRUPTED else _STATES.get(job.word, "unknown")
    reason = f"exit code {job.exit_code}" if state == "failed" and job.exit_code is not None else ""
    return Seen(state, job.word, reason, job.node, job.seconds, job.runs - 1)  # type: ignore[arg-type]


def ended(seen: Seen) -> bool:
    return seen.state in ("completed", "failed", "cancelled")


def _pauses(config: JobConfig) -> Iterator[float]:
    return (min(60.0, config.backoff_seconds * 2**i) for i in range(config.retries))


def patiently(config: JobConfig, call: Callable[[], T]) -> T:
    """A call that may be made twice, made until it is answered.

    Raises:
        LaunchError: refused, or still not answered after the last try.
    """
    pauses = _pauses(config)
    while True:
        try:
            return call()
        except (Unreached, Doubtful) as error:
            pause = next(pauses, None)
            if pause is None:
                raise
            log.warning("%s Trying again in %g seconds.", error, pause)
        time.sleep(pause)
