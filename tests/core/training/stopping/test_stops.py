"""A signal to one of two processes stops both at the same step, however they share the model, and changes nothing in
the end."""

import json
import os
import signal
import time

import psutil
import pytest

from src.runs.checkpoints import checkpoints
from tests import warm
from tests.core.training.parallel.modes import MODES, Modes, pairs, scores, weights

ROWS = ("--log_every", "4")


def wait_for_rows(modes: Modes, process: warm.Process, group: str = "long", number: int = 2) -> None:
    """Return when the run has so many."""
    rows, until = modes.run(group) / "scores.jsonl", time.monotonic() + 300
    while not rows.exists() or rows.read_bytes().count(b"\n") < number:
        assert process.poll() is None, modes.log.read_text()
        assert time.monotonic() < until, "no progress"
        time.sleep(0.002)


def send_stop(modes: Modes, process: warm.Process, rank: int, number: signal.Signals) -> None:
    """Send a signal to one rank when the run has two rows."""
    wait_for_rows(modes, process)
    ranks = sorted(psutil.Process(process.pid).children(), key=psutil.Process.create_time)
    assert len(ranks) == 2
    ranks[rank].send_signal(number)


def told_all(process: warm.Process) -> None:
    """Send SIGTERM to torchrun, which passes it on, and wait."""
    os.kill(process.pid, signal.SIGTERM)
    assert process.wait(timeout=300)


@pytest.mark.slow
@pytest.mark.parametrize("mode", pairs(MODES, "replicated", "fsdp", "zero2"))
def test_one_signal_stops_both(modes: Modes, mode: str):
    expected_run = modes.trained("replicated", "long")
    process = modes.begin(mode, "long", more=ROWS)
    try:
        send_stop(modes, process, rank=1, number=signal.SIGTERM)
        assert process.wait(timeout=300) == 1, "what torchrun makes of exit code 75"
    finally:
        process.kill()
    output, run = modes.log.read_text(), modes.run("long")
    assert "exitcode: 75" in output
    assert "Traceback" not in output.partition("failed (exitcode: 75)")[0]
    status = json.loads((run / "status.json").read_text())
    assert status["state"] == "stopped"
    assert 8 <= status["step"] < 60
    *before, last = checkpoints.list_all(run)
    assert last == checkpoints.newest_complete(run)
    assert checkpoints.step_of(last) == status["step"]
    assert all(checkpoints.step_of(folder) % 4 == 0 for folder in before), (
        "each stands where a row does, but for the one of the stop"
    )
    assert not list((run / "checkpoints").glob(".*"))

    assert modes.start(mode, "long", more=ROWS) == ""
    assert f"continues from step {status['step']}" in (run / "logs" / "train.log").read_text()
    assert weights(run) == weights(expected_run)
    rows = {row["step"]: row for row in scores(run)}
    evaluations = [row for row in scores(expected_run) if "val_loss" in row]
    assert [rows[row["step"]]["val_loss"] for row in evaluations] == [row["val_loss"] for row in evaluations]


@pytest.mark.slow
def test_a_stop_file_stops_both_until_it_is_removed(modes: Modes):
    """Each process looks at the file by its own clock, once a second, so one sees it first. test_pair.py lets such a
    training end."""
    process, run = modes.begin("replicated", "longer", more=ROWS), modes.run("longer")
    try:
        wait_for_rows(modes, process, "longer")
        (run / "stop").touch()
        assert process.wait(timeout=300) == 1, "what torchrun makes of exit code 130"
    finally:
        process.kill()
    assert "exitcode: 130" in modes.log.read_text()
    status = json.loads((run / "status.json").read_text())
    assert (status["state"], status["stopped_by"]) == ("stopped", "person")
    assert checkpoints.step_of(checkpoints.list_all(run)[-1]) == status["step"] < 600
    assert "exitcode: 130" in modes.start("replicated", "longer", more=ROWS), "the file is still there"
    assert json.loads((run / "status.json").read_text())["step"] == status["step"]
    (run / "stop").unlink()
    process = modes.begin("replicated", "longer", more=ROWS)
    try:
        wait_for_rows(modes, process, "longer", len(scores(run)) + 2)
        told_all(process)
    finally:
        process.kill()
    assert json.loads((run / "status.json").read_text())["step"] > status["step"]
