"""A training that was rewound, on the real loop: what a branch says holds from its first step, whatever kills it."""

import copy
import hashlib
import json
import math
import os
import shutil
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from src.experiments.identity import exp_id
from src.operations import interventions
from tests import toy, warm

pytestmark = pytest.mark.slow
STEPS, MIDDLE = 24, 12
EXP: dict[str, Any] = copy.deepcopy(toy.BASE)
EXP["loop"] |= {"steps": STEPS, "eval_every": 4, "schedule": "cosine", "warmup_rate": 0.1}
ARGUMENTS = ["-e", "base", "--log_every", "2"]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("project")
    toy.write_data(folder / "data")
    return toy.project(folder, f"EXP_GROUPS = {{'base': [{EXP!r}]}}\n")


@pytest.fixture(scope="module")
def trained(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with all its checkpoints from the middle on: killed there and brought to its end."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "data").symlink_to(root.parent / "data")
    stop_at(root, folder, MIDDLE)
    checkpoints_by_name = {path.name: path for path in (run_in(folder) / "checkpoints").glob("step-*")}
    assert f"step-{MIDDLE:08d}" in checkpoints_by_name
    shutil.copytree(run_in(folder) / "checkpoints", folder / "kept")
    finish(root, folder)
    for name in checkpoints_by_name:
        if not (run_in(folder) / "checkpoints" / name).exists():
            shutil.copytree(folder / "kept" / name, run_in(folder) / "checkpoints" / name)
    return folder


@pytest.fixture
def folder(trained: Path, tmp_path: Path) -> Path:
    (tmp_path / "data").symlink_to(trained / "data")
    shutil.copytree(run_in(trained), run_in(tmp_path))
    return tmp_path


def run_in(folder: Path) -> Path:
    return folder / "runs" / exp_id(EXP)


def begin(root: Path, folder: Path, arguments: Sequence[str] = ARGUMENTS, processes: int = 1) -> warm.Process:
    (folder / "log").unlink(missing_ok=True)
    return warm.Process(toy.command(root, arguments, folder, processes), toy.environment(), None, folder / "log")


def finish(root: Path, folder: Path, arguments: Sequence[str] = ARGUMENTS, processes: int = 1) -> None:
    assert begin(root, folder, arguments, processes).wait(300) == 0, (folder / "log").read_text()


def stop_at(root: Path, folder: Path, step: int, kill: bool = False) -> None:
    """Start, and end it when the checkpoint of `step` is there: by SIGTERM, or kill -9."""
    process = begin(root, folder)
    checkpoint = run_in(folder) / "checkpoints" / f"step-{step:08d}"
    until = time.monotonic() + 300
    while not checkpoint.exists():
        assert time.monotonic() < until
        assert process.poll() is None
        time.sleep(0.0005)
    os.kill(process.pid, signal.SIGKILL if kill else signal.SIGSTOP)
    if not kill:
        shutil.copytree(checkpoint, folder / "saved")
        os.kill(process.pid, signal.SIGCONT)
        os.kill(process.pid, signal.SIGTERM)
    process.wait(300)
    if not kill and not checkpoint.exists():
        shutil.copytree(folder / "saved", checkpoint)
    shutil.rmtree(folder / "saved", ignore_errors=True)


def rewind(folder: Path, *arguments: str) -> None:
    assert interventions.main(["rewind", str(run_in(folder)), "--to", str(MIDDLE), *arguments]) == 0


def result(folder: Path) -> dict[str, str]:
    """Hashes of all that must come out the same."""
    run = run_in(folder)
    last = run / "checkpoints" / f"step-{STEPS:08d}"
    paths = [
        last / "model.safetensors",
        last / "optimizer.safetensors",
        last / "state.json",
        run / "scores.jsonl",
        run / "score_list.pkl",
    ]
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


def rates(folder: Path) -> dict[int, float]:
    return {row["step"]: row["learning_rate"] for row in toy.rows(folder, exp_id(EXP))}


def losses(folder: Path) -> dict[int, float]:
    return {row["step"]: row["train_loss"] for row in toy.rows(folder, exp_id(EXP))}


CHANGES: list[Sequence[str]] = [
    ["--data", "reshuffle"],
    ["--data", "skip:3", "--lr", "x0.5"],
    ["--lr", "hold0:4", "--reset-optimizer"],
]


def test_the_same_once_more_ends_with_the_same_bits(root: Path, trained: Path, folder: Path):
    rewind(folder)
    finish(root, folder)
    assert result(folder) == result(trained)


def test_an_undone_rewind_ends_with_the_same_bits(root: Path, trained: Path, folder: Path):
    rewind(folder, "--data", "reshuffle", "--lr", "x0.1")
    stop_at(root, folder, MIDDLE + 4, kill=True)
    assert interventions.main(["undo", str(run_in(folder))]) == 0
    assert result(folder) == result(trained)
    finish(root, folder)
    assert result(folder) == result(trained)


@pytest.mark.parametrize("change", CHANGES, ids=" ".join)
def test_a_kill_after_a_rewind_changes_nothing(
    root: Path, trained: Path, folder: Path, tmp_path: Path, change: Sequence[str]
):
    rewind(folder, *change)
    other = tmp_path / "killed"
    run_in(other).parent.mkdir(parents=True)
    (other / "data").symlink_to(trained / "data")
    shutil.copytree(run_in(folder), run_in(other))
    finish(root, folder)
    assert result(folder) != result(trained)
    process = begin(root, other)
    until = time.monotonic() + 300
    while json.loads((run_in(other) / "status.json").read_text())["state"] != "running" and time.monotonic() < until:
        time.sleep(0.001)
    process.kill()  # before the first checkpoint of the branch
    process.wait(300)
    stop_at(root, other, MIDDLE + 2, kill=True)
    stop_at(root, other, MIDDLE + 6, kill=True)
    finish(root, other)
    assert result(other) == result(folder)


def test_the_first_step_of_the_branch_has_its_learning_rate(root: Path, trained: Path, folder: Path):
    rewind(folder, "--lr", "=1e-4")
    finish(root, folder, [*ARGUMENTS[:2], "--log_every", "1"])
    before, after = rates(trained), rates(folder)
    assert after[MIDDLE + 1] == 1e-4
    shape = [math.cos(math.pi * (step - 2) / (STEPS - 2)) / 2 + 0.5 for step in (MIDDLE, STEPS - 4)]
    assert after[STEPS - 3] == pytest.approx(1e-4 * shape[1] / shape[0])
    assert after[MIDDLE] == before[MIDDLE]


def test_a_held_rate_moves_nothing(root: Path, folder: Path):
    rewind(folder, "--lr", "hold0:4")
    stop_at(root, folder, MIDDLE + 4, kill=True)
    weights = [
        run_in(folder) / "checkpoints" / f"step-{step:08d}" / "model.safetensors" for step in (MIDDLE + 2, MIDDLE + 4)
    ]
    old_weights = run_in(folder) / "abandoned/branch-1/before/checkpoints" / f"step-{MIDDLE:08d}" / "model.safetensors"
    assert weights[1].read_bytes() == old_weights.read_bytes()


def test_moments_are_reset_once(root: Path, folder: Path):
    from safetensors.torch import load_file

    rewind(folder, "--reset-optimizer")
    stop_at(root, folder, MIDDLE + 4, kill=True)
    finish(root, folder)
    moments = load_file(run_in(folder) / "checkpoints" / f"step-{STEPS:08d}" / "optimizer.safetensors")
    assert {float(value) for name, value in moments.items() if name.endswith("::step")} == {STEPS - MIDDLE}
