"""PPO whose rewards the real Triton server gives over gRPC: killed in the middle, it is waited for, and no number
changes."""

from argparse import Namespace
from pathlib import Path

import pytest

from src.experiments.config import Places
from src.experiments.identity import exp_id
from src.systems.assistants.serving.triton import repository, server
from tests.core.serving import small_runs
from tests.core.serving.small_runs import run_of
from tests.systems.assistants.serving import remote_policy
from tests.systems.assistants.serving.triton.process import Server

pytestmark = [
    pytest.mark.slow,
    pytest.mark.triton,
    pytest.mark.skipif(
        not (server.ENVIRONMENT / "installed").is_file(),
        reason="the Triton server is not installed; .ci/triton does that",
    ),
]
EXP = remote_policy.experiment(80)


def test_ppo_is_bit_identical_when_its_triton_server_is_killed(tmp_path: Path):
    pytest.importorskip("grpc", reason="grpcio is not installed; requirements/serving.txt")
    for name in ("undisturbed", "disturbed"):
        small_runs.train(tmp_path / name)
    models = tmp_path / "models"
    places = Places(tmp_path / "undisturbed/data", tmp_path / "undisturbed/runs")
    repository.write_model(
        run_of(places, "judge"),
        models,
        places,
        Namespace(mode="rm", backend="python", name="judge", max_batch=64, device="cpu"),
    )
    triton_server = Server(models)
    address = f"127.0.0.1:{triton_server.ports['grpc']}/judge"
    try:
        process, log = remote_policy.start(EXP, tmp_path / "undisturbed", address)
        assert process.wait(remote_policy.SECONDS) == 0, log.read_text()
        process, log = remote_policy.start(EXP, tmp_path / "disturbed", address)
        run = tmp_path / "disturbed/runs" / exp_id(EXP)
        remote_policy.wait_until(process, log, run / "rollouts.jsonl", '"iteration": 3,')
        triton_server.kill()
        remote_policy.wait_until(process, log, run / "logs" / "train.log", "waiting for")
        triton_server.start()
        assert process.wait(remote_policy.SECONDS) == 0, log.read_text()
    finally:
        triton_server.stop()
    expected = tmp_path / "undisturbed/runs" / exp_id(EXP)
    for file in ("scores.jsonl", "rollouts.jsonl", "checkpoints/step-00000080/model.safetensors"):
        assert (run / file).read_bytes() == (expected / file).read_bytes(), file
