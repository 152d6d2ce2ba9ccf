"""PPO whose rewards come from a reward server that is killed in the middle: the training waits for it and ends with the
same bits."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from src.experiments.identity import exp_id
from tests.conftest import ROOT
from tests.core.serving import small_runs
from tests.core.serving.small_runs import JUDGE
from tests.systems.assistants.serving import remote_policy

pytestmark = pytest.mark.slow
EXP = remote_policy.experiment(48)


@contextmanager
def reward_server(folder: Path, port: int) -> Iterator[subprocess.Popen[str]]:
    """A server process that answers requests."""
    command = [
        sys.executable,
        "-m",
        "src.systems.assistants.serving.reward_server",
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


def test_ppo_is_bit_identical_when_its_reward_server_is_killed(tmp_path: Path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for name in ("undisturbed", "disturbed"):
        small_runs.train(tmp_path / name)
    run, address = tmp_path / "disturbed/runs" / exp_id(EXP), f"http://127.0.0.1:{port}/{exp_id(JUDGE)}?token=secret"
    with reward_server(tmp_path / "undisturbed", port) as server:
        process, log = remote_policy.start(EXP, tmp_path / "undisturbed", address)
        assert process.wait(remote_policy.SECONDS) == 0, log.read_text()
        process, log = remote_policy.start(EXP, tmp_path / "disturbed", address)
        remote_policy.wait_until(process, log, run / "rollouts.jsonl", '"iteration": 3,')
        server.send_signal(signal.SIGKILL)
        remote_policy.wait_until(process, log, run / "logs" / "train.log", "waiting for")
    with reward_server(tmp_path / "undisturbed", port):
        assert process.wait(remote_policy.SECONDS) == 0, log.read_text()
    expected = tmp_path / "undisturbed/runs" / exp_id(EXP)
    for file in ("scores.jsonl", "rollouts.jsonl", "checkpoints/step-00000048/model.safetensors"):
        assert (run / file).read_bytes() == (expected / file).read_bytes(), file
    assert "secret" not in (run / "logs" / "train.log").read_text()
