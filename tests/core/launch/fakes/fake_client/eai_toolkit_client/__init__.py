"""Stands in for the closed client of the toolkit; its jobs are those of jobs.py."""

import os
import re
import uuid
from types import SimpleNamespace
from typing import Any, ClassVar

from . import jobs, rest


class Configuration:
    host = ""


class ApiClient:
    headers: ClassVar[dict[str, str]] = {}

    def __init__(self, configuration: Configuration) -> None:
        assert configuration.host.startswith("https://")

    def set_default_header(self, name: str, value: str) -> None:
        self.headers[name] = value


class JobSpecResources:
    def __init__(self, cpu=None, mem=None, gpu=None, gpu_mem=None, gpu_model=None, replicas=None) -> None:
        names = ("cpu", "mem", "gpu", "gpu_mem", "gpu_model", "replicas")
        self.facts = dict(zip(names, (cpu, mem, gpu, gpu_mem, gpu_model, replicas), strict=True))


class JobSpec:
    FIELD_NAMES = frozenset(
        {"name", "image", "data", "environment_vars", "workdir", "command", "interactive"}
        | {"preemptable", "restartable", "bid", "max_run_time", "resources"}
    )

    def __init__(self, **facts: Any) -> None:
        if unknown := set(facts) - set(self.FIELD_NAMES):
            raise TypeError(f"got an unexpected keyword argument {unknown.pop()!r}")
        self.facts = facts


calls: list[str] = []
"""Methods called by this process."""
faults: list[tuple[str, Any]] = []
"""(method, error) for the next calls of that method; an error with `after` is raised once the call has been carried
out, and one with `always` at each call."""


class JobApi:
    def __init__(self, client: ApiClient) -> None:
        assert client.headers["Authorization"].startswith("Bearer "), "nobody is logged in"

    def v1_account_job_post(self, account_id: str, human: int, job_spec: JobSpec) -> SimpleNamespace:
        error = _call("v1_account_job_post")
        facts = job_spec.facts | {"resources": job_spec.facts["resources"].facts}
        if not re.fullmatch(r"[a-z0-9_]+", facts["name"]):
            raise rest.ApiException(400, f"invalid name {facts['name']!r}: must match ^[a-z0-9_]+$")
        if facts["image"].startswith("refused"):
            raise rest.ApiException(403, "you may not use this image")
        with jobs.hold_lock():
            if any(job["name"] == facts["name"] for job in jobs.records()):
                raise rest.ApiException(409, "Conflict")
            job = {"id": str(uuid.uuid4()), "account": account_id, "state": "QUEUED", "createdOn": jobs.now()}
            jobs.write({**facts, **job, "runs": []})
        if "FAKE_TOOLKIT_HOLD" not in os.environ:
            jobs.start(job["id"])
        if error:
            raise error
        return _get(job["id"])

    def v1_account_job_get(self, account_id: str, limit: int, order: str, q: str) -> SimpleNamespace:
        error = _call("v1_account_job_get")
        assert order == "-created"
        if error:
            raise error
        with jobs.hold_lock():
            records = [job for job in jobs.records() if job["account"] == account_id and not job.get("old")]
        return SimpleNamespace(items=[_job(job) for job in records[:limit]])

    def v1_cluster_job_get(self, q: str) -> SimpleNamespace:
        if error := _call("v1_cluster_job_get"):
            raise error
        records = [jobs.read(name) for name in q.removeprefix("id__in=").split(",")]
        return SimpleNamespace(items=[_job(record) for record in records if record])

    def v1_job_get_by_id(self, job_id: str) -> SimpleNamespace:
        return _get(job_id)

    def v1_job_delete_by_id(self, job_id: str) -> None:
        error = _call("v1_job_delete_by_id")
        if not (job := _get(job_id)).alive:
            raise rest.ApiException(400, f"cannot cancel a job that is in state {job.state}")
        jobs.cancel(job_id)
        if error:
            raise error


def _call(method: str) -> Any:
    """Record the call; raise its fault, or return one to be raised after it."""
    calls.append(method)
    for i, (name, error) in enumerate(faults):
        if name == method:
            if not getattr(error, "always", False):
                del faults[i]
            if not getattr(error, "after", False):
                raise error
            return error
    return None


def _get(job_id: str) -> SimpleNamespace:
    if (record := jobs.read(job_id)) is None:
        raise rest.ApiException(404, "Not Found")
    return _job(record)


def _job(record: dict[str, Any]) -> SimpleNamespace:
    facts = {name: record[name] for name in ("id", "name", "state", "command")}
    runs = [SimpleNamespace(exit_code=run.get("exit_code")) for run in record["runs"]]
    return SimpleNamespace(**facts, runs=runs, alive=record["state"] in jobs.LIVE)
