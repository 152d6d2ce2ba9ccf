"""Lines at the end of a file: each whole, on a line of its own, or not at all."""

import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from src.runs.appending import append_line


@pytest.fixture
def file(tmp_path: Path) -> Iterator[tuple[Path, int]]:
    path = tmp_path / "lines"
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
    yield path, descriptor
    os.close(descriptor)


def test_lines_follow_one_another(file: tuple[Path, int]):
    path, descriptor = file
    append_line(descriptor, b"one\n")
    append_line(descriptor, b"two\n")
    assert path.read_bytes() == b"one\ntwo\n"


def test_a_torn_line_stays_on_its_own(file: tuple[Path, int]):
    path, descriptor = file
    os.write(descriptor, b"one\ntw")
    append_line(descriptor, b"three\n")
    assert path.read_bytes() == b"one\ntw\nthree\n"


def test_what_the_disk_took_of_a_line_is_given_back(file: tuple[Path, int]):
    """A limit on the size of files lets a write go half the way, as a full disk does."""
    path, descriptor = file
    append_line(descriptor, b"one\n")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (7, limits[1]))
    try:
        with pytest.raises(OSError, match="No space left on device"):
            append_line(descriptor, b"twenty\n")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_bytes() == b"one\n"
