"""PPO whose rewards the real Triton server gives over gRPC: killed in the middle, it is waited for, and no number
changes."""

import os
import signal
import time
from argparse import Namespace
from pathlib import Path

import pytest

from src.config import Places
from src.experiments.grid import override, ref
from src.experiments.identity import exp_id
from src.serving.triton import repository, server
from tests import toy, warm
from tests.recipes.train_policies import PPO
from tests.serving import small_runs
from tests.serving.small_runs import JUDGE, TALKER, run_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.triton,
    pytest.mark.skipif(
        not (server.ENVIRONMENT / "installed").is_file(),
        reason="the Triton server is not installed; .ci/triton does that",
    ),
]
EXP = override(
    PPO,
    {
        "model.base": ref(TALKER),
        "rewards": [{"name": "reward_model", "model": ref(JUDGE)}],
        "loop.steps": 80,
        "loop.eval_every": 40,
        "seed": 3,
    },
)
SECONDS = 300


def wait_until(process: warm.Process, log: Path, file: Path, text: str) -> None:
    """Until a file holds a text, or the training ends."""
    end = time.monotonic() + SECONDS
    while not (file.is_file() and text in file.read_text()):
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < end, log.read_text()
        time.sleep(0.01)


def begin(folder: Path, address: str) -> tuple[warm.Process, Path]:
    """A training on rewards of the server."""
    log = folder / "log"
    root = toy.project(folder, f"EXP_GROUPS = {{'x': [{EXP!r}]}}\n")
    command = toy.command(root, ["-e", "x", "--log_every", "4"], folder)
    return warm.Process(command, {**toy.environment(), "TRITON_HOST_RM": address}, None, log), log


def test_a_server_that_is_killed_changes_no_number(tmp_path: Path):
    pytest.importorskip("grpc", reason="grpcio is not installed; requirements/serving.txt")
    for name in ("whole", "struck"):
        small_runs.train(tmp_path / name)
    models = tmp_path / "models"
    places = Places(tmp_path / "whole/data", tmp_path / "whole/runs")
    repository.write_model(
        run_of(places, "judge"),
        models,
        places,
        Namespace(mode="rm", backend="python", name="judge", max_batch=64, device="cpu"),
    )
    state = server.start(models)
    address, ports = (
        f"127.0.0.1:{state['grpc_port']}/judge",
        [state[f"{name}_port"] for name in ("http", "grpc", "metrics")],
    )
    try:
        process, log = begin(tmp_path / "whole", address)
        assert process.wait(SECONDS) == 0, log.read_text()
        process, log = begin(tmp_path / "struck", address)
        run = tmp_path / "struck/runs" / exp_id(EXP)
        wait_until(process, log, run / "rollouts.jsonl", '"iteration": 3,')
        os.killpg(state["pid"], signal.SIGKILL)
        wait_until(process, log, run / "logs" / "train.log", "waits for")
        server.start(models, ports=ports)
        assert process.wait(SECONDS) == 0, log.read_text()
    finally:
        server.stop(models)
    wanted = tmp_path / "whole/runs" / exp_id(EXP)
    for file in ("scores.jsonl", "rollouts.jsonl", "checkpoints/step-00000080/model.safetensors"):
        assert (run / file).read_bytes() == (wanted / file).read_bytes(), file
