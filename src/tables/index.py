"""<runs>/index.sqlite: what was read of the save directories, so that nothing is read twice. A cache: without it, every answer is the same.

It keeps a rollback journal, not a write-ahead log, since that needs memory shared by all that use it: on a cluster several machines do.
Each record carries a checksum: of a file that was damaged, no record is believed.
"""

import contextlib
import json
import logging
import sqlite3
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self
from urllib.parse import quote

INDEX = "index.sqlite"
VERSION = 1
"""Of the tables and of what is in them: an index of any other version is made anew."""
WAIT_SECONDS = 5.0
"""How long to wait for another process that writes."""
_TABLES = """
CREATE TABLE records (kind TEXT, name TEXT, key BLOB, body BLOB, crc INTEGER, PRIMARY KEY (kind, name));
CREATE TABLE columns (name TEXT, score TEXT, length INTEGER, data BLOB, crc INTEGER, PRIMARY KEY (name, score));
"""
# Result codes of SQLite: a wrong statement (so a table is not there), a damaged file, no database.
_DAMAGED = {1, 11, 26}

log = logging.getLogger(__name__)


class Record(NamedTuple):
    """What is known of one run."""

    key: str
    """Of the files that it was read from (`scan`): another key, another content."""
    body: Any
    """JSON values."""


class Index:
    """A context manager. Nothing here raises: an index that cannot be used holds nothing and keeps nothing."""

    def __init__(self, runs: Path) -> None:
        self.path = runs / INDEX
        self._database: sqlite3.Connection | None = None

    def __enter__(self) -> Self:
        for last in (False, True):
            try:
                self._database = self._connected()
                break
            except sqlite3.Error as error:
                if last or not _is_damaged(error) or not self._removed():
                    self._give_up(error)
                    break
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._database is not None:
            self._database.close()
            self._database = None

    def records(self, kind: str, names: Sequence[str] | None = None) -> dict[str, Record]:
        """All records of a kind, or those of `names`, by the name of the run."""
        found = {}
        chosen = None if names is None else set(names)
        for name, key, body, crc in self._select("SELECT name, key, body, crc FROM records WHERE kind = ?", [kind]):
            if (chosen is None or name.decode() in chosen) and crc == _checksum(kind.encode(), name, key, body):
                found[name.decode()] = Record(key.decode(), json.loads(body))
        return found

    def columns(self, names: Sequence[str], scores: Sequence[str]) -> dict[tuple[str, str], bytes]:
        """(run, score) -> what `keep_columns` was given."""
        found = {}
        for start in range(0, len(names), 500):
            some = names[start : start + 500]
            query = f"SELECT name, score, data, crc FROM columns WHERE name IN ({_marks(some)}) AND score IN ({_marks(scores)})"
            for name, score, data, crc in self._select(query, [*some, *scores]):
                if crc == _checksum(name, score, data):
                    found[name.decode(), score.decode()] = data
        return found

    def keep(self, kind: str, records: Mapping[str, Record], gone: Iterable[str] = ()) -> None:
        """Note records, and forget the runs that are `gone`."""
        rows = []
        for name, record in records.items():
            key, body = record.key.encode(), json.dumps(record.body).encode()
            rows.append((kind, name, key, body, _checksum(kind.encode(), name.encode(), key, body)))
        with self._writing(bool(rows) or bool(gone)) as database:
            if database is not None:
                database.executemany("INSERT OR REPLACE INTO records VALUES (?, ?, ?, ?, ?)", rows)
                for name in gone:
                    database.execute("DELETE FROM records WHERE name = ?", [name])
                    database.execute("DELETE FROM columns WHERE name = ?", [name])

    def keep_columns(self, records: Mapping[str, Record], columns: Mapping[str, Mapping[str, bytes]]) -> None:
        """Note the "curves" records of runs together with all columns of each, by score; older columns of these runs are forgotten."""
        rows = [(name, score, data) for name, of_run in columns.items() for score, data in of_run.items()]
        with self._writing(bool(records)) as database:
            if database is not None:
                for name, record in records.items():
                    key, body = record.key.encode(), json.dumps(record.body).encode()
                    row = ("curves", name, key, body, _checksum(b"curves", name.encode(), key, body))
                    database.execute("INSERT OR REPLACE INTO records VALUES (?, ?, ?, ?, ?)", row)
                    database.execute("DELETE FROM columns WHERE name = ?", [name])
                sums = (_checksum(name.encode(), score.encode(), data) for name, score, data in rows)
                full = [(name, score, len(data), data, crc) for (name, score, data), crc in zip(rows, sums, strict=True)]
                database.executemany("INSERT INTO columns VALUES (?, ?, ?, ?, ?)", full)

    def _connected(self) -> sqlite3.Connection:
        database = sqlite3.connect(f"file:{quote(str(self.path))}?mode=rwc", uri=True, timeout=WAIT_SECONDS, isolation_level=None)
        try:
            database.text_factory = bytes
            database.execute("PRAGMA synchronous = OFF")  # what a power cut damages is noticed, and read again
            if _version(database) != VERSION:
                _create(database)
        except BaseException:
            database.close()
            raise
        return database

    def _select(self, query: str, values: Sequence[str]) -> list[tuple[Any, ...]]:
        if self._database is None:
            return []
        try:
            return self._database.execute(query, values).fetchall()
        except sqlite3.Error as error:
            self._give_up(error)
            return []

    @contextlib.contextmanager
    def _writing(self, wanted: bool) -> Iterator[sqlite3.Connection | None]:
        """One transaction: all of it or nothing."""
        database = self._database
        if database is None or not wanted:
            yield None
            return
        try:
            database.execute("BEGIN IMMEDIATE")
            yield database
            database.execute("COMMIT")
        except sqlite3.Error as error:
            self._give_up(error)

    def _give_up(self, error: sqlite3.Error) -> None:
        """Go on without it. A damaged file is removed, so that the next one who looks makes it anew."""
        if self._database is not None:
            self._database.close()  # which rolls back
            self._database = None
        if _is_damaged(error):
            self._removed()
        forbidden = _code(error) in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN)
        log.log(logging.INFO if forbidden else logging.WARNING, "%s: not used: %s. Everything is read from the runs.", self.path, error)

    def _removed(self) -> bool:
        try:
            for path in (self.path, self.path.with_name(f"{INDEX}-journal")):
                path.unlink(missing_ok=True)
        except OSError:
            return False
        return True


def _create(database: sqlite3.Connection) -> None:
    """The tables of an empty file; another process may do so at the same time.

    Raises:
        sqlite3.DatabaseError: it holds tables of another version.
    """
    database.execute("BEGIN IMMEDIATE")
    if _version(database) != VERSION:
        if database.execute("SELECT count(*) FROM sqlite_master").fetchone() != (0,):
            raise _stale(f"its version is {_version(database)}, not {VERSION}")
        for statement in _TABLES.split(";"):
            database.execute(statement)
        database.execute(f"PRAGMA user_version = {VERSION}")
    database.execute("COMMIT")


def _version(database: sqlite3.Connection) -> int:
    return database.execute("PRAGMA user_version").fetchone()[0]


def _stale(text: str) -> sqlite3.DatabaseError:
    error = sqlite3.DatabaseError(text)
    error.sqlite_errorcode = sqlite3.SQLITE_NOTADB
    return error


def _code(error: sqlite3.Error) -> int:
    return getattr(error, "sqlite_errorcode", 0) & 0xFF


def _is_damaged(error: sqlite3.Error) -> bool:
    return _code(error) in _DAMAGED


def _checksum(*parts: bytes) -> int:
    crc = 0
    for part in parts:
        crc = zlib.crc32(part, zlib.crc32(len(part).to_bytes(8, "big"), crc))
    return crc


def _marks(values: Sequence[str]) -> str:
    return ", ".join("?" * len(values))
