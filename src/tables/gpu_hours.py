"""GPU hours of runs over all attempts, including failed attempts and repeated steps."""

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from src.errors import RunError, UserError
from src.files import read_json
from src.runs import ledger
from src.runs.environment import JOBS_PER_GPU
from src.runs.heartbeat import HEARTBEAT
from src.runs.store import ENV

_BY_THE_RUN = ("start", "save", "divergence", "stop")
"""Events of the ledger that a training writes. Events by people can happen at any time."""


def gpu_hours(run: Path) -> float:
    """GPU hours of the save directory `run`: from each start to its stop, or to the last sign of life if killed.

    Signs of life are checkpoints and, for the last attempt, the heartbeat. For earlier killed attempts, the time since
    the last checkpoint is missing. A process has one GPU, or its share of a GPU that jobs share, or no GPU if env.json
    of its attempt lists no GPUs. In a shared Slurm task, each job has an equal share of all GPUs, whatever its number
    of processes. Unreadable files count as 0.
    """
    try:
        events = [
            event for event in ledger.read(run) if event["event"] in _BY_THE_RUN and isinstance(event.get("when"), str)
        ]
        attempts = sorted(_gpus_of_attempts(run))
        places = [place for place, event in enumerate(events) if event["event"] == "start"]
        hours = 0.0
        for place, following in zip(places, [*places[1:], len(events)], strict=True):
            first, last = events[place], events[following - 1]
            start, end = (datetime.fromisoformat(event["when"]) for event in (first, last))
            if following == len(events) and last["event"] != "stop" and (run / HEARTBEAT).exists():
                end = max(end, datetime.fromtimestamp((run / HEARTBEAT).stat().st_mtime, UTC))
            shared_gpus, each = next((gpus for when, *gpus in reversed(attempts) if when <= first["when"]), (0.0, 0.0))
            hours += max(0.0, (end - start).total_seconds()) / 3600 * (shared_gpus + first.get("world_size", 1) * each)
    except (UserError, OSError, ValueError, TypeError):  # ValueError, TypeError: a malformed line in the ledger
        return 0.0
    return hours


def _gpus_of_attempts(run: Path) -> Iterator[tuple[str, float, float]]:
    """(start time, GPUs of the attempt, GPUs per process) of each attempt; only one of the latter two is not 0."""
    for path in (run / "attempts").glob(f"*/{ENV}"):
        env = read_json(path, RunError)
        if isinstance(env, dict) and isinstance(env.get("time"), str):
            jobs, _, gpus = str((env.get("variables") or {}).get(JOBS_PER_GPU, 1)).partition("/")
            if not env.get("gpus"):
                yield env["time"], 0.0, 0.0
            elif gpus:
                yield env["time"], int(gpus) / int(jobs), 0.0
            else:
                yield env["time"], 0.0, 1 / max(1.0, float(jobs))
