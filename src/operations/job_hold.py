"""Keeps the job of a run from starting, and lets it start again; the ledger says who wanted it and why."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from src.config import Problems
from src.errors import LaunchError, RunError
from src.files import read_json
from src.launch.job import LauncherConfig, bind_launcher
from src.runs import environment, ledger
from src.runs.metadata import ENV, read_job

_SUBMISSION = "submissions/{}/submission.json"


def change(run: Path, verb: Literal["hold", "release"], why: str = "") -> dict[str, Any]:
    """Hold or release the job of the save directory `run`; the event that the ledger holds now.

    Raises:
        LaunchError: the run has no job, its launcher cannot hold jobs, or the scheduler refuses.
        RunError: a file of the run is damaged.
    """
    job_id, launcher = _job(run)
    if not launcher.holds_jobs:
        raise LaunchError(f"{run}: the launcher {launcher.name!r} of job {job_id} has no {verb}: only Slurm's jobs can wait in a queue.")
    (launcher.hold if verb == "hold" else launcher.release)([job_id])
    event = ledger.event(verb, job=job_id, why=why, commit=ledger.commit())
    ledger.append(run, event)
    return event


def current_hold(run: Path) -> dict[str, Any] | None:
    """The event by which the job of `run` is held; None where none is, as far as the ledger knows.

    Raises:
        RunError: the ledger cannot be read.
    """
    last = [event for event in ledger.read(run) if event["event"] in ("hold", "release")][-1:]
    return last[0] if last and last[0]["event"] == "hold" else None


def _job(run: Path) -> tuple[str, LauncherConfig]:
    """The job that was last submitted for `run`, or else the one that last ran it, and the launcher that has it."""
    job = read_job(run)
    if job is None:
        env = read_json(run / ENV, RunError) if (run / ENV).exists() else {}
        return _slurm_job_of(run, env.get("variables") if isinstance(env, dict) else None), _slurm()
    if not job["submission"]:
        return job["job_id"], _slurm()
    path = run.parent / _SUBMISSION.format(job["submission"])
    found = read_json(path, LaunchError)
    try:
        return job["job_id"], bind_launcher(found.get("launcher"))
    except (Problems, AttributeError) as error:
        raise LaunchError(f"{path}: names no launcher that this version knows: {error}") from None


def _slurm_job_of(run: Path, variables: Mapping[str, str] | None) -> str:
    """The Slurm job that a run was started in by hand."""
    job_id = environment.slurm_job(variables or {})
    if not job_id:
        raise LaunchError(f"{run}: no job was submitted for it, and it was not started within one.")
    return job_id


def _slurm() -> LauncherConfig:
    return bind_launcher({"launcher": "slurm"})
