"""The optimizer, and the learning rate as a pure function of the step."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import get_scheduler

from src import distributed
from src.training.config import LoopConfig


def adamw(model: nn.Module, config: LoopConfig) -> torch.optim.AdamW:
    """AdamW (Loshchilov & Hutter 2019) on the parameters that are trained; matrices decay, vectors do not.

    A lone process on a CPU takes PyTorch's fused kernel, which is five times as fast. It rounds the last few elements of a tensor otherwise,
    so processes that cut the tensors differently, as DDP, ZeRO and FSDP2 do, would not have the same bits with it.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    alone = distributed.world_size() == 1 and all(p.device.type == "cpu" for p in trained)
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [g for g in groups if g["params"]],
        lr=config.learning_rate,
        betas=(config.adam_beta1, config.adam_beta2),
        eps=config.adam_epsilon,
        fused=alone or None,
    )


def learning_rate(config: LoopConfig) -> Callable[[int], float]:
    """Learning rate of the optimizer step that follows `step` finished ones, by the schedule's name in transformers."""
    placeholder = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=config.learning_rate)
    warmup = round(config.warmup_rate * config.steps)
    schedule: Any = get_scheduler(config.schedule, placeholder, warmup, config.steps)
    factor = schedule.lr_lambdas[0]
    return lambda step: config.learning_rate * factor(step)
