"""The client's calls as calls of the emulator `eai`: what haven submits runs as a process of this machine."""

import json
import re
import subprocess
from types import SimpleNamespace
from typing import Any

from . import rest

FIELDS = "id,name,state,command,runs"


class ThroughEai:
    def __init__(self, client: Any) -> None:
        assert client.headers == {"Authorization": "Bearer fake-token"}, "nobody is logged in"

    def v1_account_job_post(self, account_id: str, human: int, job_spec: Any) -> SimpleNamespace:
        facts, resources = dict(job_spec.facts), job_spec.facts["resources"].facts
        words = [
            "--account",
            account_id,
            "--name",
            facts["name"],
            "--image",
            facts["image"],
            "--workdir",
            facts["workdir"],
        ]
        words += [word for mount in facts["data"] for word in ("--data", mount)]
        words += [word for variable in facts["environment_vars"] for word in ("--env", variable)]
        options = {
            "--cpu": resources["cpu"],
            "--mem": resources["mem"],
            "--gpu": resources["gpu"],
            "--gpu-mem": resources["gpu_mem"],
        }
        options |= {
            "--gpu-model-filter": resources["gpu_model"],
            "--replicas": resources["replicas"],
            "--bid": facts.get("bid"),
        }
        options |= {"--max-run-time": facts["max_run_time"]}
        words += [word for flag, value in options.items() if value is not None for word in (flag, str(value))]
        words += [
            "--preemptable" if facts["preemptable"] else "--non-preemptable",
            *(["--restartable"] if facts["restartable"] else []),
        ]
        return _get(_call("new", *words, "--", *facts["command"]).strip())

    def v1_account_job_get(self, account_id: str, limit: int, order: str, q: str) -> SimpleNamespace:
        out = _call("ls", "--account", account_id, "--state", "all", "--limit", str(limit), "--fields", FIELDS)
        return SimpleNamespace(items=[_job(json.loads(line)) for line in out.splitlines() if line])

    def v1_cluster_job_get(self, q: str) -> SimpleNamespace:
        found = []
        for name in q.removeprefix("id__in=").split(","):
            try:
                found.append(_get(name))
            except rest.ApiException as error:
                if error.status != 404:
                    raise
        return SimpleNamespace(items=found)

    def v1_job_get_by_id(self, job_id: str) -> SimpleNamespace:
        return _get(job_id)

    def v1_job_delete_by_id(self, job_id: str) -> None:
        _call("kill", job_id)


def _get(job_id: str) -> SimpleNamespace:
    return _job(json.loads(_call("get", job_id)))


def _job(facts: dict[str, Any]) -> SimpleNamespace:
    runs = [SimpleNamespace(exit_code=run.get("exitCode")) for run in facts["runs"]]
    alive = facts["state"] in ("QUEUING", "QUEUED", "RUNNING", "CANCELLING")
    return SimpleNamespace(**{name: facts[name] for name in ("id", "name", "state", "command")}, runs=runs, alive=alive)


def _call(*words: str) -> str:
    done = subprocess.run(["eai", "job", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        status = re.search(r"HTTP (\d+)", done.stderr)
        raise rest.ApiException(
            404 if "not found" in done.stderr else int(status[1]) if status else None, done.stderr.strip()
        )
    return done.stdout
