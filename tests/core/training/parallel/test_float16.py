"""float16's loss scaler on one process, with the fused optimizer of a CPU: a step that overflows moves nothing, and is
counted."""

import json
import math
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor, nn

from src.runs.checkpoints import checkpoints
from src.support import distributed
from src.training.config import LoopConfig
from src.training.parallel import choice
from tests.core.training import small

SCALE = 2.0**127
"""The first losses overflow with it; float16 itself cannot be had on a CPU."""
CONFIG = LoopConfig(
    **{
        **small.CONFIG.model_dump(exclude={"precision", "divergence"}),
        "precision": "float16",
        "divergence": {"skipped_steps": 25},
    }
)


@pytest.fixture(autouse=True)
def scaler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Accelerate as on a GPU in float16, but for the rounding."""

    def build(config: LoopConfig, options: Any) -> Accelerator:
        accelerator = choice.plain_accelerator("float32", "loop.precision")
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
        return accelerator

    monkeypatch.setattr(choice, "build_accelerator", build)


def steep(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """A loss whose gradient overflows at SCALE, and no longer when the scale has been halved a few times."""
    return 20 * small.loss(model, batch)


def test_a_step_that_overflows_is_counted_and_moves_nothing(tmp_path: Path):
    with small.open_run(small.write_data(tmp_path)) as run:
        state, _ = small.train(run, CONFIG, steep)
    rows = [json.loads(line) for line in (run.path / "scores.jsonl").read_text().splitlines()]
    assert rows[0]["skipped_steps"] > 0
    assert all(row["grad_norm"] is not None and math.isfinite(row["grad_norm"]) for row in rows)
    assert state.scaler["scale"] < SCALE


def test_a_stop_after_an_overflow_leaves_a_checkpoint(tmp_path: Path):
    passes = []

    def stop_early(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        passes.append(batch)
        if len(passes) == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return steep(model, batch)

    with small.open_run(small.write_data(tmp_path)) as run:
        with pytest.raises(distributed.StopTraining):
            small.train(run, CONFIG, stop_early)
        newest = checkpoints.newest_complete(run.path)
        assert newest is not None
        saved = json.loads((newest / "state.json").read_text())
    assert saved["since_row"]["skipped"] > 0
    assert saved["since_row"]["grad_norm"] == 0.0
