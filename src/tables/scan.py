"""What each save directory in a folder says for a table, read again only where its files have changed."""

import json
import os
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self, get_args

from src.errors import ConfigError, RunError
from src.experiments.identity import check_values, exp_id
from src.files import read_json, reading
from src.runs.metadata import ENV, EXP_DICT, GROUPS, STATUS, State, flat, read_exp_dict, read_groups, read_status
from src.runs.scores import SCORE_LIST, SCORES, read_score_list
from src.runs.summary import SUMMARY, Summary, parsed, summarized
from src.tables.index import Index, Record

SETTLED_SECONDS = 2.0
"""A file that changed more recently may change once more without a trace: clocks of file systems tick in milliseconds, some in seconds."""
_READ = (EXP_DICT, GROUPS, ENV, STATUS, SCORES, SCORE_LIST)
_PIECE = 1 << 14
_ID = re.compile(r"[0-9a-f]{32}")


@dataclass
class Found:
    """What the files of one run say."""

    groups: list[str]
    state: str
    """As in status.json, so that "running" may be a run that was lost; "haven" where haven wrote the directory."""
    config: dict[str, Any]
    """The experiment dict by dotted key."""
    summary: Summary


class Scan:
    """A context manager over the runs in a folder; what was read is kept in its index when it is left."""

    def __init__(self, runs: Path) -> None:
        self.runs = runs
        self.names = sorted(name for name in os.listdir(runs) if _ID.fullmatch(name))
        self._index = Index(runs)
        self._changes: dict[str, Record] = {}
        self._known: dict[str, Record] = {}

    def __enter__(self) -> Self:
        self._index.__enter__()
        self._known = self._index.records("run")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._index.keep("run", self._changes, self._known.keys() - set(self.names))
        self._index.__exit__(kind, error, trace)

    def read(self, name: str, group: str | None = None) -> tuple[list[str], Found | None]:
        """The groups that asked for a run, and what it says; None unless it is of `group`, if one is given.

        Raises:
            RunError, DataError: a file of it is damaged or cannot be read.
        """
        path = self.runs / name
        with reading(path):
            return self._read(path, name, group)

    def _read(self, path: Path, name: str, group: str | None) -> tuple[list[str], Found | None]:
        key, settled = file_key(path, _READ)
        known = self._known.get(name)
        if known is not None and known.key == key:
            groups, state, config, summary = known.body
            if group is not None and group not in groups:
                return groups, None
            if state is not None:
                return groups, Found(groups, state, config, Summary(*summary))
        groups = _groups(path)
        if group is not None and group not in groups:
            self._keep(name, key if settled else "", [groups, None, None, None])
            return groups, None
        found = _found(path, groups, Summary(*known.body[3]) if known is not None and known.body[3] else None)
        if found.state != "haven" or _is_plain(found.summary):
            self._keep(name, key if settled else "", [groups, found.state, found.config, _listed(found.summary)])
        return groups, found

    def _keep(self, name: str, key: str, body: list[Any]) -> None:
        """key: "" where the files may yet change without a trace: the summary is still good to go on from."""
        self._changes[name] = Record(key, body)


def file_key(path: Path, names: Sequence[str]) -> tuple[str, bool]:
    """What changes whenever one of the files does; and whether none has changed so recently that it may not do so the next time.

    Raises:
        OSError: one cannot be looked at.
    """
    now, newest, parts, folder = time.time_ns(), 0, [], str(path)
    for name in names:
        try:
            seen = os.stat(f"{folder}/{name}")
        except FileNotFoundError:
            parts.append("-")
        else:
            parts.append(f"{seen.st_size}.{seen.st_mtime_ns}.{seen.st_ctime_ns}.{seen.st_ino}")
            newest = max(newest, seen.st_ctime_ns)
    return " ".join(parts), newest <= now - SETTLED_SECONDS * 1e9


def _found(path: Path, groups: list[str], known: Summary | None) -> Found:
    folder = str(path)
    status = _loaded(f"{folder}/{STATUS}", json.loads)
    if not isinstance(status, dict) or status.get("state") not in get_args(State):
        written_by_haven = not (path / STATUS).exists() and (path / SCORE_LIST).exists()
        status = {"state": "haven"} if written_by_haven else read_status(path)
    config = flat(_experiment(path, folder))
    summary = summarized(path / SCORES, parsed(status.get(SUMMARY)) or known)
    if summary.size == 0 and not (path / SCORES).exists() and (path / SCORE_LIST).exists():
        summary.add(read_score_list(path / SCORE_LIST))
    return Found(groups, status["state"], config, summary)


def _experiment(path: Path, folder: str) -> dict[str, Any]:
    exp = _loaded(f"{folder}/{EXP_DICT}", json.loads)
    try:
        if isinstance(exp, dict):
            check_values(exp, "")
            if exp_id(exp) == path.name:
                return exp
    except ConfigError:
        pass
    return read_exp_dict(path)  # which can tell what is wrong


def _groups(path: Path) -> list[str]:
    """The groups that asked for this run: those noted, and that of its last start."""
    import orjson

    noted = _loaded(f"{path}/{GROUPS}", orjson.loads)
    groups = [name for name in noted if isinstance(name, str)] if isinstance(noted, list) else read_groups(path)
    env = _loaded(f"{path}/{ENV}", orjson.loads)
    if env is None and (path / ENV).exists():
        env = read_json(path / ENV, RunError)
    last = env.get("groups") if isinstance(env, dict) else None
    groups += [name for name in last if isinstance(name, str) and name not in groups] if isinstance(last, list) else []
    return groups


def _loaded(path: str, loads: Callable[[bytes], Any]) -> Any:
    """A JSON value, read at several times the speed of `read_json`; None where that must have a look, as it can tell what is wrong."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return None
    try:
        text = part = os.read(descriptor, _PIECE)
        while len(part) == _PIECE:
            part = os.read(descriptor, _PIECE)
            text += part
        return loads(text)
    except (OSError, ValueError, RecursionError):
        return None
    finally:
        os.close(descriptor)


def _listed(summary: Summary) -> list[Any]:
    return [summary.size, summary.tail, summary.step, summary.last]


def _is_plain(summary: Summary) -> bool:
    """Whether JSON gives back what haven's pickle held."""
    values = (summary.step, *summary.last.values())
    return all(type(name) is str for name in summary.last) and all(type(value) in (int, float, bool, type(None)) for value in values)
