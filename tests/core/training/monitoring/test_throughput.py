"""What a row of timings says, against what was counted."""

import time
from collections.abc import Iterator

import pytest
import torch
import transformers

from src.support.flops import training_flops
from src.training.loader import Copies, Step
from src.training.monitoring.energy import Energy
from src.training.monitoring.throughput import ThroughputMeter


def model() -> transformers.GPT2LMHeadModel:
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_embd=8, n_layer=1, n_head=1, vocab_size=9, bos_token_id=0, eos_token_id=0)
    )


def step() -> Step:
    batches = [{"input_ids": torch.zeros(2, 5, dtype=torch.int64)}] * 3
    numbers = {"count": 20, "loss_tokens": 20, "read_tokens": 25, "sequences": 6, "passes": 3}
    return Step(batches, [None] * 3, **numbers, keys=[], cursor={}, counters={}, copies=Copies(torch.device("cpu")))


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what is absent without a GPU")
def test_a_row_without_a_gpu():
    meter = ThroughputMeter(model(), "bfloat16")
    for _ in range(4):
        meter.count(step())
    row = meter.row()
    assert set(row) == {
        "seconds",
        "steps_per_second",
        "tokens_per_second",
        "sequences_per_second",
        "data_wait_seconds",
        "data_wait_rate",
        "peak_host_memory_bytes",
        "model_flops_per_second",
    }
    assert row["tokens_per_second"] / row["steps_per_second"] == pytest.approx(25)
    operations = 3 * training_flops(model().config, 2, 5)
    assert row["model_flops_per_second"] / row["steps_per_second"] == pytest.approx(operations)
    assert row["peak_host_memory_bytes"] > 50e6, "torch alone takes more"
    assert Energy().joules() is None


def test_rates_of_steps_need_a_step():
    meter = ThroughputMeter(model(), "bfloat16")
    names = {"steps_per_second", "tokens_per_second", "sequences_per_second", "model_flops_per_second"}
    assert not names & set(meter.row())
    meter.count(step())
    assert names < set(meter.row())
    meter.restart()
    assert not names & set(meter.row())


def test_waiting_for_data_is_counted_and_forgotten():
    def slow() -> Iterator[int]:
        end = time.perf_counter() + 0.05
        while time.perf_counter() < end:
            pass
        yield 7

    meter = ThroughputMeter()
    assert meter.waiting(slow()) == 7
    row = meter.row()
    assert 0.05 <= row["data_wait_seconds"] <= row["seconds"]
    assert row["data_wait_rate"] == pytest.approx(row["data_wait_seconds"] / row["seconds"], rel=0.05)
    assert "model_flops_per_second" not in row
    meter.restart()
    assert meter.row()["data_wait_seconds"] == 0
