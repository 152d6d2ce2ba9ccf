"""The toolkit through haven's code and the closed client that it needs, `eai_toolkit_client`."""

import os
import re
import shlex
from collections.abc import Callable
from typing import Any, TypeVar

from src.errors import LaunchError
from src.launch.toolkit.eai import Eai, failure
from src.launch.toolkit.service import EXPERIMENT, SUBMISSION, SUITE, Doubtful, Gone, JobConfig, Listed, Spec, Taken, Unreached

_HOST = "https://console.elementai.com"
T = TypeVar("T")
_SCRIPT = re.compile(r"(?P<submission>[^/\s']+)/(?P<exp_id>[0-9a-f]{32})\.sh'?\s*$")


class Haven:
    """A way to the toolkit as `eai` is one. The client knows no tags: jobs are told apart by the script that they run.

    Raises:
        LaunchError: haven or the client is not installed, or nobody is logged in.
    """

    def __init__(self, config: JobConfig) -> None:
        self.account = config.account_id()
        client, self.toolkit = packages()
        token = os.environ.get("EAI_TOKEN") or Eai(config).token()
        self.api = _told("log in", lambda: _api(client, token))

    def create(self, spec: Spec) -> str:
        config = spec.config
        resources = {"cpu": config.cpu, "mem": config.mem_gb, "gpu": config.gpus}
        resources |= {"gpu_mem": config.gpu_mem_gb} if config.gpu_mem_gb else {}
        resources |= {"gpu_model": config.gpu_model} if config.gpu_model else {}
        resources |= {"replicas": spec.nodes} if spec.nodes > 1 else {}
        job_config = {
            "name": spec.name,
            "image": config.image,
            "data": list(config.data),
            "environment_vars": [f"{name}={value}" for name, value in config.environment.items()],
            "preemptable": config.preemptable,
            "restartable": config.restartable,
            "max_run_time": config.max_run_seconds,
            "resources": resources,
        }
        job_config |= {"bid": config.bid} if config.bid is not None else {}
        line = shlex.join(spec.command)
        return str(_told("submit", lambda: self.toolkit.submit_job(self.api, self.account, line, job_config, str(spec.workdir))))

    def listed(self, limit: int, tag: tuple[str, str] | None = None, name: str | None = None) -> list[Listed]:
        """What ran of late, of all kinds: haven's own listing leaves out the names and commands, by which ours are known."""

        def ask() -> Any:
            return self.api.v1_account_job_get(account_id=self.account, limit=limit, order="-created", q="alive_recently=True").items

        jobs = [_listed(job) for job in _told("list", ask)]
        return [job for job in jobs if (tag is None or job.tags.get(tag[0]) == tag[1]) and name in (None, job.name)]

    def get(self, job_id: str) -> Listed | None:
        found = _told("status", lambda: self.toolkit.get_jobs_dict(self.api, [job_id]))
        return _listed(found[job_id]) if job_id in found else None

    def cancel(self, job_id: str) -> None:
        """haven's own kill_job waits without end where a job stays CANCELLING, so only the request is made here."""
        _told("kill", lambda: self.api.v1_job_delete_by_id(job_id))


def packages() -> tuple[Any, Any]:
    """The client, and haven's module that uses it.

    Raises:
        LaunchError: one of them is not installed.
    """
    try:
        import eai_toolkit_client  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise LaunchError("toolkit: via 'haven' needs the client eai_toolkit_client, which is not installed. Or use via: 'eai'.") from None
    try:
        from haven.haven_jobs import toolkit_manager
    except ImportError as error:
        raise LaunchError(f"toolkit: via is 'haven', which cannot be imported: {error}. Install haven-ai, or use via: 'eai'.") from None
    return eai_toolkit_client, toolkit_manager


def _api(client: Any, token: str) -> Any:
    """As haven's get_api, which fails when it is given a token, and without one ends the process where its own server is not there."""
    configuration = client.Configuration()
    configuration.host = _HOST
    connection = client.ApiClient(configuration)
    connection.set_default_header("Authorization", f"Bearer {token}")
    return client.JobApi(connection)


def _told(what: str, call: Callable[[], T]) -> T:
    """`call()`, with what the client or haven raise turned into our errors."""
    try:
        return call()
    except LaunchError:
        raise
    except (Exception, SystemExit) as error:
        status = getattr(error, "status", None)
        told = f"toolkit, {what} through haven: {error or type(error).__name__}"
        if status == 401:
            raise Unreached(f"{told} Log in with `eai login`, and unset EAI_TOKEN if it is old.") from error
        kind = {404: Gone, 409: Taken}.get(status) if isinstance(status, int) else None
        if kind is None and isinstance(status, int) and 400 <= status < 500:
            raise LaunchError(told) from error
        if kind is None and isinstance(failure("", str(error)), Unreached):
            kind = Unreached
        raise (kind or Doubtful)(told) from error


def _listed(job: Any) -> Listed:
    """haven's dict of a job, or the client's own object."""

    def fact(name: str) -> Any:
        return job.get(name) if isinstance(job, dict) else getattr(job, name, None)

    command, runs = fact("command"), fact("runs") or []
    match = _SCRIPT.search(command[2]) if isinstance(command, list) and len(command) > 2 else None
    tags = {}
    if match:
        tags = {SUITE[0]: SUITE[1], SUBMISSION: match["submission"], EXPERIMENT: match["exp_id"]}
    name, code = fact("name"), getattr(runs[-1], "exit_code", None) if runs else None
    return Listed(
        job_id=str(fact("id")),
        word=str(fact("state")).upper(),
        name=name if isinstance(name, str) else "",
        tags=tags,
        exit_code=code if type(code) is int else None,
        runs=max(len(runs), 1),
    )
