"""Statistics of weights, gradients, Adam's moments and updates by parameter, for unsharded and sharded models.

Rank 0 reads unsharded tensors. Each process reads its own FSDP2 shards, and `gather_sums` joins the sums. ZeRO
parameters are gathered one at a time.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from src.support import distributed
from src.training.monitoring import tensor_statistics
from src.training.optim.optimizers import NAMES

GRADIENT, WEIGHT, UPDATE = "hp_grad", "hp", "effective_update"
MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class TensorSums:
    """The sums (see `tensor_statistics`) of one tensor, or of this process's shard of it."""

    name: str
    """Name of the parameter."""
    context: str
    sums: Tensor
    """(P,), see statistics.PARTS."""


def gradients(model: nn.Module) -> list[TensorSums]:
    """`hp_grad` of every trained parameter that has a gradient. Collective for sharded models."""
    return [item for name, p in _trainable_parameters(model) for item in _tensor_sums(name, GRADIENT, _gradient(p))]


def weights(model: nn.Module, optimizer: Any) -> list[TensorSums]:
    """`hp`, `exp_avg`, `exp_avg_sq` and `effective_update` of every trained parameter. Collective for sharded models.

    The update is m̂ / (√v̂ + ε) with bias-corrected moments (Kingma & Ba 2015, algorithm 1), without learning rate and
    weight decay, and with the scale of AdamWScale. Optimizers without Adam's moments have only `hp`, and Adafactor also
    the second moment of vectors.
    """
    tensor_sums: list[TensorSums] = []
    for name, parameter in _trainable_parameters(model):
        tensor_sums += _tensor_sums(name, WEIGHT, _weight(parameter))
        adam = _adam(optimizer, parameter)
        first, second = (_moment(optimizer, parameter, key) for key in MOMENTS)
        for context, moment in zip(MOMENTS, (first, second), strict=True):
            tensor_sums += _tensor_sums(name, context, moment)
        if adam is not None and first is not None and second is not None:
            pieces = (adam.update(m, v) for m, v in tensor_statistics.chunks(first, second))
            tensor_sums.append(TensorSums(name, UPDATE, tensor_statistics.sums_of(pieces, first.device)))
    return tensor_sums


def gather_sums(tensor_sums: list[TensorSums], model: nn.Module) -> list[TensorSums]:
    """Join the sums of shards to sums of full tensors, on the CPU. Collective with FSDP2; synchronizes with the
    device."""
    if not tensor_sums and not _is_sharded(model):
        return []
    table = (
        torch.stack([item.sums for item in tensor_sums]).cpu()
        if tensor_sums
        else torch.empty(0, len(tensor_statistics.PARTS), dtype=torch.float64)
    )
    if _is_sharded(model):
        table = tensor_statistics.join_sums(torch.stack(distributed.all_gather_list([table])))
    return [TensorSums(item.name, item.context, sums) for item, sums in zip(tensor_sums, table, strict=True)]


def learning_rates(model: nn.Module, optimizer: Any) -> dict[str, float]:
    """Learning rate of the last step, by parameter."""
    # By name, as ZeRO has flat copies of parameters in its groups.
    rates = {name: group["lr"] for group in optimizer.param_groups for name in group.get(NAMES, ())}
    default = optimizer.param_groups[0]["lr"]
    return {name: rates.get(name, default) for name, _ in _trainable_parameters(model)}


def update_rates(tensor_sums: list[TensorSums], rates_by_name: Mapping[str, float]) -> dict[str, float | None]:
    """Norm of the last update (learning rate times `effective_update`) over the norm of the parameter, by parameter."""
    norms: dict[str, dict[str, float | None]] = {WEIGHT: {}, UPDATE: {}}
    if tensor_sums:
        for item, norm in zip(
            tensor_sums, tensor_statistics.norms(torch.stack([item.sums for item in tensor_sums])), strict=True
        ):
            norms.setdefault(item.context, {})[item.name] = norm
    rates: dict[str, float | None] = {}
    for name, update in norms[UPDATE].items():
        weight = norms[WEIGHT][name]
        rates[name] = rates_by_name[name] * update / weight if update is not None and weight else None
    return rates


@dataclass(frozen=True)
class _Adam:
    beta1: float
    beta2: float
    epsilon: float
    steps: float
    scale: float = 1.0

    def update(self, first: Tensor, second: Tensor) -> Tensor:
        """m̂ / (√v̂ + ε) times the scale, in float64, for flat pieces of the moments."""
        mean = first.double() / (1 - self.beta1**self.steps)
        square = second.double() / (1 - self.beta2**self.steps)
        return mean / (square.sqrt_() + self.epsilon) * self.scale


def _trainable_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return ((name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad)


def _tensor_sums(name: str, context: str, tensor: Tensor | None) -> list[TensorSums]:
    return [] if tensor is None else [TensorSums(name, context, tensor_statistics.sums(tensor))]


def _is_sharded(model: nn.Module) -> bool:
    """Whether processes have different shards of a parameter."""
    return any(_is_part(parameter) for _, parameter in _trainable_parameters(model))


def _is_part(tensor: Tensor) -> bool:
    return any(placement.is_shard() for placement in getattr(tensor, "placements", ()))


def _is_zero(parameter: Tensor) -> bool:
    return hasattr(parameter, "_hp_mapping") or hasattr(parameter, "ds_id")


def _local_part(tensor: Tensor | None) -> Tensor | None:
    """The part of a tensor that this process reads: its shard, or all of an unsharded tensor on rank 0."""
    if tensor is None:
        return None
    if _is_part(tensor):
        local: Tensor = tensor.to_local()  # type: ignore[attr-defined]  a DTensor
        return local[:0] if distributed.is_copy(tensor) else local
    if not distributed.is_main():
        return None
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor  # type: ignore[operator]


def _gradient(parameter: nn.Parameter) -> Tensor | None:
    if _is_zero(parameter):
        from deepspeed.utils import safe_get_full_grad

        return _local_part(safe_get_full_grad(parameter))
    return _local_part(parameter.grad)


def _weight(parameter: nn.Parameter) -> Tensor | None:
    if _is_zero(parameter):
        from deepspeed.utils import safe_get_full_fp32_param

        return _local_part(safe_get_full_fp32_param(parameter))
    return _local_part(parameter)


def _moment(optimizer: Any, parameter: nn.Parameter, key: str) -> Tensor | None:
    if _is_zero(parameter):
        from deepspeed.utils import safe_get_full_optimizer_state

        return _local_part(safe_get_full_optimizer_state(parameter, key)) if _inner(optimizer).state else None
    return _local_part(optimizer.state.get(parameter, {}).get(key))


def _inner(optimizer: Any) -> Any:
    """The PyTorch optimizer inside a DeepSpeed one."""
    return getattr(optimizer, "optimizer", optimizer)


def _adam(optimizer: Any, parameter: nn.Parameter) -> _Adam | None:
    """Adam's settings at the last step; None before the first step and for other optimizers."""
    if _is_zero(parameter):  # its groups are flat, and differ only in weight decay
        states, groups = list(_inner(optimizer).state.values()), optimizer.param_groups
    else:
        states = [state] if (state := optimizer.state.get(parameter)) else []
        groups = [group for group in optimizer.param_groups if any(member is parameter for member in group["params"])]
    steps = next((float(state["step"]) for state in states if "step" in state), 0.0)
    if not steps or not groups or "betas" not in groups[0]:
        return None
    (beta1, beta2), epsilon = groups[0]["betas"], groups[0]["eps"]
    scale = next((float(state["scale"]) for state in states if "scale" in state), None)
    if scale is None:
        return _Adam(beta1, beta2, epsilon, steps)
    # AdamWScale adds ε to √v before the bias correction.
    return _Adam(beta1, beta2, epsilon / math.sqrt(1 - beta2**steps), steps, scale)
