"""One record for each run in a folder, from its small files, which are read again only if they have changed.
Does not read histories: see `summary`."""

import json
import os
import re
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from src.experiments.config import flatten
from src.files import reading
from src.runs.scores import SCORE_LIST, SCORES, read_score_list
from src.runs.store import CODE_VERSIONS, ENV, EXP_DICT, GROUPS, REMARKS, STATUS, SavedRun
from src.runs.summary import SUMMARY, Summary, summarize
from src.support.read_cache import SETTLED_SECONDS
from src.tables import cache

_READ = (EXP_DICT, GROUPS, ENV, STATUS, SCORES, SCORE_LIST, REMARKS)
_RECORD = "record"
"""The name of a record in the cache."""
_ID = re.compile(r"[0-9a-f]{32}")
_OTHER_HASH = re.compile(r"[0-9a-f]{8,128}")
"""Directory names that other programs use for experiments."""


@dataclass
class RunRecord:
    """The facts of one run."""

    groups: list[str]
    state: str
    """As in status.json, so "running" can be a lost run.
    "haven" if haven wrote the directory, "foreign" if its id is another hash."""
    config: dict[str, Any]
    """The experiment dict by dotted key."""
    summary: Summary
    tags: list[str]
    note: str
    """`tags` and `note` come from a person: see `SavedRun.remarks`."""


class RunIndex:
    """The records of runs in a folder.
    names: all ids, from `list_names`; unread: ids to read (default: all)."""

    def __init__(self, runs: Path, names: Sequence[str], unread: Sequence[str] | None = None) -> None:
        self.runs, self.names = runs, names
        values = cache.read(runs, names if unread is None else unread, [_RECORD])
        self._cached = {name: json.loads(value[_RECORD]) for name, value in values.items()}
        self._changed: dict[str, dict[str, bytes]] = {}

    def save(self) -> None:
        """Cache the changed records."""
        cache.write(self.runs, self._changed, self.names)

    def read(self, run: SavedRun, among: Collection[str] | None = None) -> tuple[list[str], RunRecord | None]:
        """The groups of a run, and its record, or None if no group is in `among`.

        Raises:
            RunError, DataError: a file of the run is damaged or cannot be read.
        """
        with reading(run.path):
            key, is_settled = _file_key(run.path)
            cached = self._cached.get(run.name)
            record = None
            if cached and cached[0] == key:
                record = RunRecord(**{**cached[1], "summary": Summary(**cached[1]["summary"])})
            groups = record.groups if record else _groups(run)
            if among is not None and not any(group in among for group in groups):
                return groups, None
            if record is None:
                record = _read_record(run, groups)
                if is_settled and (record.state not in ("haven", "foreign") or _is_plain(record.summary)):
                    facts = {**vars(record), "summary": vars(record.summary)}
                    self._changed[run.name] = {_RECORD: json.dumps([key, facts]).encode()}
        return groups, record


def list_names(runs: Path) -> list[str]:
    """The ids of the runs in a folder, sorted; also those of other programs, which use other hashes."""
    return sorted(name for name in os.listdir(runs) if _ID.fullmatch(name) or _is_other(runs / name))


def _is_other(path: Path) -> bool:
    return _OTHER_HASH.fullmatch(path.name) is not None and (path / EXP_DICT).exists() and (path / SCORE_LIST).exists()


def _file_key(path: Path) -> tuple[str, bool]:
    """A string that changes whenever one of the files changes,
    and whether the last change is old enough that a new change will have another timestamp.

    Raises:
        OSError: a file cannot be examined.
    """
    newest, parts, folder = 0, [], str(path)
    for name in _READ:
        try:
            info = os.stat(f"{folder}/{name}")
        except FileNotFoundError:
            parts.append("-")
        else:
            parts.append(f"{info.st_size}.{info.st_mtime_ns}.{info.st_ctime_ns}.{info.st_ino}")
            newest = max(newest, info.st_ctime_ns)
    return " ".join(parts), newest <= time.time_ns() - SETTLED_SECONDS * 1e9


def _read_record(run: SavedRun, groups: list[str]) -> RunRecord:
    path = run.path
    written_by_haven = not (path / STATUS).exists() and (path / SCORE_LIST).exists()
    foreign = written_by_haven and run.is_foreign
    status = {"state": "foreign" if foreign else "haven"} if written_by_haven else run.status
    config = flatten(run.foreign_exp if foreign else run.exp)
    summary = summarize(path / SCORES, status.get(SUMMARY))
    if summary.size == 0 and not (path / SCORES).exists() and (path / SCORE_LIST).exists():
        summary.add(read_score_list(path / SCORE_LIST))
    if isinstance(versions := status.get(CODE_VERSIONS), int):
        summary.last[CODE_VERSIONS] = versions
    return RunRecord(groups, status["state"], config, summary, *run.remarks)


def _groups(run: SavedRun) -> list[str]:
    """The recorded groups, and those of the last start."""
    last = run.env.get("groups")
    start_groups = [name for name in last if isinstance(name, str)] if isinstance(last, list) else []
    return list(dict.fromkeys([*run.groups, *start_groups]))


def _is_plain(summary: Summary) -> bool:
    """Whether JSON can store the values of haven's pickle."""
    values = (summary.step, *summary.last.values())
    return all(type(name) is str for name in summary.last) and all(
        type(value) in (int, float, bool, type(None)) for value in values
    )
