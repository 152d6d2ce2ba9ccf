"""Build the optimizer of `loop.optimizer` and `loop.groups`."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from src.support import distributed
from src.training.config import LoopConfig
from src.training.optim.adamw_scale import AdamWScale
from src.training.optim.parameter_groups import split

if TYPE_CHECKING:
    from transformers.optimization import Adafactor

RATE_FACTOR, LABEL, NAMES = "rate_factor", "label", "names"
"""Keys of parameter groups: `Settings.rate_factor`, `Settings.label` and the names of the parameters."""


def build_optimizer(model: nn.Module, config: LoopConfig, device: torch.device) -> torch.optim.Optimizer:
    """Build the experiment's optimizer for the trained parameters. Weight decay applies to matrices, not to vectors.

    device: device of the weights during training; they can still be on another one.

    Raises:
        ConfigError: `loop.groups`, `loop.layerwise_decay` or Muon do not fit the model. On every rank.
    """
    by_optimizer: dict[str, list[dict[str, Any]]] = {}
    for settings, parameters in split(model, config).items():
        by_optimizer.setdefault(settings.optimizer, []).append(
            {
                "params": list(parameters.values()),
                "weight_decay": settings.weight_decay,
                "lr": config.learning_rate * settings.rate_factor,
                RATE_FACTOR: settings.rate_factor,
                LABEL: settings.label,
                NAMES: list(parameters),
            }
        )
    optimizers = [_BUILDERS[name](groups, config, device) for name, groups in by_optimizer.items()]
    return optimizers[0] if len(optimizers) == 1 else Combined(optimizers)


class Combined(torch.optim.Optimizer):
    """Several optimizers as one. They share its state, and their groups are its groups."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        super().__init__([group for optimizer in optimizers for group in optimizer.param_groups], {})
        self.optimizers = optimizers
        for optimizer in optimizers:
            ours = {id(group["params"][0]): group for group in self.param_groups}
            optimizer.param_groups = [ours[id(group["params"][0])] for group in optimizer.param_groups]
            optimizer.state = self.state

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update all parameters with a gradient."""
        assert closure is None, "gradients are computed before the step"
        for optimizer in self.optimizers:
            optimizer.step()


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rates of all groups. rate: the loop's learning rate of the next step."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get(RATE_FACTOR, 1.0)  # missing in ZeRO's shards of older runs


def learning_rates(optimizer: torch.optim.Optimizer, rate: float) -> dict[str, float]:
    """Score columns of the learning rates of groups that differ from the loop's `rate`."""
    groups = optimizer.param_groups
    return {f"learning_rate/{group[LABEL]}": rate * group[RATE_FACTOR] for group in groups if group.get(LABEL)}


def adamw(groups: list[dict[str, Any]], config: LoopConfig, device: torch.device) -> torch.optim.AdamW:
    """AdamW (Loshchilov & Hutter 2019).

    A single process on a CPU uses PyTorch's fused kernel, which is five times as fast. It rounds the last few elements
    of a tensor differently, which would break the bitwise equality of DDP, ZeRO and FSDP2.
    """
    alone = distributed.world_size() == 1 and device.type == "cpu"
    return torch.optim.AdamW(groups, **_adam(config), fused=alone or None)


def adamw_scale(groups: list[dict[str, Any]], config: LoopConfig, device: torch.device) -> AdamWScale:
    """AdamW with steps scaled by the size of the weights; see src/training/optim/adamw_scale.py."""
    return AdamWScale(groups, **_adam(config))


def muon(groups: list[dict[str, Any]], config: LoopConfig, device: torch.device) -> torch.optim.Muon:
    """Muon (Jordan et al. 2024), with updates scaled to the size of AdamW's (Liu et al. 2025, "Muon is scalable").

    This scale is the same for a matrix and its transpose, which GPT-2 stores.
    """
    return torch.optim.Muon(groups, lr=config.learning_rate, adjust_lr_fn="match_rms_adamw")


def adafactor(groups: list[dict[str, Any]], config: LoopConfig, device: torch.device) -> "Adafactor":
    """Adafactor (Shazeer & Stern 2018) as T5 uses it: steps scaled by weights, updates clipped to RMS 1, no momentum.

    The schedule sets the learning rate, so `relative_step` is off. PyTorch's own Adafactor is not used, as it caps the
    learning rate at 1/sqrt(step). Weight decay, which T5 does not use, also follows the scaled learning rate. Every
    matrix is factored; T5 does not factor matrices below 128 x 128.
    """
    from transformers.optimization import Adafactor  # slow to import

    return Adafactor(
        groups,
        lr=config.learning_rate,
        clip_threshold=1.0,
        beta1=None,
        scale_parameter=True,
        relative_step=False,
        warmup_init=False,
    )


def _adam(config: LoopConfig) -> dict[str, Any]:
    return {"lr": config.learning_rate, "betas": (config.adam_beta1, config.adam_beta2), "eps": config.adam_epsilon}


_BUILDERS: dict[str, Callable[[list[dict[str, Any]], LoopConfig, torch.device], torch.optim.Optimizer]] = {
    "adamw": adamw,
    "adamw_scale": adamw_scale,
    "adafactor": adafactor,
    "muon": muon,
}
