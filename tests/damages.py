"""Damaged files, and the output that a command can have about them."""

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from src.files import MANIFEST, sha256, write_json

SECONDS = 120
DAMAGE: dict[str, bytes] = {
    "empty": b"",
    "truncated": b'{"step": 1, "sta',
    "binary": bytes(range(256)) * 40,
    "types": b'{"step": "x", "state": 3, "files": 1}\n',
    "deep": b"[" * 100_000 + b"\n",
}


def write(path: Path, damage: str) -> None:
    """Replace a file. damage: a key of DAMAGE, or FIFO."""
    path.unlink(missing_ok=True)
    if damage == "FIFO":
        os.mkfifo(path)
    else:
        path.write_bytes(DAMAGE[damage])


def list_in_manifest(folder: Path) -> None:
    """Update the sizes and hashes in the manifest of a folder, as for files that were damaged before it was written."""
    manifest = json.loads((folder / MANIFEST).read_text())
    for name in manifest["files"]:
        manifest["files"][name] = {"bytes": (folder / name).stat().st_size, "sha256": sha256(folder / name)}
    write_json(folder / MANIFEST, manifest)


def check(act: Callable[[], int], label: str, capfd: pytest.CaptureFixture[str]) -> int:
    """Run a command that must end in time with a result, or with one line of error; returns the exit code."""

    def fail(*_: object) -> None:
        raise TimeoutError(f"{label}: no answer in {SECONDS} s")

    capfd.readouterr()
    before = signal.signal(signal.SIGALRM, fail)
    signal.alarm(SECONDS)
    try:
        code = act()
    except Exception as error:
        error.add_note(label)
        raise
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    error = capfd.readouterr().err
    assert code in (0, 1, 3), label
    assert "Traceback" not in error, label
    assert code != 1 or error.count("error: ") == 1, f"{label}: {error}"
    return code
