"""AdamW with steps scaled by the root mean square of each tensor: the optimizer of nanoT5 (arXiv 2309.02373).

As in Adafactor (Shazeer & Stern 2018, section 8), the learning rate is relative to the size of the weights, so that one
learning rate fits all tensors. The scale is the root mean square of the weights, not of the update.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from src.support import distributed

_torch: Any = torch
"""For functions over lists of tensors, which have no type stubs."""
MIN_SCALE = 1e-3
"""Minimum scale, so that a tensor of zeros can change."""


class AdamWScale(torch.optim.Optimizer):
    """Step t of a tensor w of n elements, with moments m and v as in Adam:

        a = lr · √(1 - β₂ᵗ) / (1 - β₁ᵗ) · max(1e-3, ‖w‖₂ / √n)
        w ← w - a · m / (√v + ε)
        w ← w - lr · weight_decay · w

    Sharded (FSDP2) and unsharded tensors get bitwise equal updates: the norm is that of the full tensor, summed in
    float64 and rounded to float32, and everything else is element-wise.
    """

    def __init__(
        self, params: Any, lr: float, betas: tuple[float, float], eps: float, weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.measured_norms: Sequence[float] | None = None
        """`norms` for the next step if they are already known; None: `step` computes them."""

    def norms(self) -> Tensor:
        """L2 norms, (K,) float64, of this process's shards of the parameters with a gradient, on their device."""
        return l2_norms([_local(parameter) for parameter in self._moving()])

    def _moving(self) -> list[Tensor]:
        return [parameter for group in self.param_groups for parameter in group["params"] if parameter.grad is not None]

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update all parameters with a gradient. Collective for sharded parameters."""
        assert closure is None, "gradients are computed before the step"
        moving = self._moving()
        norms, self.measured_norms = self.measured_norms or self.norms().tolist(), None
        for parameter, scale in zip(moving, scales(moving, norms), strict=True):
            state = self.state[parameter]
            if not state:
                state["step"] = torch.tensor(0.0)
                state["exp_avg"], state["exp_avg_sq"] = (torch.zeros_like(parameter) for _ in range(2))
            state["step"] += 1
            state["scale"] = scale
        for group in self.param_groups:
            self._update(group)

    def _update(self, group: dict[str, Any]) -> None:
        """Update this process's shards of the parameters of a group."""
        parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
        if not parameters:
            return
        states = [self.state[parameter] for parameter in parameters]
        weights = [_local(parameter) for parameter in parameters]
        gradients = [_local(parameter.grad) for parameter in parameters]
        firsts, seconds = ([_local(state[name]) for state in states] for name in ("exp_avg", "exp_avg_sq"))
        beta1, beta2 = group["betas"]
        _torch._foreach_lerp_(firsts, gradients, 1 - beta1)
        _torch._foreach_mul_(seconds, beta2)
        _torch._foreach_addcmul_(seconds, gradients, gradients, 1 - beta2)
        below = _torch._foreach_sqrt(seconds)
        _torch._foreach_add_(below, group["eps"])
        _torch._foreach_addcdiv_(weights, firsts, below, [-_rate(group, state) for state in states])
        if group["weight_decay"]:
            _torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])


def _rate(group: dict[str, Any], state: dict[str, Any]) -> float:
    """Factor of m / (√v + ε) for one parameter."""
    step, (beta1, beta2) = float(state["step"]), group["betas"]
    return group["lr"] * math.sqrt(1 - beta2**step) / (1 - beta1**step) * float(state["scale"])


def l2_norms(tensors: Sequence[Tensor]) -> Tensor:
    """L2 norms of K tensors, (K,) float64, on their device."""
    return (
        torch.stack(list(_torch._foreach_norm(tensors, 2, dtype=torch.float64)))
        if tensors
        else torch.zeros(0, dtype=torch.float64)
    )


def scales(parameters: list[Tensor], norms: Sequence[float]) -> list[float]:
    """max(1e-3, root mean square) of each full tensor. Collective for sharded parameters.

    norms: of this process's shards.
    """
    squares = [norm**2 for norm in norms]
    cut = [isinstance(p, DTensor) and any(placement.is_shard() for placement in p.placements) for p in parameters]
    if any(cut):
        sums = distributed.all_reduce_sum(squares)
        squares = [total if shared else local for total, local, shared in zip(sums, squares, cut, strict=True)]
    means = torch.tensor(
        [math.sqrt(square / p.numel()) for square, p in zip(squares, parameters, strict=True)], dtype=torch.float32
    )
    return means.clamp_(min=MIN_SCALE).tolist()


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
