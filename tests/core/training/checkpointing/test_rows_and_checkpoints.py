"""When rows of scores and checkpoints are written: neither changes the other, nor what is learned."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from src.runs.checkpoints import checkpoints
from src.runs.checkpoints.retention import RotationRule
from src.runs.context import Options, Run
from src.support import distributed
from src.training.config import EarlyStopping
from tests.core.training import small

STEPS = 24
CONFIG = small.CONFIG.model_copy(update={"steps": STEPS, "eval_every": 12})
KEEP = RotationRule(last=100)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return small.write_data(tmp_path)


def trained(folder: Path, name: str, options: Options, **changes: Any) -> Run:
    (folder / name).mkdir()
    (folder / name / "data").symlink_to(folder / "data")
    with small.open_run(folder / name, options) as run:
        small.train(run, config=CONFIG.model_copy(update=changes))
    return run


def rows(run: Run) -> dict[int, dict[str, Any]]:
    return {row["step"]: row for row in run.dir.scores.rows()}


def saved(run: Run) -> list[int]:
    return sorted(map(checkpoints.step_of, checkpoints.list_all(run.path)))


def test_the_training_writes_a_row_every_ten_steps_and_at_evaluations(folder: Path):
    """Which are what they are without: --log_every as rare as the evaluations leaves the others out."""
    usual, rare = (
        trained(folder, "usual", Options(keep=KEEP)),
        trained(folder, "rare", Options(keep=KEEP, log_every=12)),
    )
    assert list(rows(usual)) == [10, 12, 20, 24]
    assert {step: row for step, row in rows(usual).items() if step in (12, 24)} == rows(rare)
    assert rows(usual)[10].keys() == rows(rare)[12].keys() - {"val_loss"}
    every = rows(trained(folder, "every", Options(keep=KEEP, log_every=1)))
    mean = sum(every[step]["train_loss"] for step in range(13, 21)) / 8
    assert rows(usual)[20]["train_loss"] == pytest.approx(mean)
    assert saved(usual) == saved(rare) == [12, 24]


def test_checkpoints_have_a_rhythm_of_their_own(folder: Path):
    """The best evaluation has one in any case, and so has the last step."""
    run = trained(folder, "a", Options(keep=KEEP, log_every=2, save_every=5))
    assert list(rows(run)) == list(range(2, STEPS + 1, 2))
    best = checkpoints.best_step(run.path)
    assert saved(run) == sorted({5, 10, 15, 20, 24, best})
    one = trained(
        folder,
        "b",
        Options(keep=KEEP, save_every=100),
        eval_every=1,
        early_stopping=EarlyStopping(patience=3, min_gain=1e9),
    )
    last = max(rows(one))
    assert last == 4 < STEPS
    assert saved(one)[-1] == last


@pytest.mark.parametrize("stop_at", [9, 10, 11, 12])
def test_a_restart_writes_the_same_rows(folder: Path, stop_at: int):
    """At step 10 it stops between the step and its row."""
    options = Options(keep=KEEP, save_every=7)
    whole = trained(folder, "whole", options)
    (folder / "stopped").mkdir()
    (folder / "stopped" / "data").symlink_to(folder / "data")
    passes = 0

    def loss(*args: Any) -> Any:
        nonlocal passes
        passes += 1
        if passes == 2 * stop_at - 2:  # the last of the step before; two a step
            os.kill(os.getpid(), signal.SIGTERM)
        return small.loss(*args)

    with small.open_run(folder / "stopped", options) as run, pytest.raises(distributed.StopTraining) as stop:
        small.train(run, config=CONFIG, learn=loss)
    assert stop.value.step == stop_at
    with small.open_run(folder / "stopped", options) as run:
        small.train(run, config=CONFIG)
    assert (run.path / "scores.jsonl").read_bytes() == (whole.path / "scores.jsonl").read_bytes()
    assert saved(run)[-1] == STEPS
