"""The sign of life of what goes on without steps."""

import json
import os
from pathlib import Path

from src.runs import heartbeat


def test_refresh_writes_at_most_every_few_seconds(tmp_path: Path):
    heartbeat.refresh(tmp_path, attempt=2, step=30)
    beat = heartbeat.read(tmp_path)
    assert beat is not None
    assert (beat.attempt, beat.step, beat.step_seconds) == (2, 30, None)

    file = tmp_path / heartbeat.HEARTBEAT
    young = file.stat()
    heartbeat.refresh(tmp_path, attempt=2, step=31)
    assert (file.stat().st_ino, json.loads(file.read_text())["step"]) == (young.st_ino, 30), "the last one is young"

    os.utime(file, (young.st_mtime - 6, young.st_mtime - 6))
    heartbeat.refresh(tmp_path, attempt=2, step=31)
    beat = heartbeat.read(tmp_path)
    assert beat is not None
    assert beat.step == 31
    assert beat.age_seconds < 5


def test_a_disk_that_refuses_stops_nothing(tmp_path: Path):
    heartbeat.refresh(tmp_path / "nowhere", attempt=1, step=1)
    assert not (tmp_path / "nowhere").exists()
