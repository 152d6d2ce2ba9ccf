"""Build the optimizer of `loop.optimizer`."""

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from src.support import distributed
from src.training.config import LoopConfig
from src.training.optim.adamw_scale import AdamWScale

if TYPE_CHECKING:
    from transformers.optimization import Adafactor


def build_optimizer(model: nn.Module, config: LoopConfig, device: torch.device) -> torch.optim.Optimizer:
    """Build the experiment's optimizer for the trained parameters. Weight decay applies to matrices, not to vectors.

    device: device of the weights during training; they can still be on another one.
    """
    if config.optimizer == "adamw":
        return adamw(model, config, device)
    return {"adamw_scale": adamw_scale, "adafactor": adafactor}[config.optimizer](model, config)


def adamw(model: nn.Module, config: LoopConfig, device: torch.device) -> torch.optim.AdamW:
    """AdamW (Loshchilov & Hutter 2019) for the trained parameters. Weight decay applies to matrices, not to vectors.

    A single process on a CPU uses PyTorch's fused kernel, which is five times as fast. It rounds the last few elements
    of a tensor differently, which would break the bitwise equality of DDP, ZeRO and FSDP2.
    """
    alone = distributed.world_size() == 1 and device.type == "cpu"
    return torch.optim.AdamW(_groups(model, config), **_adam(config), fused=alone or None)


def adamw_scale(model: nn.Module, config: LoopConfig) -> AdamWScale:
    """AdamW with steps scaled by the size of the weights; see src/training/optim/adamw_scale.py."""
    return AdamWScale(_groups(model, config), **_adam(config))


def adafactor(model: nn.Module, config: LoopConfig) -> "Adafactor":
    """Adafactor (Shazeer & Stern 2018) as T5 uses it: steps scaled by weights, updates clipped to RMS 1, no momentum.

    The schedule sets the learning rate, so `relative_step` is off. PyTorch's own Adafactor is not used, as it caps the
    learning rate at 1/sqrt(step). Weight decay, which T5 does not use, also follows the scaled learning rate. Every
    matrix is factored; T5 does not factor matrices below 128 x 128.
    """
    from transformers.optimization import Adafactor  # slow to import

    return Adafactor(
        _groups(model, config),
        lr=config.learning_rate,
        clip_threshold=1.0,
        beta1=None,
        scale_parameter=True,
        relative_step=False,
        warmup_init=False,
    )


def _groups(model: nn.Module, config: LoopConfig) -> list[dict[str, Any]]:
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _adam(config: LoopConfig) -> dict[str, Any]:
    return {"lr": config.learning_rate, "betas": (config.adam_beta1, config.adam_beta2), "eps": config.adam_epsilon}
