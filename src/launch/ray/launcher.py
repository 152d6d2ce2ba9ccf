"""Run each experiment as one job of a Ray cluster, through the HTTP API of Ray Jobs."""

import contextlib
import re
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from src.errors import LaunchError, UserError
from src.files import write_atomic, writing
from src.launch.command import INTERRUPTED_EXIT, STOP_AFTER_FAILURES, STOPPED_EXIT, QueueConfig, shell_line
from src.launch.job import Job, Note, SchedulerState
from src.launch.ray.api import ADDRESS, Refusal, brief, call_api, find_address
from src.runs.environment import JOBS_PER_GPU
from src.runs.lease import LEASE, STALE_SECONDS
from src.runs.store import STATUS
from src.support.redaction import hide_password

_END_STATUSES = ("SUCCEEDED", "FAILED", "STOPPED")
_RAY_FIELDS = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "mem_gb"}
# The script of a job; assignments of its variables are added before it. Ray has no dependencies, and does not restart
# jobs. It sends stop signals to every process.
_SCRIPT = f"""
FAILURES=$FOLDER/quick_failures
{STOP_AFTER_FAILURES}SIGNALLED=
trap 'SIGNALLED=1' TERM
end() {{ echo "$2" > "$FOLDER/ended/$ID"; exit "$1"; }}
refuse() {{ echo "not started, because $1" >> "$ERR"; end {STOPPED_EXIT} "not started, because $1"; }}
check_queue() {{ ! queue_is_stopped || {{ echo "$STOP_REASON" >> "$ERR"; end {STOPPED_EXIT} "$STOP_REASON"; }}; }}
check() {{ if [ -n "$SIGNALLED" ] || [ -e "$FOLDER/cancel/$ID" ]; then end {STOPPED_EXIT}; fi; }}
await() {{  # $1 a parent, $2 the folder of its submission, $3 its save directory
    local since=$SECONDS before= ended status now limit
    while check && check_queue; do
        ended=; if [ -e "$2/ended/$1" ] || [ -e "$2/cancel/$1" ]; then ended=1; fi
        status=$(cat "$3/{STATUS}" 2> /dev/null)
        case $status in *'"state": "done"'*) return ;; esac
        [ -z "$ended" ] || refuse "$1 did not complete"
        now=$status$(cat "$3/{LEASE}" 2> /dev/null)  # a running experiment counts there
        [ "$now" = "$before" ] || {{ before=$now; since=$SECONDS; }}
        case $status in *'"state": "running"'*) limit={10 * STALE_SECONDS:.0f} ;; *) limit=$LONGEST ;; esac
        [ $((SECONDS - since)) -lt "$limit" ] || refuse "$1 has shown no sign of life for $limit seconds"
        sleep "$POLL" & wait $!
    done
}}
for ((i = 0; i < ${{#PARENTS[@]}}; i += 3)); do await "${{PARENTS[@]:i:3}}"; done
cd -- "$CWD" || end 1
check_queue
stops=0 failures=0
while check; do
    started_at=$SECONDS
    bash -c "$LINE" < /dev/null >> "$OUT" 2>> "$ERR" &
    wait $!; code=$?
    while kill -0 $! 2> /dev/null; do wait $!; done  # it got a stop signal, and writes a checkpoint
    [ -z "$SIGNALLED" ] || end {STOPPED_EXIT}
    case $code in
        0 | {INTERRUPTED_EXIT}) break ;;
        {STOPPED_EXIT}) [ $((stops += 1)) -le 100 ] || end $code ;;  # do not restart a job forever
        *) [ $((failures += 1)) -le "$RETRIES" ] || break ;;
    esac
    echo "== ray: exit code $code, started again" >> "$ERR"
done
count_failure $code $((SECONDS - started_at))
end $code
"""


class Config(QueueConfig):
    """The cluster, and the resources of one job.
    A job runs on one node, which must see the folders of code, data and runs at the same paths."""

    SUBMISSION_SETTINGS: ClassVar = ("address", "submissions", "patience_seconds")

    address: str = ""
    """Address of the dashboard, such as "http://127.0.0.1:8265".
    Empty: RAY_API_SERVER_ADDRESS or RAY_ADDRESS if set, else that default."""
    num_cpus: float = Field(default=1, ge=0)
    """CPUs that Ray reserves for a job. Without any resource, the job runs on the head node."""
    num_gpus: float = Field(default=0, ge=0)
    """GPUs that the job can see; 0.5: two jobs share one."""
    mem_gb: float = Field(default=0, ge=0)
    """Memory that Ray reserves for a job."""
    resources: dict[Annotated[str, Field(min_length=1)], Annotated[float, Field(gt=0)]] = {}
    """Custom resources of Ray, such as {"accelerator_type:H100": 0.001}."""
    retries: int = Field(default=0, ge=0)
    """How often a failed job is restarted on its node. After a graceful stop (exit code 75) it is always restarted."""
    grace_seconds: int = Field(default=60, ge=1)
    """How long a killed job can take to write a checkpoint and stop."""
    parent_poll_seconds: float = Field(default=5.0, gt=0)
    """Interval at which a child checks its parents. A waiting child holds its resources, so no parent can need more."""
    parent_wait_seconds: int = Field(default=86_400, ge=0)
    """How long a child waits for a parent that has not started."""
    patience_seconds: float = Field(default=60.0, gt=0)
    """How long to retry a cluster that does not answer."""

    @field_validator("address")
    @classmethod
    def _is_http(cls, address: str) -> str:
        if address and not ADDRESS.fullmatch(address):
            raise ValueError(
                f"expected http://HOST:PORT of Ray's dashboard, without a user or a password, "
                f"got {hide_password(address)!r}."
            )
        return address

    @model_validator(mode="after")
    def _fits_ray(self) -> "Config":
        if self.num_gpus > 1 and self.num_gpus != int(self.num_gpus):
            raise ValueError(f"num_gpus: expected an integer above 1, got {self.num_gpus:g}.")
        if ray_names := [name for name in self.resources if name in _RAY_FIELDS]:
            raise ValueError(f"resources: use the field {_RAY_FIELDS[ray_names[0]]} instead of {ray_names[0]!r}.")
        if self.processes.nodes > 1:
            raise ValueError(
                "processes.nodes: a job of Ray runs on one node. Choose the launcher slurm or toolkit for several."
            )
        return self

    def submit(self, jobs: Sequence[Job], folder: Path, note: Note) -> list[str]:
        """Queue each job as <submission>.<experiment>. Ray refuses duplicate ids, so nothing is queued twice."""
        folder = folder.absolute()
        ids: dict[str, str] = {}
        settings = {job.exp_id: self.settings_of(job) for job in jobs}
        with writing(folder):
            for place in (folder / "ended", folder / "cancel", *{job.log_dir for job in jobs}):
                place.mkdir(parents=True, exist_ok=True)
        for job in jobs:
            config = settings[job.exp_id]
            earlier_parents = [parent for parent in job.after if parent in ids]
            for parent in earlier_parents:
                _refuse_deadlock(job.exp_id, config, parent, settings[parent])
            ids[job.exp_id] = f"{folder.name}.{job.exp_id}"
            parents = dict.fromkeys([*(ids[parent] for parent in earlier_parents), *job.after_jobs])
            write_atomic(folder / f"{job.exp_id}.sh", _render_script(config, job, folder, parents), private=True)
        try:
            for job in jobs:
                self._create(ids[job.exp_id], folder / f"{job.exp_id}.sh", settings[job.exp_id])
                note({job.exp_id: ids[job.exp_id]})
        except UserError as error:
            _forbid(folder / "cancel", ids)  # prevents them from starting, even if Ray does not get the request
            try:
                self.kill(list(ids.values()))
            except LaunchError as second:
                raise type(error)(
                    f"{error}\nQueued jobs will not start, but running ones could not be stopped: {second} "
                    "Stop them with `ray job stop`."
                ) from None
            raise
        return list(ids.values())

    def states(self, job_ids: Sequence[str]) -> dict[str, SchedulerState]:
        """Uses one call for all jobs. A restarted cluster knows none of them."""
        listed_jobs = self._list_jobs() if job_ids else {}
        return {name: self._state(name, listed_jobs[name]) for name in job_ids if name in listed_jobs}

    def kill(self, job_ids: Sequence[str]) -> None:
        """Stop the jobs. Ray kills them after the grace period.
        A file prevents jobs that wait for resources from starting."""
        listed_jobs = self._list_jobs() if job_ids else {}
        alive = [
            name
            for name in dict.fromkeys(job_ids)
            if name in listed_jobs and listed_jobs[name].get("status") not in _END_STATUSES
        ]
        for name in alive:
            place = self._place(name, "cancel")
            _forbid(place.parent, [place.name])
        for name in alive:
            self._call("POST", f"/api/jobs/{name}/stop", {})

    def find(self, folder: Path, exp_ids: Sequence[str]) -> dict[str, str]:
        """The jobs that Ray lists."""
        listed_jobs = self._list_jobs()
        return {exp_id: name for exp_id in exp_ids if (name := f"{folder.name}.{exp_id}") in listed_jobs}

    def forbid(self, folder: Path, exp_ids: Sequence[str]) -> None:
        _forbid(folder / "cancel", [exp_id for exp_id in exp_ids if (folder / f"{exp_id}.sh").exists()])

    def check(self) -> None:
        """Raise LaunchError if Ray does not answer at the address."""
        self._list_jobs()

    def scheduler(self) -> str:
        return find_address(self.address)

    def _call(self, method: str, path: str, content: dict[str, Any] | None = None) -> Any:
        return call_api(self.scheduler(), method, path, content, self.patience_seconds)

    def _create(self, name: str, script: Path, config: "Config") -> None:
        """Queue one job. After an error, look it up: an earlier request can have queued it."""
        content = {
            "submission_id": name,
            "entrypoint": f"exec bash {shlex.quote(str(script))}",
            "entrypoint_num_cpus": config.num_cpus,
            "entrypoint_num_gpus": config.num_gpus,
            "entrypoint_memory": int(config.mem_gb * 2**30),
            "entrypoint_resources": config.resources,
            "runtime_env": {
                "env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": str(config.grace_seconds), "RAY_JOB_STOP_SIGNAL": "SIGTERM"}
            },
        }
        try:
            answer = self._call("POST", "/api/jobs/", content)
            if not isinstance(answer, dict) or answer.get("submission_id") != name:
                raise LaunchError(
                    f"{self.scheduler()}: expected the id {name} of a queued job, got {brief(str(answer))!r}. "
                    "Is it the address of Ray's dashboard?"
                )
        except LaunchError as error:
            try:
                queued_job = self._call("GET", f"/api/jobs/{name}")
            except Refusal as refusal:
                raise (error if refusal.missing else refusal) from None
            if not isinstance(queued_job, dict) or queued_job.get("entrypoint") != content["entrypoint"]:
                raise LaunchError(
                    f"{self.scheduler()}: the id {name} belongs to a job that this submission has not queued. "
                    "Submit again: a new submission has other ids."
                ) from None

    def _list_jobs(self) -> dict[str, dict[str, Any]]:
        """All jobs of the cluster, by id."""
        jobs = self._call("GET", "/api/jobs/")
        if not isinstance(jobs, list):
            raise LaunchError(
                f"{self.scheduler()}: expected a list of jobs, got {brief(str(jobs))!r}. "
                "Is it the address of Ray's dashboard?"
            )
        return {
            name: job for job in jobs if isinstance(job, dict) and isinstance(name := job.get("submission_id"), str)
        }

    def _place(self, name: str, kind: Literal["cancel", "ended"]) -> Path:
        """The file that prevents a job from starting ("cancel"), or the one it writes at its end, with a reason."""
        submission, _, exp_id = name.partition(".")
        return Path(self.submissions, submission, kind, exp_id)

    def _state(self, name: str, job: dict[str, Any]) -> SchedulerState:
        status, code, kind, message = (
            job.get("status"),
            job.get("driver_exit_code"),
            brief(job.get("error_type")),
            brief(job.get("message")),
        )
        node = re.match(r"https?://\[?([\w.:-]+?)\]?:\d+/?$", brief(job.get("driver_agent_http_address")))
        facts = {"word": kind or brief(status), "node": node[1] if node else ""}
        if status == "RUNNING":
            return SchedulerState("running", **facts)
        if status == "SUCCEEDED":
            return SchedulerState("completed", reason="exit code 0", **facts)
        if status == "STOPPED" or (status in ("PENDING", "FAILED") and self._place(name, "cancel").exists()):
            return SchedulerState("cancelled", reason="stopped" if node else "stopped before it was started", **facts)
        if status == "PENDING":
            return SchedulerState("queued", reason=message, **facts)
        if status != "FAILED":
            return SchedulerState("unknown", reason=f"Ray's status is {brief(str(status))!r}", **facts)
        if kind == "JOB_SUPERVISOR_ACTOR_START_TIMEOUT":
            why = (
                "never started: it waited "
                "for resources longer than RAY_JOB_START_TIMEOUT_SECONDS of Ray's head node allows"
            )
            return SchedulerState("cancelled", reason=why, **facts)
        if code in (STOPPED_EXIT, INTERRUPTED_EXIT):
            return SchedulerState("cancelled", reason=_read(self._place(name, "ended")) or "stopped in order", **facts)
        if type(code) is int:
            return SchedulerState("failed", reason=f"exit code {code}", **facts)
        return SchedulerState(
            "failed", reason=f"Ray lost it: {message}" if kind == "JOB_SUPERVISOR_ACTOR_DIED" else message, **facts
        )


def _refuse_deadlock(exp_id: str, config: Config, parent: str, parent_config: Config) -> None:
    """Refuse a parent that needs more of a resource than its child: waiting children hold their resources,
    so the parent could wait until its children give up."""
    needs, parent_needs = (
        {**c.resources, "num_cpus": c.num_cpus, "num_gpus": c.num_gpus, "mem_gb": c.mem_gb}
        for c in (config, parent_config)
    )
    for name, amount in parent_needs.items():
        if 0 < needs.get(name, 0) < amount:
            raise LaunchError(
                f"{exp_id}: its parent {parent} needs {name} {amount:g}, and could wait forever while children hold "
                f"{needs[name]:g} each and wait for it. "
                "Submit the parents first, and their children when they are done."
            )


def _render_script(config: Config, job: Job, folder: Path, parents: Iterable[str]) -> str:
    places: list[object] = []
    for parent in parents:
        submission, _, exp_id = parent.partition(".")
        places += [exp_id, folder.parent / submission, job.run.parent.absolute() / exp_id]
    logs = job.log_dir.absolute()
    values = {
        "ID": job.exp_id,
        "FOLDER": folder,
        "CWD": job.cwd.absolute(),
        "OUT": logs / f"{job.exp_id}.out.log",
        "ERR": logs / f"{job.exp_id}.err.log",
        "MOST": config.stop_after_failures,
        "RETRIES": config.retries,
        "POLL": f"{config.parent_poll_seconds:g}",
        "LONGEST": config.parent_wait_seconds,
        "LINE": shell_line(
            job,
            config.processes,
            {JOBS_PER_GPU: f"{1 / config.num_gpus:g}" if 0 < config.num_gpus < 1 else "1", **config.environment},
        ),
    }
    lines = [f"{name}={shlex.quote(str(value))}" for name, value in values.items()]
    return "\n".join(["#!/bin/bash", *lines, f"PARENTS=({shlex.join(map(str, places))})"]) + _SCRIPT


def _forbid(folder: Path, exp_ids: Iterable[str]) -> None:
    """Keep jobs from starting: their script checks for these files."""
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for exp_id in exp_ids:
            (folder / exp_id).touch()


def _read(path: Path) -> str:
    with contextlib.suppress(OSError):
        return brief(path.read_text(errors="replace"))
    return ""
