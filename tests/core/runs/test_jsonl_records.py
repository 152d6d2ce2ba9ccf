"""Lines at the end of a file: each whole, on a line of its own, or not at all."""

import json
import os
import resource
from pathlib import Path

import pytest

from src.errors import DataError, RunError
from src.runs import jsonl_records
from src.runs.jsonl_records import append, lines_from_end, read_appended, truncate_after

DURABLE = pytest.mark.parametrize("durable", [True, False])


@DURABLE
def test_lines_follow_one_another(tmp_path: Path, durable: bool):
    append(tmp_path / "lines", [{"a": 1}, {"b": 2}], durable)
    append(tmp_path / "lines", [{"c": 3}], durable)
    assert (tmp_path / "lines").read_text() == '{"a": 1}\n{"b": 2}\n{"c": 3}\n'


@DURABLE
def test_a_torn_line_stays_on_its_own(tmp_path: Path, durable: bool):
    (tmp_path / "lines").write_text('{"a": 1}\n{"b"')
    append(tmp_path / "lines", [{"c": 3}], durable)
    assert (tmp_path / "lines").read_text() == '{"a": 1}\n{"b"\n{"c": 3}\n'


@DURABLE
def test_a_partly_written_line_is_removed(tmp_path: Path, durable: bool):
    """A limit on the size of files lets a write go half the way, as a full disk does."""
    append(tmp_path / "lines", [{"a": 1}], durable)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (12, limits[1]))
    try:
        with pytest.raises(RunError, match="No space left on device"):
            append(tmp_path / "lines", [{"twenty": 20}], durable)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (tmp_path / "lines").read_text() == '{"a": 1}\n'


@DURABLE
def test_only_durable_appends_sync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, durable: bool):
    synced_files = []
    monkeypatch.setattr(os, "fsync", synced_files.append)
    append(tmp_path / "lines", [{"a": 1}], durable)
    assert len(synced_files) == 2 * durable, "the file, and the folder in which it is new"


def test_nan_is_refused_unless_allowed(tmp_path: Path):
    with pytest.raises(ValueError, match="Out of range float values"):
        append(tmp_path / "lines", [{"a": float("nan")}])
    append(tmp_path / "lines", [{"a": float("nan")}], allow_nan=True)
    assert (tmp_path / "lines").read_text() == '{"a": NaN}\n'


@pytest.mark.parametrize("window", [1, 7, 64, 2**16])
@pytest.mark.parametrize(
    "content", [b"", b"torn", b"one\n", b"one\ntwo\n", b"one\n\ntwo longer than a window\nthree\ntorn", b"\n\n"]
)
def test_lines_from_the_end_are_the_lines_backwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes, window: int
):
    monkeypatch.setattr(jsonl_records, "_WINDOW", window)
    (tmp_path / "lines").write_bytes(content)
    lines = list(lines_from_end(tmp_path / "lines"))
    assert [line for _, line in lines] == content.split(b"\n")[:-1][::-1]
    assert all(content[:end].endswith(line + b"\n") for end, line in lines)
    assert list(lines_from_end(tmp_path / "missing")) == []


def test_a_file_is_cut_after_a_step(tmp_path: Path):
    path = tmp_path / "lines"
    append(path, [{"step": step} for step in (1, 2, 2, 5)])
    for step, expected_steps in ((5, [1, 2, 2, 5]), (4, [1, 2, 2]), (1, [1]), (0, [])):
        with open(path, "a") as file:
            file.write('{"step"')
        truncate_after(path, step, "a record")
        assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == expected_steps
    path.write_text("[1]\n")
    with pytest.raises(DataError, match=r"lines: not a record: '\[1\]'. Remove this line."):
        truncate_after(path, 1, "a record")
    truncate_after(tmp_path / "missing", 1, "a record")


def test_only_new_lines_are_read(tmp_path: Path):
    path = tmp_path / "lines"
    assert read_appended(path).lines == b""
    path.write_bytes(b"x" * 9000 + b"\n")
    first = read_appended(path)
    with open(path, "ab") as file:
        file.write(b"new\nto")
    second = read_appended(path, first.end, first.tail)
    assert (second.start, second.lines) == (9001, b"new\n")
    assert read_appended(path, second.end, second.tail) == (second.end, b"", second.tail)
    path.write_bytes(b"y" * 9000 + b"\n")
    assert read_appended(path, second.end, second.tail) == read_appended(path)
