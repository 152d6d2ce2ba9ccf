"""Random kills of random processes at random moments change nothing, however the processes share the model."""

import copy
import json
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from src.experiments.identity import exp_id
from src.support import distributed
from tests import toy
from tests.core.training import small
from tests.core.training.reading import test_packed_training
from tests.faults import harness, trainings

EXP: dict[str, Any] = copy.deepcopy(toy.BASE)
EXP["loop"] |= {"steps": 120, "sequences_per_step": 8, "micro_batch": 2, "eval_every": 20, "max_grad_norm": 0.5}
SHORT = copy.deepcopy(EXP)
SHORT["loop"]["steps"] = 40
"""Of a mode that passes more messages, and so is slower."""
FAULTS = {"replicated": 4, "zero1": 2, "zero2": 2, "zero3": 3, "fsdp": 2}
MORE = {"replicated": 13, "zero1": 4, "zero2": 4, "zero3": 6, "fsdp": 3}
SEEDS = {mode: number for number, mode in enumerate(FAULTS)}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(project, folder with data)."""
    folder = tmp_path_factory.mktemp("faults")
    toy.write_data(folder / "data")
    for stage in (1, 2, 3):
        (folder / f"zero{stage}.json").write_text(json.dumps({"zero_optimization": {"stage": stage}}))
    return toy.project(folder, f"EXP_GROUPS = {{'toy': [{EXP!r}], 'short': [{SHORT!r}]}}\n"), folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "faults"), [*FAULTS.items(), *(pytest.param(*each, marks=pytest.mark.matrix) for each in MORE.items())]
)
def test_random_kills_change_nothing(world: tuple[Path, Path], mode: str, faults: int, tmp_path: Path):
    root, folder = world
    group, exp = ("short", SHORT) if mode == "fsdp" else ("toy", EXP)
    words = ["-e", group, "--log_every", "4"]
    if mode.startswith("zero"):
        pytest.importorskip("deepspeed", reason="needs deepspeed")
        words += ["--deepspeed", str(folder / f"{mode}.json")]
    elif mode == "fsdp":
        words.append("--fsdp")
    command = [*toy.command(root, words, folder, processes=2)[:-1], str(tmp_path / "runs")]
    training = harness.Training(command, tmp_path / "runs" / exp_id(exp), toy.environment(), warm=True)
    report = harness.disturb(training, faults, random.Random(SEEDS[mode]), tmp_path / "log", 2)
    assert len(report.faults) == faults


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "processes", "number", "faults", "columns"),
    [
        ("packed", 2, 10, ["SIGKILL"], {"right", "loss/even", "loss/odd", "data/left_out", "data/padding"}),
        (
            "replies",
            1,
            20,
            ["SIGKILL", "SIGTERM"],
            {"accuracy"},
        ),  # after SIGTERM the checkpoint lies between two rows, with their sums
        (
            "rollouts",
            2,
            6,
            ["SIGKILL"],
            {"train_loss"},
        ),  # two checkpoints of three lie in the middle of what the model has made
    ],
)
def test_kills_change_no_bit_and_no_sum(
    tmp_path: Path, kind: str, processes: int, number: int, faults: list[str], columns: set[str]
):
    """Packed rows whose loss reports named sums and loss by source; questions with unequal numbers of replies; and what
    the model made."""
    test_packed_training.write_data(tmp_path)
    launcher = [
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        str(processes),
        "--master-port",
        "0",
        "--rdzv-backend",
        "c10d",
    ]
    script = [trainings.__file__, kind, str(tmp_path)]
    command = [sys.executable, *launcher, "--rdzv-endpoint", "localhost:0", *script]
    training = harness.Training(command, tmp_path / "runs" / exp_id(small.EXP), toy.environment(), warm=True)
    report = harness.disturb(training, number, random.Random(1), tmp_path / "log", processes, faults)
    assert all(report.faults.count(name) >= 6 for name in faults)
    assert all(columns <= json.loads(line).keys() for line in report.scores.splitlines())


@pytest.mark.slow
def test_torchrun_starts_killed_processes_again(world: tuple[Path, Path], tmp_path: Path):
    """Six times in one start, with the variable that the command builder sets."""
    root, folder = world
    exp = copy.deepcopy(EXP)
    exp["loop"]["steps"] = 200
    (root / "exp_configs.py").write_text(
        f"EXP_GROUPS = {{'toy': [{EXP!r}], 'short': [{SHORT!r}], 'long': [{exp!r}]}}\n"
    )
    command = toy.command(root, ["-e", "long", "--log_every", "4"], folder, processes=2)
    at = command.index("--nproc-per-node")
    command = [*command[:at], "--max-restarts", "30", *command[at:-1], str(tmp_path / "runs")]
    environment = {**toy.environment(), distributed.OWN_STORE: "1"}
    training = harness.Training(command, tmp_path / "runs" / exp_id(exp), environment, warm=True)
    expected_digests = harness.run_undisturbed(training, tmp_path / "log")
    process, draw, kills = training.start(tmp_path / "log"), random.Random(5), 0
    try:
        while kills < 6:
            rows = training.rows()
            until = time.monotonic() + 300
            while training.rows() < rows + 2 or len(harness.processes(process)) < 2:
                assert process.poll() is None
                assert time.monotonic() < until, f"no progress after {kills} kills"
                time.sleep(0.005)
            draw.choice(harness.processes(process)).send_signal(signal.SIGKILL)
            kills += 1
        assert process.wait(timeout=300) == 0
    finally:
        process.kill()
    assert training.fingerprints() == expected_digests
