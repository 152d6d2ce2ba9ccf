"""No step waits for its device more than once, whatever it trains on: for the norm, and with it the sums that are
reported.

Exempt, as none of it is in every step: what a training on rollouts makes to read (`generate` looks at each token),
evaluations, checkpoints, statistics of tensors, a context that `cache_contexts` has not met before, and the first
step's look for dropout after --micro_batch. Of other libraries, and so not asked for here: the loss scale of float16
(torch), Adafactor and SmolVLM (transformers).
"""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from data_prep import preproc_nq
from src.experiments.grid import override
from src.experiments.identity import exp_id
from src.orders import order_of
from src.training.config import LoopConfig
from src.training.loader import StepLoader
from src.training.state import State
from tests import test_golden, toy, waits
from tests.recipes import (
    test_metadata_lm,
    test_mixture_training,
    test_seq2seq,
    test_t5_pretrain,
    train_assistants,
    train_pages,
    train_policies,
)
from tests.training import small

RECIPES = {name: group[0] for name, group in test_golden.GROUPS.items()}
ENCODED = "contexts encoded before"
RESAMPLER = {"tokens": 1, "num_layers": 1, "num_heads": 2}
PACKED = {
    "name": "packed",
    "documents": {"name": "documents", "corpus": "toy_text"},
    "sequence_tokens": 64,
    "open_rows": 2,
}
CASES: dict[str, dict[str, Any]] = {
    **RECIPES,
    ENCODED: override(RECIPES["crossattn"], {"data.encoded_contexts": True}),
    "positions dropped": override(RECIPES["crossattn"], {"model.context_dropout_rate": 0.2}),
    "whole model": override(RECIPES["crossattn"], {"model.train_all_params": True}),
    "sources": test_mixture_training.PLAIN,
    "adamw_scale": override(RECIPES["t5_pretrain"], {"loop.optimizer": "adamw_scale"}),
    "packed": {**RECIPES["lm"], "data": PACKED},
    "resampler": override(
        RECIPES["interleaved"],
        {"model.resampler": {"tokens": 1, "num_layers": 1, "num_heads": 2}, "model.max_tiles": 1},
    ),
}
PARENTS = ("lm", "sft", "reward")
BESIDE = ("answers", "predictions", "gains", "sampled")
"""What an evaluation makes, which is not looked at."""


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Data of every recipe, and the models that some begin with."""
    folder = tmp_path_factory.mktemp("waits")
    test_seq2seq.write_data(folder)
    test_t5_pretrain.write_tokenizer(folder / "data")
    test_metadata_lm.write_metadata(folder / "data")
    train_pages.write_data(folder / "data")
    train_assistants.write_data(folder / "data")
    with train_policies.rewards_of_tests():
        assert toy.main(["-e", *PARENTS], test_golden.GROUPS, folder) == 0
        yield folder


@pytest.fixture(scope="module")
def encoded(world: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same runs, and rows whose contexts are encoded."""
    base, folder = exp_id(RECIPES["lm"]), tmp_path_factory.mktemp("encoded")
    places = ["--data_cache_path", str(world / "data"), "-sb", str(world / "runs")]
    options = ["--maximum_input_length", "16", "--corpus", "toy_qa", "--devices", "cpu"]
    assert preproc_nq.main(["--embedding_model", base, *places, *options]) == 0
    (folder / "data").symlink_to(world / "data" / "processed_data" / base)
    (folder / "runs").symlink_to(world / "runs")
    return folder


def train(folder: Path, exp: dict[str, Any]) -> bytes:
    """A training from the start; returns the weights."""
    run = folder / "runs" / exp_id(exp)
    shutil.rmtree(run, ignore_errors=True)
    assert toy.main(["-e", "one"], {"one": [exp], **test_golden.GROUPS}, folder) == 0
    return (max((run / "checkpoints").glob("step-*")) / "model.safetensors").read_bytes()


def with_passes(exp: dict[str, Any], passes: int, steps: int = 4) -> dict[str, Any]:
    """So many steps of so many micro-batches. Those of policies are as large as their rollouts, and are cut into four
    for three."""
    policy = exp["recipe"] in ("grpo", "ppo")
    size = exp["loop"]["sequences_per_step"] // (1 if passes == 1 else 4) if policy else 2
    sequences = exp["loop"]["sequences_per_step"] if policy else passes * size
    changes = {
        "loop.steps": steps,
        "loop.eval_every": steps,
        "loop.sequences_per_step": sequences,
        "loop.micro_batch": size,
    }
    beside = () if policy else BESIDE
    return override({name: value for name, value in exp.items() if name not in beside}, changes)


@pytest.mark.parametrize("passes", [pytest.param(1, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize("name", CASES)
def test_a_step_waits_once_and_what_the_cpu_knows_changes_no_bit(
    world: Path, name: str, passes: int, request: pytest.FixtureRequest
):
    folder, exp = request.getfixturevalue("encoded") if name == ENCODED else world, with_passes(CASES[name], passes)
    without = train(folder, exp)
    with waits.WaitCounter() as counter:
        assert train(folder, exp) == without
    assert [len(step) for step in counter.steps] == [1] * 4, counter.table()


def test_a_cached_context_is_waited_for_when_it_is_new(world: Path):
    exp = with_passes(override(RECIPES["crossattn"], {"model.cache_contexts": True}), 3, steps=10)
    without = train(world, exp)
    with waits.WaitCounter() as counter:
        assert train(world, exp) == without
    assert [len(step) for step in counter.steps] == [4] * 8 + [1] * 2, counter.table()


class Sent(TorchFunctionMode):
    """Counts what is copied to the device."""

    count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is Tensor.to and bool((kwargs or {}).get("non_blocking"))
        return func(*args, **(kwargs or {}))


def test_one_micro_batch_is_copied_ahead_of_the_pass():
    data, config = small.Numbers(), LoopConfig.model_validate({**small.CONFIG.model_dump(), "micro_batch": 1})
    order = order_of(data, 0, config.sequences_per_step, config.steps)
    step = next(StepLoader(data, order, config, torch.device("cpu")).steps(State()))
    with Sent() as sent:
        assert [sent.count // 3 for _ in step.on_device()] == [2, 3, 4, 4]
