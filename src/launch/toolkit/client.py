"""Client for jobs of the toolkit, through haven and its closed-source client `eai_toolkit_client`."""

import logging
import os
import re
import shlex
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

from src.errors import LaunchError
from src.launch.toolkit.service import (
    PAGE,
    JobConfig,
    ListedJob,
    NameTaken,
    OutcomeUnknown,
    ServiceUnreachable,
    Spec,
    call_with_retries,
    has_ended,
    pauses,
    scheduler_state,
)

_HOST = "https://console.elementai.com"
_SCRIPT = re.compile(r"(?P<submission>[^/\s']+)/(?P<exp_id>[0-9a-f]{32})\.sh'?\s*$")
_NO_CONNECTION = re.compile(r"connection refused|new connection|no such host|name or service not known", re.IGNORECASE)
T = TypeVar("T")
log = logging.getLogger(__name__)


class Client:
    """Each method makes one call. Our jobs are recognised by the script that they run.

    Raises:
        LaunchError: haven or the client is not installed, or the user is not logged in.
    """

    def __init__(self, config: JobConfig) -> None:
        self.account = config.account_id()
        client, self.toolkit = find_packages()
        self.api = _translate_errors("log in", lambda: _connect(client))

    def create(self, spec: Spec) -> str:
        config = spec.config
        resources = {"cpu": config.cpu, "mem": config.mem_gb, "gpu": config.gpus, "gpu_mem": config.gpu_mem_gb}
        resources |= {
            "gpu_model": config.gpu_model,
            "replicas": config.processes.nodes if config.processes.nodes > 1 else None,
        }
        job_config = {
            "name": spec.name,
            "image": config.image,
            "data": list(config.data),
            "environment_vars": [f"{name}={value}" for name, value in config.environment.items()],
            "preemptable": config.preemptable,
            "restartable": config.restartable,
            "max_run_time": config.max_run_seconds,
            "resources": {name: value for name, value in resources.items() if value is not None},
            **({} if config.bid is None else {"bid": config.bid}),
        }
        line = shlex.join(spec.command)
        return str(
            _translate_errors(
                "submit", lambda: self.toolkit.submit_job(self.api, self.account, line, job_config, str(spec.workdir))
            )
        )

    def list_jobs(self, limit: int) -> list[ListedJob]:
        """At most `limit` recent jobs of the account, the newest first. Other jobs can exist.

        haven's own listing has no names and commands, which are needed to recognise our jobs.
        """

        def request() -> Any:
            return self.api.v1_account_job_get(
                account_id=self.account, limit=limit, order="-created", q="alive_recently=True"
            ).items

        return [_read_job(job) for job in _translate_errors("list", request)]

    def get(self, job_id: str) -> ListedJob | None:
        """The job with this id, or None."""
        matches = _translate_errors("status", lambda: self.toolkit.get_jobs_dict(self.api, [job_id]))
        return _read_job(matches[job_id]) if job_id in matches else None

    def cancel(self, job_id: str) -> None:
        """Request the cancellation without waiting: haven's kill_job waits forever if a job stays CANCELLING."""
        _translate_errors("kill", lambda: self.api.v1_job_delete_by_id(job_id))


def create(config: JobConfig, client: Client, spec: Spec) -> str:
    """Queue one job exactly once: after a call with unknown outcome, look up the job by name before a retry.

    The service refuses duplicate names, so a request that arrives late cannot queue a second job.
    """
    remaining, name, is_uncertain = pauses(config), spec.name, False
    while True:
        try:
            return client.create(spec)
        except ServiceUnreachable as error:
            failed: LaunchError = error
        except LaunchError as error:
            failed, existing_job = error, _find_by_name(config, client, spec, error)
            over = existing_job is not None and has_ended(scheduler_state(config, existing_job))
            if existing_job and (is_uncertain or isinstance(error, OutcomeUnknown) or not over):
                return existing_job.job_id
            if existing_job and isinstance(
                error, NameTaken
            ):  # from an earlier call for this submission; names cannot be reused
                number = int(spec.name.removeprefix(name).strip("_") or 1) + 1
                spec = replace(spec, name=f"{name}_{number}")
                continue
            if not isinstance(error, OutcomeUnknown | NameTaken):
                raise
            is_uncertain = True
        pause = next(remaining, None)
        if pause is None:
            raise OutcomeUnknown(str(failed)) if is_uncertain else failed
        log.warning("%s Trying again in %g seconds.", failed, pause)
        time.sleep(pause)


def _find_by_name(config: JobConfig, client: Client, spec: Spec, failed: LaunchError) -> ListedJob | None:
    """The job called `spec.name`, if it exists.

    Raises:
        LaunchError: the lookup failed, or the job is from another submission.
    """
    try:
        jobs = call_with_retries(config, lambda: client.list_jobs(PAGE))
    except LaunchError as error:
        raise OutcomeUnknown(f"{failed} The lookup of {spec.name} failed: {error}") from None
    job = next((job for job in jobs if job.name == spec.name), None)
    if job and (job.submission, job.exp_id) != (spec.submission, spec.exp_id):
        raise LaunchError(
            f"toolkit: the name {spec.name} belongs to job {job.job_id}, which this submission has not queued. "
            "Submit again: a new submission has other names."
        )
    return job


def find_packages() -> tuple[Any, Any]:
    """The client package, and haven's module that uses it.

    Raises:
        LaunchError: one of them is not installed.
    """
    try:
        import eai_toolkit_client  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise LaunchError(
            "toolkit: needs the client eai_toolkit_client, which is not installed. Install it from the toolkit's index."
        ) from None
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "pkg_resources is deprecated as an API", module="haven$")
            from haven.haven_jobs import toolkit_manager
    except ImportError as error:
        raise LaunchError(
            f"toolkit: haven cannot be imported: {error}. pip install -r requirements/haven.txt."
        ) from None
    return eai_toolkit_client, toolkit_manager


def _connect(client: Any) -> Any:
    """Replaces haven's get_api, which fails with a token; without one, it exits the process if its server is down."""
    from haven import haven_utils

    token = os.environ.get("EAI_TOKEN") or haven_utils.subprocess_call("eai login token -H").split()[-1]
    configuration = client.Configuration()
    configuration.host = _HOST
    connection = client.ApiClient(configuration)
    connection.set_default_header("Authorization", f"Bearer {token}")
    return client.JobApi(connection)


def _translate_errors(action: str, call: Callable[[], T]) -> T:
    """Return `call()`; translate exceptions of the client and of haven into LaunchErrors."""
    try:
        return call()
    except (Exception, SystemExit) as error:
        status = getattr(error, "status", None)
        message = f"toolkit, {action} through haven: {error or type(error).__name__}"
        if status == 401 or action == "log in":
            raise ServiceUnreachable(
                f"{message} Log in with `eai login`, or set EAI_TOKEN to a valid token."
            ) from error
        kind: type[LaunchError] = OutcomeUnknown
        if status == 409:
            kind = NameTaken
        elif isinstance(status, int) and 400 <= status < 500:
            kind = LaunchError
        elif _NO_CONNECTION.search(str(error)):
            kind = ServiceUnreachable
        raise kind(message) from error


def _read_job(job: Any) -> ListedJob:
    """Convert haven's dict of a job, or the client's object."""

    def fact(name: str) -> Any:
        return job.get(name) if isinstance(job, dict) else getattr(job, name, None)

    command, runs = fact("command"), fact("runs") or []
    match = _SCRIPT.search(command[2]) if isinstance(command, list) and len(command) > 2 else None
    code = getattr(runs[-1], "exit_code", None) if runs else None
    return ListedJob(
        job_id=str(fact("id")),
        word=str(fact("state")).upper(),
        name=str(fact("name") or ""),
        submission=match["submission"] if match else "",
        exp_id=match["exp_id"] if match else "",
        exit_code=code if type(code) is int else None,
        runs=max(len(runs), 1),
    )
