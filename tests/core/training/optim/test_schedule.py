"""Learning rates and parameter groups."""

import math
import subprocess
import sys
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
from torch import nn
from transformers import get_scheduler, get_wsd_schedule

from src.errors import ConfigError
from src.experiments.config import load
from src.training.config import LoopConfig
from src.training.loss import causal_lm_loss, cross_entropy
from src.training.optim.optimizers import build_optimizer
from src.training.optim.schedule import learning_rate
from tests.conftest import ROOT

LOOP = {"steps": 100, "sequences_per_step": 2, "micro_batch": 2, "learning_rate": 0.5, "eval_every": 1}


def loop(**changes: object) -> LoopConfig:
    return load(LoopConfig, {**LOOP, **changes}, "loop")


def test_warm_up_rises_in_a_line_and_linear_decays_to_zero():
    rate = learning_rate(loop(schedule="linear", warmup_rate=0.1))
    assert [rate(0), rate(5), rate(10), rate(55), rate(100)] == pytest.approx([0.0, 0.25, 0.5, 0.25, 0.0])


def test_cosine_is_half_way_down_in_the_middle():
    rate = learning_rate(loop(schedule="cosine"))
    assert rate(25) == pytest.approx(0.5 * (1 + math.cos(math.pi * 0.25)) / 2)


def test_inverse_sqrt_with_a_full_start_is_the_schedule_of_t5():
    rate = learning_rate(loop(schedule="inverse_sqrt", learning_rate=0.25, warmup_rate=0.16, warmup_start=1.0))
    assert [rate(step) for step in (0, 1, 16, 17, 64, 100)] == pytest.approx(
        [max(step, 16) ** -0.5 for step in (0, 1, 16, 17, 64, 100)]
    )


def test_cosine_with_both_ends_is_the_schedule_of_nanot5():
    config = loop(schedule="cosine", learning_rate=2e-2, warmup_rate=0.2, warmup_start=0.5, final_rate=1e-5 / 2e-2)
    warm_up = [0.01 + 0.01 * step / 20 for step in range(20)]
    fall = [1e-5 + (2e-2 - 1e-5) * (1 + math.cos(math.pi * step / 80)) / 2 for step in range(81)]
    assert list(map(learning_rate(config), range(101))) == pytest.approx(warm_up + fall)


def test_linear_can_end_above_zero():
    rate = learning_rate(loop(schedule="linear", warmup_rate=0.2, final_rate=0.1))
    assert [rate(0), rate(10), rate(20), rate(60), rate(100)] == pytest.approx([0.0, 0.25, 0.5, 0.275, 0.05])


@pytest.mark.parametrize(
    "name", [name for name in get_args(LoopConfig.model_fields["schedule"].annotation) if name != "wsd"]
)
@pytest.mark.parametrize(("steps", "warmup_rate"), [(100, 0.07), (997, 0.1), (1, 0.0), (20_000, 0.0), (64, 0.98)])
def test_schedules_are_those_of_transformers_to_the_last_bit(name: str, steps: int, warmup_rate: float):
    if name == "constant":
        warmup_rate = 0.0
    placeholder = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.3)
    schedule: Any = get_scheduler(name, placeholder, round(warmup_rate * steps), steps)
    factor = schedule.lr_lambdas[0]
    rate = learning_rate(loop(schedule=name, learning_rate=0.3, warmup_rate=warmup_rate, steps=steps))
    assert [rate(step) for step in range(steps + 3)] == [0.3 * factor(step) for step in range(steps + 3)]


@pytest.mark.parametrize(("shape", "its_name"), [("linear", "linear"), ("cosine", "cosine"), ("sqrt", "1-sqrt")])
@pytest.mark.parametrize("final_rate", [0.0, 0.1])
@pytest.mark.parametrize(("steps", "warmup_rate", "decay_rate"), [(100, 0.07, 0.2), (997, 0.0, 0.13), (9, 0.5, 0.5)])
def test_wsd_is_that_of_transformers_to_the_last_bit(
    shape: str, its_name: str, final_rate: float, steps: int, warmup_rate: float, decay_rate: float
):
    placeholder = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.3)
    warmup, decay = round(warmup_rate * steps), round(decay_rate * steps)
    factor: Any = get_wsd_schedule(
        placeholder, warmup, decay, steps, decay_type=its_name, min_lr_ratio=final_rate
    ).lr_lambdas[0]
    config = {"warmup_rate": warmup_rate, "warmup_start": final_rate if warmup else 0.0, "decay_rate": decay_rate}
    config |= {"decay_shape": shape, "final_rate": final_rate, "learning_rate": 0.3, "steps": steps}
    rate = learning_rate(loop(schedule="wsd", **config))
    assert [rate(step) for step in range(steps + 3)] == [0.3 * factor(step) for step in range(steps + 3)]
    assert rate(steps - decay) == 0.3 > rate(steps - decay + 1)


@pytest.mark.slow
def test_a_training_imports_no_optimizer_of_transformers():
    """It takes seconds, and only Adafactor needs it."""
    program = "import sys, src.training.loop; print('transformers.optimization' in sys.modules)"
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=600, cwd=ROOT
    )
    assert result.stdout.strip() == "False"


@pytest.mark.parametrize("optimizer", ["adamw", "adamw_scale", "adafactor"])
def test_only_trained_matrices_decay(optimizer: str):
    """By their shape (B17 of BigScience's metadata project: norms were told by a name that GPT-2's do not have, and
    decayed)."""
    model = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2), nn.Linear(2, 2))
    model[2].requires_grad_(False)
    its = build_optimizer(model, loop(optimizer=optimizer, weight_decay=0.1), torch.device("cpu"))
    decays = {group["weight_decay"]: [tuple(p.shape) for p in group["params"]] for group in its.param_groups}
    assert decays == {0.1: [(2, 2)], 0.0: [(2,), (2,), (2,)]}


def test_loss_is_the_sum_over_targets():
    logits = torch.tensor([[0.0, 0.0], [0.0, math.log(3.0)]])
    assert cross_entropy(logits, torch.tensor([0, 1])).item() == pytest.approx(math.log(2) + math.log(4 / 3))


class Bigram(nn.Module):
    """Logits of the next token from a table over the last one."""

    def __init__(self, table_VV: torch.Tensor) -> None:
        super().__init__()
        self.table_VV = nn.Parameter(table_VV)

    def forward(self, input_ids: torch.Tensor, **_: object) -> SimpleNamespace:
        return SimpleNamespace(logits=self.table_VV[input_ids])


@pytest.mark.parametrize("label_smoothing", [0.0, 0.2])
def test_a_token_counts_where_the_mask_says_so_and_is_read_from_those_before(label_smoothing: float):
    model = Bigram(torch.randn(5, 5))
    ids = torch.tensor([[1, 2, 3, 4], [4, 0, 0, 0]])
    mask = torch.tensor([[False, True, False, True], [False, True, False, False]])
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(mask), "loss_mask": mask}
    log_VV = model.table_VV.log_softmax(-1)
    smooth = label_smoothing / 5
    by_token = [-(1 - label_smoothing) * log_VV[a, b] - smooth * log_VV[a].sum() for a, b in [(1, 2), (3, 4), (4, 0)]]
    expected = torch.stack(by_token).sum()
    loss = causal_lm_loss(model, batch, label_smoothing)
    assert loss.item() == pytest.approx(expected.item())
    (gradient,), (by_hand,) = (
        torch.autograd.grad(value, list(model.parameters()), retain_graph=True) for value in (loss, expected)
    )
    torch.testing.assert_close(gradient, by_hand)


def test_a_step_is_a_multiple_of_the_micro_batch():
    with pytest.raises(ConfigError, match=r"loop: sequences_per_step = 10 is not a multiple of micro_batch = 4"):
        loop(sequences_per_step=10, micro_batch=4)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"schedule": "constant", "warmup_rate": 0.1}, "schedule 'constant' has no warm-up"),
        ({"warmup_start": 0.5}, "warmup_start: there is no warm-up. Set warmup_rate"),
        ({"warmup_start": 0.5, "warmup_rate": 0.001}, "warmup_start: there is no warm-up"),
        *(
            (
                {"schedule": name, "final_rate": 0.1},
                f"final_rate: only for schedule 'linear' or 'cosine' or 'wsd', got '{name}'",
            )
            for name in ("constant", "constant_with_warmup", "inverse_sqrt", "polynomial", "cosine_with_restarts")
        ),
        ({"decay_rate": 0.1}, "decay_rate: only for schedule 'wsd', got 'linear'"),
        ({"schedule": "cosine", "decay_shape": "sqrt"}, "decay_shape: only for schedule 'wsd', got 'cosine'"),
        ({"schedule": "wsd"}, "decay_rate: schedule 'wsd' needs at least one of 100 steps to decay, got 0"),
        ({"schedule": "wsd", "decay_rate": 0.004}, "decay_rate: .* got 0.004"),
        (
            {"schedule": "wsd", "decay_rate": 0.6, "warmup_rate": 0.5},
            "decay_rate: 50 steps of warm-up and 60 of decay are more than the 100 steps",
        ),
    ],
)
def test_a_setting_that_would_be_ignored_is_refused(config: dict[str, float | str], message: str):
    with pytest.raises(ConfigError, match=message):
        loop(**config)


def test_every_process_needs_a_micro_batch(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    loop(sequences_per_step=8, micro_batch=2).check({"val_loss"})
    monkeypatch.setenv("WORLD_SIZE", "5")
    with pytest.raises(ConfigError, match="make 4 micro-batches per step, fewer than the 5 processes"):
        loop(sequences_per_step=8, micro_batch=2).check({"val_loss"})


def test_only_a_lone_process_on_a_cpu_takes_the_fused_kernel(monkeypatch: pytest.MonkeyPatch):
    """By the device where the weights will be: they are still on the CPU when the optimizer is built for a GPU."""
    model, cpu = nn.Linear(2, 2), torch.device("cpu")
    assert all(group["fused"] for group in build_optimizer(model, loop(), cpu).param_groups)
    assert not any(group["fused"] for group in build_optimizer(model, loop(), torch.device("cuda")).param_groups)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert not any(group["fused"] for group in build_optimizer(model, loop(), cpu).param_groups)
