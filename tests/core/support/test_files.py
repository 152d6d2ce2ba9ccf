"""Whole files or none: under errors, a full disk, and SIGKILL of real writers at any moment."""

import contextlib
import errno
import json
import os
import random
import re
import shutil
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import numpy
import pytest
from safetensors.numpy import save_file

from src import files
from src.errors import CheckpointError, DataError, RunError
from src.support import renaming
from tests.conftest import ROOT


def fill(final: Path, contents: dict[str, str], facts: dict | None = None) -> None:
    with files.new_directory(final, facts) as beside:
        for name, text in contents.items():
            (beside / name).parent.mkdir(parents=True, exist_ok=True)
            (beside / name).write_text(text)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_folder_appears_with_its_manifest_and_no_leftovers(tmp_path):
    facts = {"made": "by hand"}
    with files.new_directory(tmp_path / "a" / "b", facts) as beside:
        (beside / "x").write_text("12345")
        (beside / "in").mkdir()
        (beside / "in" / "y").write_text("")
        facts["rows"] = 1
        assert not (tmp_path / "a" / "b").exists()
    manifest = files.read_manifest(tmp_path / "a" / "b", DataError)
    empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    assert manifest["files"]["in/y"] == {"bytes": 0, "sha256": empty}
    assert (manifest["made"], manifest["rows"], manifest["files"]["x"]["bytes"]) == ("by hand", 1, 5)
    assert names(tmp_path / "a") == ["b"]
    assert names(tmp_path / "a" / "b") == ["in", "manifest.json", "x"]


def test_a_copied_manifest_is_replaced(tmp_path: Path):
    """As when a folder is made of another one's files, such as that of an export."""
    with files.new_directory(tmp_path / "one") as folder:
        (folder / "inner").mkdir()
        (folder / "inner" / "manifest.json").write_text("of somebody else")
    with files.new_directory(tmp_path / "two") as folder:
        shutil.copytree(tmp_path / "one", folder, dirs_exist_ok=True)
    assert files.defect(tmp_path / "two") is None
    assert list(files.read_json(tmp_path / "two" / "manifest.json", RunError)["files"]) == ["inner/manifest.json"]


def test_an_older_folder_is_replaced_completely(tmp_path):
    fill(tmp_path / "a", {"old": "1", "same": "1"})
    fill(tmp_path / "a", {"new": "2", "same": "2"})
    assert names(tmp_path) == ["a"]
    assert names(tmp_path / "a") == ["manifest.json", "new", "same"]
    assert files.defect(tmp_path / "a") is None


def test_a_link_stays_and_its_target_is_replaced(tmp_path):
    fill(tmp_path / "disk" / "a", {"x": "old"})
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "a")
    fill(tmp_path / "link", {"x": "new"})
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "disk" / "a" / "x").read_text() == "new"
    assert names(tmp_path / "disk") == ["a"]


def test_after_an_error_all_is_as_it_was(tmp_path):
    fill(tmp_path / "a", {"x": "old"})

    def fail(final):
        with files.new_directory(final) as beside:
            (beside / "x").write_text("half")
            raise KeyboardInterrupt

    for final in (tmp_path / "a", tmp_path / "b"):
        with pytest.raises(KeyboardInterrupt):
            fail(final)
    assert names(tmp_path) == ["a"]
    assert (tmp_path / "a" / "x").read_text() == "old"


def test_a_file_is_not_replaced_by_a_folder(tmp_path):
    (tmp_path / "a").write_text("mine")
    with pytest.raises(RunError, match=r"/a: cannot write: Not a directory\.$"):
        fill(tmp_path / "a", {"x": "new"})
    assert (tmp_path / "a").read_text() == "mine"
    assert names(tmp_path) == ["a"]


# ---- where the system cannot exchange two names


@pytest.fixture
def without_exchange(monkeypatch):
    """The C library of a system that has no renameat2."""
    import ctypes

    class OldLibrary:
        def __init__(self, name: None, use_errno: bool) -> None:
            del name, use_errno

    monkeypatch.setattr(ctypes, "CDLL", OldLibrary)


@pytest.mark.usefixtures("without_exchange")
def test_two_renames_replace_a_folder_too(tmp_path):
    fill(tmp_path / "a", {"x": "old"})
    fill(tmp_path / "a", {"x": "new"})
    assert (tmp_path / "a" / "x").read_text() == "new"
    assert names(tmp_path) == ["a"]


@pytest.mark.usefixtures("without_exchange")
def test_the_older_folder_comes_back_when_the_second_rename_fails(tmp_path, monkeypatch):
    fill(tmp_path / "a", {"x": "old"})
    rename, calls = os.rename, []

    def flaky(source, target):
        calls.append(source)
        if len(calls) == 3:  # first try, the old one away, the new one in
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        rename(source, target)

    monkeypatch.setattr(os, "rename", flaky)
    with pytest.raises(RunError, match=r"/a: cannot write: Input/output error"):
        fill(tmp_path / "a", {"x": "new"})
    assert len(calls) == 4
    assert (tmp_path / "a" / "x").read_text() == "old"
    assert names(tmp_path) == ["a"]


def test_a_refused_exchange_differs_from_an_unsupported_one(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"No such file or directory: .*/b"):
        renaming._exchange(tmp_path, tmp_path / "b")


# ---- what killed writers leave


def test_leftovers_of_the_dead_are_swept_and_nothing_else(tmp_path):
    for name in (
        ".a.0123abcd",
        ".a.0123abcd.old",
        ".b.0123abcd",
        ".a.0123abc",
        ".a.0123abcdef",
        ".aa.0123abcd",
        "a.0123abcd",
    ):
        (tmp_path / name / "in").mkdir(parents=True)
    fill(tmp_path / "a", {"x": "1"})
    assert ".a.0123abcd.old" in names(tmp_path), "the only copy of an older folder must stay until there is a new one"
    fill(tmp_path / "a", {"x": "2"})
    assert names(tmp_path) == [".a.0123abc", ".a.0123abcdef", ".aa.0123abcd", ".b.0123abcd", "a", "a.0123abcd"]


def test_a_live_writer_is_not_swept(tmp_path):
    """In this process and in another one."""
    (tmp_path / "writer.py").write_text(
        "import sys; from pathlib import Path; from src.files import new_directory\n"
        "with new_directory(Path(sys.argv[1])) as beside:\n"
        "    print(beside.name, flush=True); input(); (beside / 'x').write_text('other')\n"
    )
    with start(tmp_path / "writer.py", tmp_path / "a") as other, files.new_directory(tmp_path / "a") as ours:
        theirs = other.stdout.readline().strip()
        fill(tmp_path / "a", {"x": "third"})
        assert names(tmp_path) == sorted([theirs, ours.name, "a", "writer.py"])
        other.communicate("\n", timeout=300)
        assert other.returncode == 0
        assert (tmp_path / "a" / "x").read_text() == "other"
        (ours / "x").write_text("ours")
    assert (tmp_path / "a" / "x").read_text() == "ours"
    assert names(tmp_path) == ["a", "writer.py"]


# ---- SIGKILL

WRITE_FOLDERS = """
    import sys
    from pathlib import Path
    from src.files import new_directory
    for turn in range(1, 1_000_000):
        with new_directory(Path(sys.argv[1])) as beside:
            for name in ("x", "y"):
                (beside / name).write_text(f"{turn}\\n" * 20_000)
        print(turn, flush=True)
"""
WRITE_FILES = """
    import sys
    from pathlib import Path
    from src.files import write_atomic
    for turn in range(1, 1_000_000):
        write_atomic(Path(sys.argv[1]), f"{turn:8}\\n" * 20_000)
        print(turn, flush=True)
"""


@contextlib.contextmanager
def start(script: Path, target: Path):
    writer = subprocess.Popen(
        [sys.executable, script, target],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with writer:
        try:
            yield writer
        finally:
            writer.kill()


def kill_at_a_random_moment(code: str, target: Path, chance: random.Random) -> int:
    """Let a writer of `target` finish a turn, kill it a little later, and give the last turn that it has told of."""
    script = target.parent / "writer.py"
    script.write_text(textwrap.dedent(code))
    with start(script, target) as writer:
        line = writer.stdout.readline()
        time.sleep(chance.uniform(0, 0.02))
        writer.kill()
        line += writer.stdout.read()
    return int(line.splitlines()[-1])


@pytest.mark.slow
def test_a_killed_writer_leaves_the_old_folder_or_the_new_one(tmp_path):
    """Thirty kills; each time the folder is there, whole, of the last turn told or the one after, and leftovers do not
    pile up."""
    chance, num_leftovers = random.Random(0), 0
    for _ in range(30):
        turn = kill_at_a_random_moment(WRITE_FOLDERS, tmp_path / "a", chance)
        assert files.defect(tmp_path / "a") is None
        x, y = ((tmp_path / "a" / name).read_text() for name in ("x", "y"))
        assert x == y
        assert int(x.split("\n", 1)[0]) in {turn, turn + 1}
        temporary_names = [name for name in names(tmp_path) if name.startswith(".a.")]
        assert len(temporary_names) <= 1
        num_leftovers += len(temporary_names)
    assert num_leftovers > 0, "no kill met a writer at work, so nothing was tested"


def test_a_reader_always_finds_a_folder(tmp_path):
    """A folder that is replaced again and again is never absent."""
    (tmp_path / "writer.py").write_text(textwrap.dedent(WRITE_FOLDERS))
    with start(tmp_path / "writer.py", tmp_path / "a") as writer:
        writer.stdout.readline()
        reads, changes = 0, 0
        while changes < 30:
            now = os.stat(tmp_path / "a").st_ino
            changes += now != reads
            reads = now
            assert writer.poll() is None


@pytest.mark.slow
def test_a_killed_writer_leaves_the_old_file_or_the_new_one(tmp_path):
    chance = random.Random(0)
    for _ in range(30):
        turn = kill_at_a_random_moment(WRITE_FILES, tmp_path / "a", chance)
        lines = (tmp_path / "a").read_text().splitlines()
        assert len(lines) == 20_000
        assert len(set(lines)) == 1
        assert int(lines[0]) in {turn, turn + 1}


# ---- a full disk


@pytest.fixture
def small_disk(tmp_path):
    """A file system of one megabyte."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", disk]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount a tmpfs")
    try:
        yield disk
    finally:
        subprocess.run(["umount", disk], check=True)


def test_a_full_disk_is_one_line_and_loses_nothing(small_disk):
    fill(small_disk / "a", {"x": "old"})
    files.write_atomic(small_disk / "f", "old")
    with pytest.raises(
        RunError, match=r"/a: cannot write: No space left on device\. Nothing complete was lost; make room"
    ):
        fill(small_disk / "a", {"x": "n" * 2_000_000})
    with pytest.raises(
        RunError, match=r"/f: cannot write: No space left on device\. Nothing complete was lost; make room"
    ):
        files.write_atomic(small_disk / "f", "n" * 2_000_000)
    with (
        pytest.raises(
            RunError, match=r"/a: cannot write: No space left on device\. Nothing complete was lost; make room"
        ),
        files.new_directory(small_disk / "a") as folder,
    ):
        save_file({"weight": numpy.zeros(500_000)}, folder / "model.safetensors")
    assert files.defect(small_disk / "a") is None
    assert ((small_disk / "a" / "x").read_text(), (small_disk / "f").read_text()) == ("old", "old")
    assert names(small_disk) == ["a", "f"]


# ---- what is wrong with a folder


def test_defects_of_files(tmp_path):
    folder = tmp_path / "a"
    fill(folder, {"x": "123", "in/y": "456"})
    assert files.defect(folder) is None
    (folder / "x").write_text("124")
    assert files.defect(folder) == f"{folder}/x: its sha256 is not the one that was written"
    (folder / "x").write_text("12")
    assert files.defect(folder) == f"{folder}/x: 2 bytes, 3 were written"
    (folder / "in" / "y").unlink()
    assert files.defect(folder) == f"{folder}/in/y: missing"
    (folder / "manifest.json").unlink()
    assert files.defect(folder) == f"{folder}/manifest.json: no such file."
    assert files.defect(tmp_path / "b") == f"{tmp_path}/b/manifest.json: no such file."


FACTS = {"bytes": 1, "sha256": "00"}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", ":1: not valid JSON: Expecting property name enclosed in double quotes."),
        ("[]", ': not a manifest: expected "files" with file names, got [].'),
        ('{"step": 3}', ': not a manifest: expected "files" with file names, got {"step": 3}.'),
        ('{"files": ["x"]}', ': not a manifest: expected "files" with file names, got {"files": ["x"]}.'),
        *(
            (
                json.dumps({"files": {"x": facts}}),
                f': expected "bytes" and "sha256" of \'x\', got {json.dumps(facts)}.',
            )
            for facts in (
                3,
                {"bytes": 1},
                {"sha256": "00"},
                {**FACTS, "bytes": "1"},
                {**FACTS, "bytes": True},
                {**FACTS, "sha256": None},
            )
        ),
    ],
)
def test_an_invalid_manifest_is_a_defect(tmp_path, content, message):
    (tmp_path / "manifest.json").write_text(content)
    assert files.defect(tmp_path) == f"{tmp_path}/manifest.json{message}"
    with pytest.raises(CheckpointError, match=rf"{re.escape(message)} Restore the folder from a copy"):
        files.read_manifest(tmp_path, CheckpointError)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("gone/a", "No such file or directory"),
        ("file/a", "Not a directory"),
        ("loop/a", "Too many levels of symbolic links"),
        ("n" * 300, "File name too long"),
        ("folder", "Is a directory"),
    ],
)
def test_a_path_that_leads_nowhere_is_one_line_with_its_reason(tmp_path, name, reason):
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(RunError, match=rf"/{name}: cannot write: {reason}\.$"):
        files.write_atomic(tmp_path / name, "x")
    assert names(tmp_path) == ["file", "folder", "loop"]


def test_a_refusal_names_the_file_that_it_is_about(tmp_path):
    new_folder = tmp_path / "x" / "made"
    with (
        pytest.raises(RunError, match=r"/x/made: cannot write: No such file or directory \(/proc/no\)\.$"),
        files.new_directory(new_folder),
    ):
        Path("/proc/no").read_bytes()
    (tmp_path / "d").mkdir()
    with (
        pytest.raises(DataError, match=r"/d: cannot read: Is a directory\.$"),
        files.reading(tmp_path / "d", DataError),
    ):
        (tmp_path / "d").read_bytes()
    with pytest.raises(FileNotFoundError), files.reading(tmp_path / "e"):
        (tmp_path / "e").read_bytes()


@pytest.mark.parametrize("content", ["[" * 100_000, "1" * 5_000])
def test_json_that_python_cannot_hold_is_named(tmp_path, content):
    (tmp_path / "a").write_text(content)
    with pytest.raises(DataError, match=r"/a: "):
        files.read_json(tmp_path / "a", DataError)


def test_a_defect_check_can_skip_the_hashes(tmp_path):
    fill(tmp_path / "a", {"x": "new"})
    (tmp_path / "a" / "x").write_text("old")
    assert "sha256" in files.defect(tmp_path / "a")
    assert files.defect(tmp_path / "a", hashes=False) is None
    (tmp_path / "a" / "x").write_text("longer")
    assert "6 bytes, 3 were written" in files.defect(tmp_path / "a", hashes=False)


def test_unreadable_json_is_named(tmp_path):
    (tmp_path / "manifest.json").mkdir()
    with pytest.raises(DataError, match=r"/manifest\.json: cannot read: Is a directory\."):
        files.read_json(tmp_path / "manifest.json", DataError)
    (tmp_path / "latin").write_bytes(b'"\xe9"')
    with pytest.raises(DataError, match=r"/latin: not UTF-8 text: invalid continuation byte at byte 1\."):
        files.read_json(tmp_path / "latin", DataError)


def test_nan_is_not_written(tmp_path):
    files.write_json(tmp_path / "a", {"b": 1, "a": [2]})
    with pytest.raises(ValueError, match="not JSON compliant"):
        files.write_json(tmp_path / "a", float("nan"))
    assert (tmp_path / "a").read_text() == '{\n    "a": [\n        2\n    ],\n    "b": 1\n}\n'
    assert names(tmp_path) == ["a"]


def test_many_small_files_are_synced_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    synced_descriptors: list[int] = []
    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda descriptor: (synced_descriptors.append(descriptor), real(descriptor))[1])
    with files.defer_sync(tmp_path):
        for i in range(3):
            files.write_atomic(tmp_path / f"{i}", "x")
        assert not synced_descriptors
    files.write_atomic(tmp_path / "3", "x")
    assert len(synced_descriptors) == 2, "a file and its folder"
    assert sorted(path.read_text() for path in tmp_path.iterdir()) == ["x"] * 4


def test_a_folder_that_is_gone_cannot_be_synced(tmp_path: Path):
    with pytest.raises(RunError, match="gone"), files.defer_sync(tmp_path / "gone"):
        pass


def test_a_folder_that_must_not_be_replaced_now_stays(tmp_path: Path):
    """What is entered around the replacement may refuse it, after all else is done."""

    @contextlib.contextmanager
    def refuse() -> Iterator[None]:
        raise RunError("in use")
        yield

    final = tmp_path / "step-4"
    with files.new_directory(final) as folder:
        (folder / "a").write_text("old")
    with pytest.raises(RunError, match="in use"), files.new_directory(final, around=refuse) as folder:
        (folder / "a").write_text("new")
    assert (final / "a").read_text() == "old"
    assert files.defect(final) is None
    assert [path.name for path in tmp_path.iterdir()] == ["step-4"]
