"""<runs>/index.sqlite: a cache of parsed facts about runs. Results do not depend on it.

It uses a rollback journal, since a write-ahead log needs shared memory and a cluster has several machines. Each value
has a checksum. A file that is damaged, or of another version, is deleted and recreated.
"""

import contextlib
import json
import logging
import sqlite3
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar
from urllib.parse import quote

CACHE = "index.sqlite"
VERSION = 4
WAIT_SECONDS = 5.0
"""Timeout for another process that writes."""
_TABLE = "CREATE TABLE IF NOT EXISTS cached (run TEXT, name TEXT, data BLOB, crc INTEGER, PRIMARY KEY (run, name))"
_SELECT = """SELECT run, name, data, crc FROM cached
WHERE run IN (SELECT value FROM json_each(?)) AND name IN (SELECT value FROM json_each(?))"""
# Result codes of SQLite: an invalid statement (as a table is missing), a damaged file, not a database.
_DAMAGE_CODES = {1, 11, 26}
_FORBIDDEN = {sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN}
Values = dict[str, dict[str, bytes]]
"""Values by run and name."""
Result = TypeVar("Result")

log = logging.getLogger(__name__)


def read(folder: Path, runs: Sequence[str], names: Sequence[str]) -> Values:
    """The cached values `names` of the runs with the ids `runs` in `folder`. Never raises."""

    def select(database: sqlite3.Connection) -> Values:
        result: Values = {}
        for run, name, data, crc in database.execute(_SELECT, [json.dumps(runs), json.dumps(names)]):
            if crc == _checksum(run, name, data):
                result.setdefault(run.decode(), {})[name.decode()] = data
        return result

    return _use(folder / CACHE, select) or {}


def write(folder: Path, values: Mapping[str, Mapping[str, bytes]], existing: Sequence[str] | None = None) -> None:
    """Cache values by run and name; delete runs that are not in `existing`, if given. Never raises."""
    rows = [(run, name, data) for run, values_by_name in values.items() for name, data in values_by_name.items()]

    def replace(database: sqlite3.Connection) -> None:
        database.execute("BEGIN IMMEDIATE")
        if existing is not None:
            database.execute(
                "DELETE FROM cached WHERE run NOT IN (SELECT value FROM json_each(?))", [json.dumps(existing)]
            )
        rows_with_checksums = (
            (run, name, data, _checksum(run.encode(), name.encode(), data)) for run, name, data in rows
        )
        database.executemany("INSERT OR REPLACE INTO cached VALUES (?, ?, ?, ?)", rows_with_checksums)
        database.execute("COMMIT")

    if rows:
        _use(folder / CACHE, replace)


def _use(path: Path, work: Callable[[sqlite3.Connection], Result]) -> Result | None:
    """The result of `work`; None if the file cannot be used."""
    for attempt in (1, 2):
        try:
            with contextlib.closing(_connect(path)) as database:
                return work(database)
        except sqlite3.Error as error:
            code = getattr(error, "sqlite_errorcode", 0) & 0xFF
            if code not in _DAMAGE_CODES or not _delete(path) or attempt == 2:
                level = logging.INFO if code in _FORBIDDEN else logging.WARNING
                log.log(level, "%s: not used: %s. Everything is read from the runs.", path, error)
                return None
    return None


def _connect(path: Path) -> sqlite3.Connection:
    database = sqlite3.connect(
        f"file:{quote(str(path))}?mode=rwc", uri=True, timeout=WAIT_SECONDS, isolation_level=None
    )
    try:
        database.text_factory = bytes
        database.execute("PRAGMA synchronous = OFF")  # checksums detect damage after a power cut
        ((version,),) = database.execute("PRAGMA user_version")
        if version not in (0, VERSION):
            error = sqlite3.DatabaseError(f"its version is {version}, not {VERSION}")
            error.sqlite_errorcode = sqlite3.SQLITE_NOTADB
            raise error
        if version == 0:
            database.execute(_TABLE)
            database.execute(f"PRAGMA user_version = {VERSION}")
    except BaseException:
        database.close()
        raise
    return database


def _delete(path: Path) -> bool:
    try:
        for file in (path, path.with_name(f"{CACHE}-journal")):
            file.unlink(missing_ok=True)
    except OSError:
        return False
    return True


def _checksum(*parts: bytes) -> int:
    crc = 0
    for part in parts:
        crc = zlib.crc32(part, zlib.crc32(len(part).to_bytes(8, "big"), crc))
    return crc
