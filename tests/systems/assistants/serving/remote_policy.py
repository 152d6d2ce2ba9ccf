"""PPO trainings whose reward model is on a server."""

import time
from pathlib import Path
from typing import Any

from src.experiments.grid import override, ref
from tests import toy, warm
from tests.core.serving.small_runs import JUDGE, TALKER
from tests.systems.assistants.train_policies import PPO

SECONDS = 300


def experiment(steps: int) -> dict[str, Any]:
    """PPO from TALKER with rewards of JUDGE, evaluated twice."""
    rewards = [{"name": "reward_model", "model": ref(JUDGE)}]
    return override(
        PPO,
        {"model.base": ref(TALKER), "rewards": rewards, "loop.steps": steps, "loop.eval_every": steps // 2, "seed": 3},
    )


def start(exp: dict[str, Any], folder: Path, address: str) -> tuple[warm.Process, Path]:
    """Start a training in `folder` on rewards from `address`; returns the process and its log."""
    log = folder / "log"
    root = toy.project(folder, f"EXP_GROUPS = {{'x': [{exp!r}]}}\n")
    command = toy.command(root, ["-e", "x", "--log_every", "4"], folder)
    return warm.Process(command, {**toy.environment(), "TRITON_HOST_RM": address}, None, log), log


def wait_until(process: warm.Process, log: Path, file: Path, text: str) -> None:
    """Wait until `file` contains `text`; fail if the training ends first."""
    end = time.monotonic() + SECONDS
    while not (file.is_file() and text in file.read_text()):
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < end, log.read_text()
        time.sleep(0.01)
