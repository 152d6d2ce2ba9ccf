"""Jobs of the emulated toolkit: records in the folder FAKE_TOOLKIT, which run as processes of this machine.

`python jobs.py ID` runs one. With FAKE_TOOLKIT_HOLD set, jobs stay QUEUED until a test does so.
FAKE_TOOLKIT_CANCEL_SECONDS: how long a job is CANCELLING at least.
As in a container, a job has the programs of PATH, its own variables, `gpu` GPUs, and an empty home.
"""

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

processes: list[subprocess.Popen[Any]] = []
"""Those that run jobs, of this process."""
QUIET: Any = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
GRACE = 20
"""Seconds that a cancelled job has to end."""
LIVE = ("QUEUING", "QUEUED", "RUNNING", "CANCELLING")


@contextlib.contextmanager
def hold_lock() -> Iterator[Path]:
    folder = Path(os.environ["FAKE_TOOLKIT"])
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield folder


def records() -> list[dict[str, Any]]:
    """All jobs, the newest first."""
    jobs = [json.loads(path.read_text()) for path in Path(os.environ["FAKE_TOOLKIT"]).glob("*.json")]
    return sorted(jobs, key=lambda job: job["createdOn"], reverse=True)


def read(job_id: str) -> dict[str, Any] | None:
    path = Path(os.environ["FAKE_TOOLKIT"], f"{job_id}.json")
    return json.loads(path.read_text()) if path.exists() else None


def write(job: dict[str, Any]) -> None:
    path = Path(os.environ["FAKE_TOOLKIT"], f"{job['id']}.json")
    path.with_suffix(".new").write_text(json.dumps(job))
    path.with_suffix(".new").rename(path)


def edit(job_id: str, **facts: Any) -> None:
    with hold_lock():
        write((read(job_id) or {}) | facts)


def start(job_id: str) -> subprocess.Popen[Any]:
    """A process that runs a queued job to its end."""
    processes.append(subprocess.Popen([sys.executable, __file__, job_id], start_new_session=True, **QUIET))
    return processes[-1]


def run(job_id: str) -> None:
    """Run the job's command to its end, and again after each interruption of a restartable one."""
    again = True
    while again:
        with hold_lock() as folder:
            job = read(job_id) or {}
            if job["state"] != "QUEUED":
                return
            home = folder / "home" / job_id
            home.mkdir(parents=True, exist_ok=True)
            env = {name: os.environ[name] for name in ("PATH", "LANG", "TMPDIR") if name in os.environ}
            env |= {"HOME": str(home), "RANK": "0", "WORLD_SIZE": str(job["resources"]["replicas"] or 1)}
            env |= {"CUDA_VISIBLE_DEVICES": ",".join(map(str, range(job["resources"]["gpu"])))}
            env |= dict(item.partition("=")[::2] for item in job["environment_vars"])
            env |= {"EAI_JOB_ID": job_id, "EAI_RUN_INDEX": str(len(job["runs"]))}
            with open(folder / f"{job_id}.log", "ab") as log:
                child = subprocess.Popen(
                    job["command"], cwd=job["workdir"], env=env, stdout=log, stderr=log, start_new_session=True
                )
            write(job | {"state": "RUNNING", "pid": child.pid, "runs": [*job["runs"], {"state": "RUNNING"}]})
        while (code := child.poll()) is None:
            if (read(job_id) or {}).get("killAt", float("inf")) < time.time():
                child.kill()
            time.sleep(0.02)
        while (wait := (read(job_id) or {}).get("cancelUntil", 0) - time.time()) > 0:
            time.sleep(wait)
        with hold_lock():
            job = read(job_id) or {}
            is_cancelled, is_interrupted = job["state"] == "CANCELLING", job.pop("preempted", False)
            end = (
                "CANCELLED" if is_cancelled else "INTERRUPTED" if is_interrupted else "FAILED" if code else "SUCCEEDED"
            )
            job["runs"][-1] = {"state": end, "exit_code": code}
            again = is_interrupted and job["restartable"] and not is_cancelled
            write(job | {"state": "QUEUED" if again else end})


def cancel(job_id: str) -> None:
    """A job that runs is told to end: only the main process of its container. It is killed if it does not."""
    with hold_lock():
        job = read(job_id) or {}
        running = job["state"] == "RUNNING"
        if running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(job["pid"], signal.SIGTERM)
        until = time.time() + float(os.environ.get("FAKE_TOOLKIT_CANCEL_SECONDS", "0"))
        write(
            job
            | {"state": "CANCELLING" if running else "CANCELLED", "cancelUntil": until, "killAt": time.time() + GRACE}
        )


def preempt(job_id: str) -> None:
    """Interrupt a run, as the toolkit does when it wants its GPUs back."""
    edit(job_id, preempted=True)
    os.kill((read(job_id) or {})["pid"], signal.SIGTERM)


def now() -> str:
    return datetime.now(UTC).isoformat()


if __name__ == "__main__":
    run(sys.argv[1])
