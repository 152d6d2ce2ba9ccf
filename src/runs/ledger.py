"""ledger.jsonl of a save directory: actions on the run, with time, person and reason. Append-only.

Each event is one synced line. A partial line of a killed writer remains as a separate line, and readers skip it.
"""

import contextlib
import functools
import getpass
import logging
import os
import socket
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from src.errors import UserError
from src.files import ROOT, reading
from src.runs import environment, jsonl_records
from src.runs.code_version import code_version
from src.runs.store import SavedRun
from src.support import distributed

FILE = "ledger.jsonl"

log = logging.getLogger(__name__)


def event(name: str, **facts: Any) -> dict[str, Any]:
    """An event `name` with the current time (UTC), the person (user@host) and `facts`, JSON values only."""
    return {"event": name, "when": environment.now(), "who": user_and_host(), **facts}


def append(run: Path, new_event: Mapping[str, Any]) -> None:
    """Append `new_event` to the ledger of the save directory `run` and sync it to disk. Needs no lease.

    An event with an "id" that is already in the ledger is not added: a step repeated after a crash is recorded once.

    Raises:
        RunError: the disk refuses. The ledger is unchanged.
    """
    with jsonl_records.open_locked(run / FILE, mend=False) as file:
        if new_event.get("id") is None or all(old.get("id") != new_event["id"] for old in read(run)):
            file.append(new_event, ensure_ascii=False)


def read(run: Path) -> list[dict[str, Any]]:
    """All events of the save directory `run`, the oldest first. Partial lines of killed writers are skipped.

    Raises:
        RunError: the file cannot be read.
    """
    path = run / FILE
    try:
        with reading(path):
            lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return []
    events, partial_lines = [], []
    for number, line in enumerate(lines, start=1):
        if not line:
            continue
        parsed = jsonl_records.parse_object(line)
        if parsed is not None and isinstance(parsed.get("event"), str):
            events.append(parsed)
        else:
            partial_lines.append(number)
    if partial_lines:
        log.info("%s: skipped partial lines of killed writers: line %s.", path, ", ".join(map(str, partial_lines)))
    return events


@contextlib.contextmanager
def attempt(run: Path, step: Callable[[], int], **facts: Any) -> Iterator[None]:
    """Record the start of this attempt at `run`, with `facts`, and at the end of the block why it stopped. Collective.

    step: returns the number of finished optimizer steps. The start records the "code" (`environment.code_digest`), and
    logs a warning if the code differs from the last start.
    """

    def record(name: str, **more: Any) -> None:
        if distributed.is_main():
            append(run, event(name, step=step(), **more))

    with distributed.raise_together():
        if distributed.is_main():
            codes = codes_of_starts(run, step())
            facts["code"] = environment.code_digest()
            if codes and codes[-1] != facts["code"]:
                log.warning(
                    "%s: resumes with different code than at its last start (%s, now %s).",
                    run,
                    codes[-1],
                    facts["code"],
                )
        record("start", world_size=distributed.world_size(), **facts, **last_start(run))
    try:
        yield
    except distributed.StopTraining as stopped:
        record("stop", why=stopped.reason.by)
        raise
    except UserError as error:
        with contextlib.suppress(UserError):
            record("stop", why=str(error))
        raise
    record("stop", why="finished")


def codes_of_starts(run: Path, step: int) -> list[str]:
    """The "code" of the recorded starts of the save directory `run`, the oldest first.

    Starts that were fully overwritten, by a later start at the same step or before, are left out. step: step of the
    current start.
    """
    remaining: list[dict[str, Any]] = []
    before: dict[int, list[dict[str, Any]]] = {}  # remaining events at each rewind, by its number
    for entry in read(run):
        if entry["event"] == "start":
            remaining = [*(start for start in remaining if start["step"] < entry["step"]), entry]
        elif entry["event"] == "rewind" and "number" in entry:
            before[entry["number"]] = remaining
        elif entry["event"] == "undo":
            remaining = before.get(entry.get("undoes", 0), remaining)
    return [start["code"] for start in remaining if "code" in start and start["step"] < step]


def user_and_host() -> str:
    """user@host of this process."""
    try:
        user = getpass.getuser()
    except (OSError, KeyError):  # the user id has no name, as in many containers
        user = f"uid {os.getuid()}"
    return f"{user}@{socket.gethostname()}"


@functools.cache
def commit() -> str | None:
    """The git commit of this code, with "+" for uncommitted changes; None if unknown. Computed once."""
    return _commit(code_version(ROOT))


def last_start(run: Path) -> dict[str, str | None]:
    """ "commit" (see `commit`) and the scheduler's "job" of the last start of the save directory `run`,
    from env.json; None if unknown.

    Raises:
        RunError: env.json is damaged.
    """
    facts = SavedRun(run).env
    variables = facts.get("variables") or {}
    return {"commit": _commit(facts), "job": environment.slurm_job(variables) or variables.get("EAI_JOB_ID")}


def _commit(facts: Mapping[str, Any]) -> str | None:
    commit_hash = facts.get("commit")
    return commit_hash and commit_hash + ("+" if facts.get("dirty") else "")
