"""Exponential moving average of the trained weights: `loop.ema`."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from src.support.weights import AVERAGE, load_parameters, read_tensors

_torch: Any = torch
"""For functions over lists of tensors, which have no type stubs."""


class WeightAverage:
    """Average a of the trained weights w over optimizer steps t = 1, 2, ... (Polyak & Juditsky 1992):

        a(1) = w(1),  a(t) = decay · a(t - 1) + (1 - decay) · w(t)

    Bitwise equal to torch.optim.swa_utils.AveragedModel with get_ema_multi_avg_fn(decay). In float32, like all trained
    weights. Buffers, such as running statistics, are not averaged. Each process has a copy: only for unsharded models.
    """

    def __init__(self, model: nn.Module, decay: float | None) -> None:
        """decay: None for no average; then all methods do nothing."""
        self.decay = decay
        self._weights = {name: p for name, p in model.named_parameters() if p.requires_grad and decay is not None}
        self._averages: dict[str, Tensor] = {}
        """By parameter name; empty before the first step."""

    @torch.no_grad()
    def update(self) -> None:
        """Add the weights after an optimizer step."""
        if self._weights and not self._averages:
            self._averages = {name: weight.detach().clone() for name, weight in self._weights.items()}
        elif self.decay is not None:
            _torch._foreach_lerp_([*self._averages.values()], [*self._weights.values()], 1 - self.decay)

    def scores(self, evaluate: Callable[[], Mapping[str, float]]) -> dict[str, float]:
        """Scores of the average, by the names of `average_name`; {} without an average."""
        if not self._averages:
            return {}
        self._swap()
        try:
            return {average_name(name): value for name, value in evaluate().items()}
        finally:
            self._swap()

    def tensors(self) -> dict[str, Tensor]:
        """Copies on the CPU, by parameter name."""
        return {name: average.to("cpu", copy=True) for name, average in self._averages.items()}

    def load(self, checkpoint: Path) -> None:
        """Restore the result of `tensors`. Without the file, as in a parent that has no average, the average restarts.

        Raises:
            CheckpointError: the file is damaged, or for another model.
        """
        file = checkpoint / AVERAGE
        if self.decay is None or not file.exists():
            return
        self._averages = {name: torch.empty_like(weight) for name, weight in self._weights.items()}
        load_parameters(self._averages, read_tensors(file), file)

    @torch.no_grad()
    def _swap(self) -> None:
        """Swap weights and averages, with memory for one tensor."""
        for name, weight in self._weights.items():
            before = weight.clone()
            weight.copy_(self._averages[name])
            self._averages[name].copy_(before)
        torch.clear_autocast_cache()  # it has casts of the weights from before the swap


def average_name(score: str) -> str:
    """The name of a score of the average: val_loss_ema for val_loss, val_loss_ema/PART for val_loss/PART."""
    name, slash, part = score.partition("/")
    return f"{name}_ema{slash}{part}"
