"""Statistics of a model that two processes share."""

import os
import subprocess
import sys

import pytest

from tests import toy
from tests.conftest import ROOT

ZERO = [pytest.param(stage, marks=pytest.mark.slow) for stage in ("1", "2", "3")]


@pytest.mark.parametrize("mode", ["fsdp", *ZERO])
def test_they_are_those_of_the_whole(mode: str):
    if mode != "fsdp":
        pytest.importorskip("deepspeed")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "0", "--rdzv-backend", "c10d"]
    command += ["--rdzv-endpoint", "localhost:0", "-m", "tests.training.shared_statistics", mode]
    environment = toy.environment() | {"DS_ACCELERATOR": "cpu", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
