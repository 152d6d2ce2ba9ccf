"""PPO whose rewards come from a reward server that is killed in the middle: the training waits for it and ends with the
same bits."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from src.experiments.grid import override, ref
from src.experiments.identity import exp_id
from tests import toy, warm
from tests.conftest import ROOT
from tests.recipes.train_policies import PPO
from tests.serving import small_runs
from tests.serving.small_runs import JUDGE, TALKER

pytestmark = pytest.mark.slow
EXP = override(
    PPO,
    {
        "model.base": ref(TALKER),
        "rewards": [{"name": "reward_model", "model": ref(JUDGE)}],
        "loop.steps": 48,
        "loop.eval_every": 24,
        "seed": 3,
    },
)
SECONDS = 300


@contextmanager
def reward_server(folder: Path, port: int) -> Iterator[subprocess.Popen[str]]:
    """A server process that answers requests."""
    command = [
        sys.executable,
        "-m",
        "src.serving.reward_server",
        exp_id(JUDGE),
        "--port",
        str(port),
        "--token",
        "secret",
        "--device",
        "cpu",
    ]
    command += ["--data_path", str(folder / "data"), "-sb", str(folder / "runs")]
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("http://")
        yield process
    finally:
        process.kill()
        process.communicate()


def start_training(folder: Path, port: int) -> tuple[warm.Process, Path]:
    log = folder / "log"
    root = toy.project(folder, f"EXP_GROUPS = {{'x': [{EXP!r}]}}\n")
    command = toy.command(root, ["-e", "x", "--log_every", "4"], folder)
    address = f"http://127.0.0.1:{port}/{exp_id(JUDGE)}?token=secret"
    return warm.Process(command, {**toy.environment(), "TRITON_HOST_RM": address}, None, log), log


def wait_until(process: warm.Process, log: Path, file: Path, text: str) -> None:
    end = time.monotonic() + SECONDS
    while not (file.is_file() and text in file.read_text()):
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < end, log.read_text()
        time.sleep(0.01)


def test_ppo_is_bit_identical_when_its_reward_server_is_killed(tmp_path: Path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for name in ("undisturbed", "disturbed"):
        small_runs.train(tmp_path / name)
    run = tmp_path / "disturbed/runs" / exp_id(EXP)
    with reward_server(tmp_path / "undisturbed", port) as server:
        process, log = start_training(tmp_path / "undisturbed", port)
        assert process.wait(SECONDS) == 0, log.read_text()
        process, log = start_training(tmp_path / "disturbed", port)
        wait_until(process, log, run / "rollouts.jsonl", '"iteration": 3,')
        server.send_signal(signal.SIGKILL)
        wait_until(process, log, run / "logs" / "train.log", "waits for")
    with reward_server(tmp_path / "undisturbed", port):
        assert process.wait(SECONDS) == 0, log.read_text()
    expected = tmp_path / "undisturbed/runs" / exp_id(EXP)
    for file in ("scores.jsonl", "rollouts.jsonl", "checkpoints/step-00000048/model.safetensors"):
        assert (run / file).read_bytes() == (expected / file).read_bytes(), file
    assert "secret" not in (run / "logs" / "train.log").read_text()
