"""Incidents of a run, in <run>/events.jsonl: from its logs (by `log_rules`), its ledger, and the watchdog.

Each incident is recorded once. events.cursors.json has the position up to which each log was read. A log that shrank,
or was replaced, is read from its start. A lost or outdated cursor only costs time: two events with the same log,
offset, rule and line are the same event.
"""

import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from src.errors import RunError
from src.files import read_json, reading, write_json
from src.runs import jsonl_records, ledger
from src.runs.environment import now
from src.runs.history import log_rules

EVENTS = "events.jsonl"
CURSORS = "events.cursors.json"
LONGEST_LINE = 64 * 1024
"""In bytes; longer lines are split."""
SAME_INCIDENT = 64 * 1024
"""Repeated matches of a rule within this many bytes are one event: many ranks report the same failure."""
_PIECE = 1 << 20
_MAX_LINE_CHARACTERS = 500
DIVERGENCE_ADVICE = (
    "Look at the data of this step (`offending/`), or rewind to an earlier checkpoint with a lower learning rate."
)
Event = dict[str, Any]

log = logging.getLogger(__name__)


def scan(run: Path, logs: Sequence[Path], attempt: int = 0, is_complete: bool = False) -> list[Event]:
    """Apply the rules to the lines of `logs` since the last scan. Records and returns the new events.

    attempt: number of the start that the events belong to. is_complete: whether the logs have ended, so that a last
    line without newline counts.

    Raises:
        RunError: the disk refuses, or the save directory is gone.
        DataError: events.jsonl contains a line that is not an event.
    """
    if not any(path.is_file() for path in logs):
        return []
    new: list[Event] = []
    with jsonl_records.open_locked(run / EVENTS) as notes:
        cursors = _read_cursors(run)
        identities = {_identity(event) for event in notes.rows()}

        def note(event: Event) -> None:
            if _identity(event) not in identities:
                new.append({"time": now(), **event, "attempt": attempt})
                notes.append(new[-1])
                identities.add(_identity(event))

        for path in logs:
            _scan_log(run, path, cursors, is_complete, note)
    return new


def note_once(run: Path, *events: Mapping[str, Any]) -> list[Event]:
    """Add each event, unless there is one with the same "incident"; return the added events.

    Raises:
        RunError: the disk refuses.
        DataError: events.jsonl contains a line that is not an event.
    """
    if not events:
        return []
    with jsonl_records.open_locked(run / EVENTS) as notes:
        incidents = {old.get("incident") for old in notes.rows()}
        new = [{"time": now(), **event} for event in events if event["incident"] not in incidents]
        for event in new:
            notes.append(event)
    return new


def scan_ledger(run: Path, attempt: int = 0) -> list[Event]:
    """Record the findings of the divergence detector in ledger.jsonl since the last scan; return the new events.

    attempt: number of the start for findings that do not record it.

    Raises:
        RunError: the disk refuses.
        DataError: events.jsonl contains a line that is not an event.
    """
    events = [
        {
            "rule": str(event.get("kind")),
            "severity": "error" if event.get("action") in ("stop", "rewind") else "warning",
            "line": str(event.get("message")),
            "advice": DIVERGENCE_ADVICE,
            "attempt": event.get("attempt", attempt),
            "step": event.get("step"),
            "incident": f"divergence:{event.get('when')}:{event.get('step')}:{event.get('kind')}",
        }
        for event in ledger.read(run)
        if event["event"] == "divergence"
    ]
    return note_once(run, *events)


def latest_problem(run: Path, attempt: int) -> Event | None:
    """The last unresolved warning or error of the start `attempt`, if any.
    A cause takes precedence over its consequences.

    Raises:
        DataError, RunError: events.jsonl is damaged, or cannot be read.
    """
    last = None
    for event in jsonl_records.rows(run / EVENTS):
        if event.get("attempt") != attempt:
            continue
        if event.get("rule") == "recovered":
            last = None if last and last.get("rule") == "hung" else last
        elif event.get("severity") not in ("warning", "error") or event.get("rule") in ("failed", "dead"):
            continue
        elif last is None or log_rules.is_aftermath(last.get("rule")) or not log_rules.is_aftermath(event.get("rule")):
            last = event
    return last


def describe(event: Mapping[str, Any]) -> str:
    """One short line about an event, for the status table."""
    line = str(event.get("line", ""))
    return f"{event.get('rule')}: {line if len(line) <= 120 else line[:117] + '...'}"


def _identity(event: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(event.get(key) for key in ("log", "offset", "rule", "line", "incident"))


def _scan_log(run: Path, path: Path, cursors: dict[str, Any], is_complete: bool, note: Callable[[Event], None]) -> None:
    """Scan one log from its cursor on, and move the cursor."""
    name = str(path.relative_to(run.parent)) if path.is_relative_to(run.parent) else str(path)
    before = json.dumps(cursors.get(name))
    try:
        with reading(path), open(path, "rb") as file:
            facts = os.fstat(file.fileno())
            cursor = cursors.get(name)
            if cursor is None or facts.st_ino != cursor["inode"] or facts.st_size < cursor["offset"]:
                cursor = cursors[name] = {"offset": 0, "inode": facts.st_ino, "last": {}}
            _match_new_lines(file, name, cursor, is_complete, note)
    except FileNotFoundError:
        return
    except RunError as error:
        log.warning("%s", error)
        return
    if json.dumps(cursor) != before:
        write_json(run / CURSORS, cursors)


def _match_new_lines(
    file: Any, name: str, cursor: dict[str, Any], is_complete: bool, note: Callable[[Event], None]
) -> None:
    """Match every complete line from the cursor on."""
    last = cursor["last"]
    for start, text in _pieces(file, cursor["offset"], is_complete):
        for begin, end, rule in log_rules.matches(text):
            offset = start + begin
            previous = last.get(rule.name)
            last[rule.name] = offset
            if previous is not None and offset - previous < SAME_INCIDENT:
                continue
            event = {
                "rule": rule.name,
                "severity": rule.severity,
                "line": _clean_line(text[begin:end]),
                "offset": offset,
            }
            note({**event, "log": name, "advice": rule.advice})
        cursor["offset"] = start + len(text)


def _pieces(file: Any, offset: int, is_complete: bool) -> Iterator[tuple[int, bytes]]:
    """(offset, complete lines) in pieces of at most a MiB, from `offset` on.
    A line without newline counts if `is_complete`, or if it is too long."""
    while True:
        text = os.pread(file.fileno(), _PIECE, offset)
        if not text:
            return
        complete_bytes = max(text.rfind(b"\n"), text.rfind(b"\r")) + 1
        if not complete_bytes and len(text) > LONGEST_LINE:
            complete_bytes = LONGEST_LINE
        elif is_complete and len(text) < _PIECE:
            complete_bytes = len(text)
        if not complete_bytes:
            return
        yield offset, text[:complete_bytes]
        offset += complete_bytes


def _clean_line(text: bytes) -> str:
    decoded = text.decode("utf-8", errors="replace")
    clean = "".join(c if c.isprintable() else " " for c in decoded).strip()
    return clean if len(clean) <= _MAX_LINE_CHARACTERS else clean[: _MAX_LINE_CHARACTERS - 3] + "..."


def _read_cursors(run: Path) -> dict[str, Any]:
    """Cursors by log. Damaged cursors are ignored: the log is then read again, and no event is recorded twice."""
    if not (run / CURSORS).exists():
        return {}
    try:
        cursors = read_json(run / CURSORS, RunError)
    except RunError as error:
        log.warning("%s The logs are read from their start.", error)
        return {}

    def is_valid(cursor: Any) -> bool:
        kinds = {"offset": int, "inode": int, "last": dict}
        return isinstance(cursor, dict) and all(isinstance(cursor.get(key), kind) for key, kind in kinds.items())

    return {name: cursor for name, cursor in cursors.items() if is_valid(cursor)} if isinstance(cursors, dict) else {}
