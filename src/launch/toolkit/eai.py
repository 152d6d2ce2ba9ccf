"""Two transports to the toolkit: the program `eai`, and haven's code with its closed client `eai_toolkit_client`."""

import contextlib
import json
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, TypeVar

from src.errors import LaunchError
from src.launch.toolkit.service import (
    EXPERIMENT,
    SUBMISSION,
    SUITE,
    JobConfig,
    JobGone,
    ListedJob,
    NameTaken,
    NotReached,
    OutcomeUnknown,
    Spec,
)
from src.support.parsing import parse_json

PROGRAM = "eai"
_HOST = "https://console.elementai.com"
_SCRIPT = re.compile(r"(?P<submission>[^/\s']+)/(?P<exp_id>[0-9a-f]{32})\.sh'?\s*$")
T = TypeVar("T")
_UUID = re.compile(r"\b[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b", re.IGNORECASE)


def find_program() -> None:
    """Raises a LaunchError where the program is not on PATH."""
    if shutil.which(PROGRAM) is None:
        raise LaunchError(
            f"{PROGRAM}: no such program on PATH. Install the toolkit's command line, or choose via: 'haven'."
        )


class Eai:
    """The toolkit through the program `eai`, which must be on PATH and logged in."""

    def __init__(self, config: JobConfig) -> None:
        self.account = config.account_id()
        self.timeout_seconds = config.timeout_seconds

    def create(self, spec: Spec) -> str:
        config = spec.config
        words = [
            "job",
            "new",
            "--account",
            self.account,
            "--name",
            spec.name,
            "--image",
            config.image,
            "--workdir",
            str(spec.workdir),
        ]
        words += [word for mount in config.data for word in ("--data", mount)]
        words += [word for name, value in config.environment.items() for word in ("--env", f"{name}={value}")]
        words += [word for name, value in spec.tags.items() for word in ("--tag", f"{name}={value}")]
        words += ["--cpu", str(config.cpu), "--mem", str(config.mem_gb), "--max-run-time", str(config.max_run_seconds)]
        options = {"--gpu-mem": config.gpu_mem_gb, "--gpu-model-filter": config.gpu_model, "--bid": config.bid}
        nodes = config.processes.nodes
        options |= {"--gpu": config.gpus or None, "--replicas": nodes if nodes > 1 else None}
        words += [word for flag, value in options.items() if value is not None for word in (flag, str(value))]
        words += [
            "--preemptable" if config.preemptable else "--non-preemptable",
            *(["--restartable"] if config.restartable else []),
        ]
        return _parse_created_id(
            self._call([*words, "--field", "id", "--no-header", "--format", "csv", "--", *spec.command])
        )

    def list_jobs(self, limit: int, tag: tuple[str, str] | None = None, name: str | None = None) -> list[ListedJob]:
        words = [
            "job",
            "ls",
            "--account",
            self.account,
            "--state",
            "all",
            "--limit",
            str(limit),
            "--fields",
            "id,name,state,tags",
        ]
        words += ["--tag", "=".join(tag)] if tag else []
        words += ["--name", name] if name else []
        return [_read_job(item) for item in _items(self._call([*words, "--no-header", "--format", "json"]))]

    def get(self, job_id: str) -> ListedJob | None:
        try:
            items = _items(self._call(["job", "get", job_id, "--format", "json"]))
        except JobGone:
            return None
        if len(items) != 1:
            raise OutcomeUnknown(f"eai job get {job_id}: expected one job, got {len(items)}.")
        return _read_job(items[0])

    def cancel(self, job_id: str) -> None:
        self._call(["job", "kill", job_id])

    def token(self) -> str:
        """A token of whoever is logged in."""
        words = self._call(["login", "token", "-H"]).split()
        if not words:
            raise OutcomeUnknown("eai login token: printed nothing.")
        return words[-1]

    def _call(self, words: Sequence[str]) -> str:
        """Standard output of `eai WORDS`."""
        find_program()
        call = " ".join([PROGRAM, *words[:2]])
        options: dict[str, Any] = {
            "text": True,
            "errors": "replace",
            "start_new_session": True,
            "timeout": self.timeout_seconds,
        }
        try:
            done = subprocess.run(
                [PROGRAM, *words], stdin=subprocess.DEVNULL, capture_output=True, check=False, **options
            )
        except (OSError, ValueError) as error:
            raise LaunchError(f"{call}: cannot be started: {error}.") from None
        except subprocess.TimeoutExpired:
            raise OutcomeUnknown(f"{call}: no answer within {self.timeout_seconds:g} seconds.") from None
        if done.returncode:
            raise failure(
                call, done.stderr.strip() or done.stdout.strip() or f"exit code {done.returncode}, without a word"
            )
        return done.stdout


# Messages of failed calls, in lower case. A bare number proves nothing: it can be part of a name, a path or an output.
_NOT_REACHED = re.compile(
    r"dial tcp|connection refused|no such host|i/o timeout|tls handshake timeout|network is unreachable|"
    r"(?:error|http)s?:.*: eof",
    re.DOTALL,
)
_NOT_KNOWN = re.compile(
    r"token is invalid|invalid token|token (?:has )?expired|unauthorized|(?:http|status|code|error)\D{0,12}401\b"
)
_SERVER = re.compile(
    r"bad gateway|internal server error|service unavailable|gateway time-?out|context deadline exceeded"
    r"|(?:http|status|code|error)\D{0,12}5\d\d\b"
)
_NAME_TAKEN = re.compile(
    r"already exists|already in use|already taken|not unique|(?:http|status|code|error)\D{0,12}409\b"
)
_OVER = re.compile(
    r"cannot cancel a job that is in state|not found|no such job|(?:http|status|code|error)\D{0,12}404\b"
)
_KINDS = (
    (_NOT_REACHED, NotReached),
    (_NOT_KNOWN, NotReached),
    (_SERVER, OutcomeUnknown),
    (_NAME_TAKEN, NameTaken),
    (_OVER, JobGone),
)


def failure(call: str, text: str) -> LaunchError:
    """The error that the output of a failed call means."""
    text = text.strip()
    kind = next((kind for pattern, kind in _KINDS if pattern.search(text.lower())), LaunchError)
    hint = (
        " Log in with `eai login`, and unset EAI_TOKEN if it is old: it wins over the login."
        if _NOT_KNOWN.search(text.lower())
        else ""
    )
    return kind(f"{call}: {text[-500:]}{hint}")


def _parse_created_id(out: str) -> str:
    """The id in the last line of `job new`, by itself or in a table."""
    text = out.strip()
    ids = [] if text.startswith("{") else _UUID.findall(text.rpartition("\n")[2])
    if not ids:
        raise OutcomeUnknown(f"eai job new: no job id in its output: {out.strip()[-200:]!r}.")
    return ids[0]


def _items(out: str) -> list[dict[str, Any]]:
    """The jobs in an answer: a JSON object per line, or one JSON list or object."""
    try:
        try:
            value = parse_json(out, "eai", LaunchError) if out.strip() else []
        except LaunchError:
            value = [parse_json(line, "eai", LaunchError) for line in out.splitlines() if line.strip()]
    except LaunchError:
        raise OutcomeUnknown(f"eai: expected JSON, got {out.strip()[:200]!r}.") from None
    items = value if isinstance(value, list) else [value]
    for item in items:
        if not (isinstance(item, dict) and isinstance(item.get("id"), str) and isinstance(item.get("state"), str)):
            raise OutcomeUnknown(f"eai: expected a job with an id and a state, got {json.dumps(item)[:200]}.")
    return items


def _read_job(item: dict[str, Any]) -> ListedJob:
    runs = [run for run in item.get("runs") or [] if isinstance(run, dict)]
    last = runs[-1] if runs else {}
    code, name, node = last.get("exitCode"), item.get("name"), last.get("nodeName")
    return ListedJob(
        job_id=item["id"],
        word=item["state"].upper(),
        name=name if isinstance(name, str) else "",
        tags=_tags(item.get("tags")),
        exit_code=code if type(code) is int else None,
        node=node if isinstance(node, str) else "",
        seconds=_seconds(last),
        runs=max(len(runs), 1),
    )


def _tags(value: Any) -> dict[str, str]:
    """Tags as a dict, from {"k": "v"}, ["k=v"] or [{"key": "k", "value": "v"}]."""
    if isinstance(value, dict):
        return {str(key): str(item) for key, item in value.items()}
    items = value.split(",") if isinstance(value, str) else value if isinstance(value, list) else []
    pairs = [
        (item.get("key"), item.get("value")) if isinstance(item, dict) else str(item).partition("=")[::2]
        for item in items
    ]
    return {str(key).strip(): str(item) for key, item in pairs}


def _seconds(run: Mapping[str, Any]) -> float | None:
    """Duration of a run that has ended, as given or from its times."""
    if isinstance(run.get("runTime"), (int, float)):
        return float(run["runTime"])
    with contextlib.suppress(KeyError, TypeError, ValueError):
        begin, end = (datetime.fromisoformat(run[key]) for key in ("startedOn", "endedOn"))
        return (end - begin).total_seconds()
    return None


class Haven:
    """The toolkit through haven. The client knows no tags: a job is recognised by the script that it runs.

    Raises:
        LaunchError: haven or the client is not installed, or nobody is logged in.
    """

    def __init__(self, config: JobConfig) -> None:
        self.account = config.account_id()
        client, self.toolkit = find_packages()
        token = os.environ.get("EAI_TOKEN") or Eai(config).token()
        self.api = _translate_errors("log in", lambda: _connect(client, token))

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

    def list_jobs(self, limit: int, tag: tuple[str, str] | None = None, name: str | None = None) -> list[ListedJob]:
        """All recent jobs of the account: haven's own listing omits names and commands, by which we recognise ours."""

        def ask() -> Any:
            return self.api.v1_account_job_get(
                account_id=self.account, limit=limit, order="-created", q="alive_recently=True"
            ).items

        jobs = [_read_haven_job(job) for job in _translate_errors("list", ask)]
        return [job for job in jobs if (tag is None or job.tags.get(tag[0]) == tag[1]) and name in (None, job.name)]

    def get(self, job_id: str) -> ListedJob | None:
        matches = _translate_errors("status", lambda: self.toolkit.get_jobs_dict(self.api, [job_id]))
        return _read_haven_job(matches[job_id]) if job_id in matches else None

    def cancel(self, job_id: str) -> None:
        """Send the request only: haven's own kill_job waits forever if a job stays CANCELLING."""
        _translate_errors("kill", lambda: self.api.v1_job_delete_by_id(job_id))


def find_packages() -> tuple[Any, Any]:
    """The client, and haven's module that uses it.

    Raises:
        LaunchError: one of them is not installed.
    """
    try:
        import eai_toolkit_client  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise LaunchError(
            "toolkit: via 'haven' needs the client eai_toolkit_client, which is not installed. Or use via: 'eai'."
        ) from None
    try:
        from haven.haven_jobs import toolkit_manager
    except ImportError as error:
        raise LaunchError(
            f"toolkit: via is 'haven', which cannot be imported: {error}. "
            "pip install -r requirements/haven.txt, or use via: 'eai'."
        ) from None
    return eai_toolkit_client, toolkit_manager


def _connect(client: Any, token: str) -> Any:
    """Replaces haven's get_api, which fails with a token, and without one exits the process if its server is absent."""
    configuration = client.Configuration()
    configuration.host = _HOST
    connection = client.ApiClient(configuration)
    connection.set_default_header("Authorization", f"Bearer {token}")
    return client.JobApi(connection)


def _translate_errors(what: str, call: Callable[[], T]) -> T:
    """`call()`, with the exceptions of the client and of haven translated into ours."""
    try:
        return call()
    except LaunchError:
        raise
    except (Exception, SystemExit) as error:
        status = getattr(error, "status", None)
        message = f"toolkit, {what} through haven: {error or type(error).__name__}"
        if status == 401:
            raise NotReached(f"{message} Log in with `eai login`, and unset EAI_TOKEN if it is old.") from error
        kind = {404: JobGone, 409: NameTaken}.get(status) if isinstance(status, int) else None
        if kind is None and isinstance(status, int) and 400 <= status < 500:
            raise LaunchError(message) from error
        if kind is None and isinstance(failure("", str(error)), NotReached):
            kind = NotReached
        raise (kind or OutcomeUnknown)(message) from error


def _read_haven_job(job: Any) -> ListedJob:
    """From haven's dict of a job, or the client's own object."""

    def fact(name: str) -> Any:
        return job.get(name) if isinstance(job, dict) else getattr(job, name, None)

    command, runs = fact("command"), fact("runs") or []
    match = _SCRIPT.search(command[2]) if isinstance(command, list) and len(command) > 2 else None
    tags = {}
    if match:
        tags = {SUITE[0]: SUITE[1], SUBMISSION: match["submission"], EXPERIMENT: match["exp_id"]}
    name, code = fact("name"), getattr(runs[-1], "exit_code", None) if runs else None
    return ListedJob(
        job_id=str(fact("id")),
        word=str(fact("state")).upper(),
        name=name if isinstance(name, str) else "",
        tags=tags,
        exit_code=code if type(code) is int else None,
        runs=max(len(runs), 1),
    )
