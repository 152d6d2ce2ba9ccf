"""Values of save directories are reused only while the directory is unchanged."""

import os
from pathlib import Path

import pytest

from src.files import write_atomic
from src.support import read_cache
from src.support.read_cache import TURNS, ReadCache


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ReadCache[str]:
    """The values of one directory, "a", that was read once."""
    monkeypatch.setattr(read_cache, "SETTLED_SECONDS", 0.0)
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "status.json").write_text("1")
    cache = ReadCache[str](tmp_path)
    cache.save("a", cache.read(["a"])[1], "first")
    return cache


def turns_until_read(cache: ReadCache[str]) -> int:
    """Turns until the value is not reused."""
    return next(turn for turn in range(1, TURNS + 2) if "a" not in cache.read(["a"])[0])


def test_an_unchanged_directory_is_read_again_after_all_turns(cache: ReadCache[str]):
    first = turns_until_read(cache)
    assert first <= TURNS
    assert turns_until_read(cache) == TURNS


def test_a_replaced_file_invalidates_the_value(cache: ReadCache[str], tmp_path: Path):
    turns_until_read(cache)  # so that the next read is not due anyway
    assert cache.read(["a"])[0] == {"a": "first"}
    write_atomic(tmp_path / "a" / "status.json", b"2")
    valid, marks = cache.read(["a"])
    assert valid == {}
    cache.save("a", marks, "second")
    assert cache.read(["a"])[0] == {"a": "second"}


def test_a_directory_that_changed_while_it_was_read_is_not_trusted(cache: ReadCache[str], tmp_path: Path):
    turns_until_read(cache)
    write_atomic(tmp_path / "a" / "status.json", b"2")
    _, marks = cache.read(["a"])
    write_atomic(tmp_path / "a" / "status.json", b"3")
    cache.save("a", marks, "second")
    assert cache.read(["a"])[0] == {}


def test_a_recent_change_is_not_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(read_cache, "SETTLED_SECONDS", 60.0)
    (tmp_path / "a").mkdir()
    cache = ReadCache[str](tmp_path)
    cache.save("a", cache.read(["a"])[1], "first")
    assert cache.read(["a"])[0] == {}


def test_a_removed_directory_is_not_reused(cache: ReadCache[str], tmp_path: Path):
    os.rename(tmp_path / "a", tmp_path / "b")
    assert cache.read(["a", "b"])[0] == {}
