"""Follow the output of jobs."""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from src.errors import RunError
from src.files import reading
from src.launch import status
from src.launch.tracking import ALIVE
from src.runs.store import RunStore, SavedRun

LINES = 20
POLL_SECONDS = 0.5
STATES_SECONDS = 5.0
"""Interval between queries to the shared schedulers whether all jobs have ended."""
_SHORT = 8

log = logging.getLogger(__name__)


def follow(
    runs: Path, exp_ids: Sequence[str], lines: int = LINES, sleep: Callable[[float], None] = time.sleep
) -> Iterator[str]:
    """Yield the last `lines` lines of each log, then every new line, until no experiment is queued or running.
    At the end, log the experiments without output.

    With several experiments, each line starts with the first characters of the id.
    """
    heads = {exp_id: f"{exp_id[:_SHORT]} " if len(exp_ids) > 1 else "" for exp_id in exp_ids}
    places: dict[Path, int] = {}
    for exp_id in exp_ids:
        for path in _log_files(runs, exp_id):
            places[path] = _size(path)
            yield from (heads[exp_id] + line for line in tail(path, lines, places[path]).splitlines())
    last_query = float("-inf")
    rows: list[status.Row] = []
    alive: set[str] = set()
    all_ended = False
    while True:
        if time.monotonic() - last_query >= STATES_SECONDS:
            rows = status.table(RunStore(runs), exp_ids)
            # Without an answer of the scheduler, the jobs count as running.
            doubtful = {row.exp_id for row in rows if row.doubt or row.state == "unknown"}
            alive = {row.exp_id for row in rows if row.state in ALIVE} | (alive & doubtful)
            all_ended = not alive
            last_query = time.monotonic()
        for exp_id in exp_ids:
            for path in _log_files(runs, exp_id):
                yield from (heads[exp_id] + line for line in _new_lines(path, places, all_ended))
        if all_ended:
            break
        sleep(POLL_SECONDS)
    for row in rows:
        if not any(map(_size, _log_files(runs, row.exp_id))):
            log.info(
                "%s: no output; its state is %s%s",
                row.exp_id,
                row.state,
                f" ({row.reason})" if row.reason else "",
            )


def last_lines(runs: Path, exp_ids: Sequence[str], lines: int = LINES) -> dict[str, list[str]]:
    """{id: the last `lines` lines of each of its logs}, without waiting."""
    return {
        exp_id: [line for path in _log_files(runs, exp_id) for line in tail(path, lines).splitlines()]
        for exp_id in exp_ids
    }


def tail(log: Path, lines: int, end: int | None = None) -> str:
    """The last `lines` lines of a file, or of its first `end` bytes, without reading all of it; "" if missing."""
    piece = 64 * 1024
    try:
        with reading(log), open(log, "rb") as file:
            size = min(file.seek(0, 2), end) if end is not None else file.seek(0, 2)
            while True:
                file.seek(max(0, size - piece))
                data = file.read(min(piece, size))
                if piece >= size or data.count(b"\n") > lines:
                    break
                piece *= 8
    except (OSError, RunError):
        return ""
    return "\n".join(data.decode("utf-8", errors="replace").splitlines()[-lines:]) if lines > 0 else ""


def _log_files(runs: Path, exp_id: str) -> list[Path]:
    """The output files of the job, or the log of the training if they do not exist."""
    *output_files, training_log = SavedRun(runs / exp_id).logs
    return [path for path in output_files if path.exists()] or [training_log]


def _new_lines(path: Path, places: dict[Path, int], last: bool) -> list[str]:
    """The complete lines since the last call; with `last`, also an unfinished line."""
    start = places.get(path, 0)
    try:
        with reading(path), open(path, "rb") as file:
            if _size(path) < start:  # it was truncated
                start = 0
            file.seek(start)
            data = file.read()
    except (OSError, RunError):
        return []
    complete = data if last else data[: data.rfind(b"\n") + 1]
    places[path] = start + len(complete)
    return complete.decode("utf-8", errors="replace").splitlines()


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
