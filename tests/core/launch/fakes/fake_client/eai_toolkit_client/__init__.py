"""Stands in for the closed client of the toolkit: records what haven and we call, and keeps jobs in memory.

With FAKE_CLIENT=eai it hands each call to the emulator `eai` on PATH, which runs the jobs.
"""

import os
import uuid
from types import SimpleNamespace
from typing import Any, ClassVar

from . import rest
from .through_eai import ThroughEai


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
        self.facts = {
            "cpu": cpu,
            "mem": mem,
            "gpu": gpu,
            "gpu_mem": gpu_mem,
            "gpu_model": gpu_model,
            "replicas": replicas,
        }


class JobSpec:
    KNOWN = frozenset(
        {"name", "image", "data", "environment_vars", "workdir", "command", "interactive"}
        | {"preemptable", "restartable", "bid", "max_run_time", "resources"}
    )

    def __init__(self, **facts: Any) -> None:
        if unknown := set(facts) - set(self.KNOWN):
            raise TypeError(f"got an unexpected keyword argument {unknown.pop()!r}")
        self.facts = facts


jobs: list[SimpleNamespace] = []
calls: list[tuple[str, Any]] = []
faults: list[tuple[str, Any]] = []
"""(method, what it raises) for the next calls of that method; an error called "after" is raised once the call has been
carried out."""


class InMemory:
    def __init__(self, client: ApiClient) -> None:
        pass

    def v1_account_job_post(self, account_id: str, human: int, job_spec: JobSpec) -> SimpleNamespace:
        error = _called("v1_account_job_post", job_spec)
        if any(job.name == job_spec.facts["name"] for job in jobs):
            raise rest.ApiException(status=409, reason="Conflict")
        facts = {"name": job_spec.facts["name"], "command": job_spec.facts["command"]}
        job = SimpleNamespace(
            id=str(uuid.uuid4()), state="QUEUED", runs=[], alive=True, account_id=account_id, spec=job_spec, **facts
        )
        jobs.insert(0, job)
        if error:
            raise error
        return job

    def v1_account_job_get(self, account_id: str, limit: int, order: str, q: str) -> SimpleNamespace:
        _called("v1_account_job_get", q)
        assert order == "-created"
        return SimpleNamespace(items=[job for job in jobs if job.account_id == account_id][:limit])

    def v1_cluster_job_get(self, q: str) -> SimpleNamespace:
        _called("v1_cluster_job_get", q)
        wanted = q.removeprefix("id__in=").split(",")
        return SimpleNamespace(items=[job for job in jobs if job.id in wanted])

    def v1_job_get_by_id(self, job_id: str) -> SimpleNamespace:
        _called("v1_job_get_by_id", job_id)
        return _found(job_id)

    def v1_job_delete_by_id(self, job_id: str) -> None:
        _called("v1_job_delete_by_id", job_id)
        job = _found(job_id)
        if not job.alive:
            raise rest.ApiException(400, f"cannot cancel a job that is in state {job.state}")
        job.state, job.alive = "CANCELLED", False


def _called(method: str, value: Any) -> Any:
    calls.append((method, value))
    for i, (name, error) in enumerate(faults):
        if name == method:
            del faults[i]
            if not getattr(error, "after", False):
                raise error
            return error
    return None


def _found(job_id: str) -> SimpleNamespace:
    for job in jobs:
        if job.id == job_id:
            return job
    raise rest.ApiException(status=404, reason="Not Found")


JobApi = ThroughEai if os.environ.get("FAKE_CLIENT") == "eai" else InMemory
