"""The learning rate as a pure function of the step: warm-up and schedule, named as in transformers.

Changes made by a rewind are applied on top: see `runs.history.branches.override_learning_rate`.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import get_scheduler

from src.training.config import LoopConfig


def learning_rate(config: LoopConfig) -> Callable[[int], float]:
    """Learning rate of the optimizer step that follows `step` finished ones, by the schedule's name in transformers."""
    placeholder = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=config.learning_rate)
    warmup = round(config.warmup_rate * config.steps)
    schedule: Any = get_scheduler(config.schedule, placeholder, warmup, config.steps)
    factor = schedule.lr_lambdas[0]
    start, end = config.warmup_start, config.final_rate

    def share(step: int) -> float:
        if step < warmup:
            return start + (1 - start) * (step / warmup) if start else factor(step)
        return end + (1 - end) * factor(step) if end else factor(step)

    return lambda step: config.learning_rate * share(step)
