"""What is planned on paper beside what a real step of tiny models takes on this machine, by PyTorch's own record of allocations."""

import gc
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from src.config import Places
from src.data.longest_batch import longest_batch
from src.errors import ConfigError
from src.experiments.grid import override
from src.interfaces import load_experiment
from src.runs.context import Options
from src.training.parallel import choice, memory, memory_plan
from src.training.parallel.memory_plan import Machines, pass_peak
from tests import toy

TOLERANCE = 0.10
VOCABULARY = [f"<{i}>" for i in range(800)]
LOOP = {"steps": 2, "sequences_per_step": 8, "micro_batch": 4, "learning_rate": 1e-2, "eval_every": 2}
GPT = {"name": "gpt_bigcode", "tokenizer": "toy_tokenizer", "hidden_size": 96, "num_layers": 4, "num_heads": 4, "max_positions": 160}
LM = {**toy.BASE, "model": {**GPT, "extra_tokens": VOCABULARY}, "data": {**toy.BASE["data"], "sequence_tokens": 160}, "loop": LOOP}
T5 = {
    "recipe": "t5_pretrain",
    "seed": 0,
    "model": {
        "name": "t5",
        "random": {
            **{"tokenizer": "toy_tokenizer", "vocabulary_multiple": 640, "hidden_size": 96},
            **{"feed_forward_size": 256, "num_layers": 3, "num_heads": 4},
        },
    },
    "data": {"name": "span_corruption", "corpus": "toy_text", "input_tokens": 128},
    "loop": {**LOOP, "optimizer": "adamw_scale"},
}
CROSSATTN = {
    **toy.CROSSATTN,
    "model": {"name": "cross_attention", "num_layers": 2, "stride": 2, "base": {**GPT}},
    "data": {**toy.CROSSATTN["data"], "context_tokens": 160, "sequence_tokens": 96, "loss_on": "all"},
    "loop": LOOP,
}
LORA = override(LM, {"model": {"name": "lora", "rank": 4, "alpha": 4.0, "target_modules": ["c_attn", "c_fc"], "base": LM["model"]}})
CASES: dict[str, tuple[dict[str, Any], bool]] = {
    "lm": (LM, False),
    "lm bfloat16": (override(LM, {"loop.precision": "bfloat16"}), False),
    "lm recomputed": (LM, True),
    "lm adafactor": (override(LM, {"loop.optimizer": "adafactor"}), False),
    "t5": (T5, False),
    "t5 bfloat16": (override(T5, {"loop.precision": "bfloat16"}), False),
    "crossattn": (CROSSATTN, False),
    "crossattn bfloat16": (override(CROSSATTN, {"loop.precision": "bfloat16"}), False),
    "lora": (LORA, False),
}


@pytest.fixture
def places(tmp_path: Path) -> Places:
    return Places(toy.write_data(tmp_path / "data"), tmp_path / "runs")


def measured(model: nn.Module, loss: Any, batch: Mapping[str, Tensor], recipe: Any, recompute: bool) -> int:
    """Bytes of weights, and the most that two steps have taken besides."""
    accelerator = choice.build_accelerator(recipe.loop, Options())
    if recompute:
        memory.checkpoint_layers(model)
    engine = choice.build_engine(accelerator, model, recipe.loop, Options())
    model.train()
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        for _ in range(recipe.loop.steps):
            for last in (False, True):
                with engine.accumulation_context(last):
                    with accelerator.autocast():
                        summed = loss(engine.model, batch)
                    engine.backward(summed * 1.0, last)
                del summed
            engine.clip(engine.norm(), 1.0)
            engine.step()
    events = [(e.start_ns(), e.nbytes()) for e in recorded.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = most = 0
    for _, number in sorted(events, key=lambda event: event[0]):
        now += number
        most = max(most, now)
    return most + sum(tensor.nbytes for tensor in [*model.parameters(), *model.buffers()])


@pytest.mark.parametrize("case", CASES)
def test_the_plan_is_what_a_step_takes(case: str, places: Places):
    exp, recompute = CASES[case]
    recipe: Any = load_experiment(exp, case)
    loss = recipe.training_loss(recipe.loss())
    torch.manual_seed(0)
    model = recipe.model.build(places)
    batch = longest_batch(recipe.data, recipe.micro_batch, model.config)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    state = memory_plan.optimizer_bytes(trained, recipe.loop.optimizer)
    taken = measured(model, loss, batch, recipe, recompute)
    with torch.device("meta"):
        on_paper = recipe.model.build(replace(places, on_paper=True))
    if recompute:
        memory.checkpoint_layers(on_paper)
    parts = pass_peak(on_paper, loss, batch, recipe.loop, passes=2, gpu=False)
    assert sum(parts.values()) + state == pytest.approx(taken, rel=TOLERANCE), parts
    assert sum(parts.values()) + state > 3 * parts["weights"], "little but weights would hide what is wrong with the rest"
