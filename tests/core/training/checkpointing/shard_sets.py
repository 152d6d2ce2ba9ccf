"""Shards laid out by hand as DeepSpeed documents it, for sizes and damages that a training would take long to make."""

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


def write(
    folder: Path, stage: int, world: int, weights: dict[str, Tensor], step: int = 4, gap: int = 0
) -> dict[str, Tensor]:
    """Shards of one group with these weights; returns the optimizer's state as a consolidation names it.

    gap: elements that stages 1 and 2 leave free after each parameter, as they do where an accelerator wants them
    aligned.
    """
    folder.mkdir(parents=True, exist_ok=True)
    moments = {
        key: {n: w * factor for n, w in weights.items()} for key, factor in (("exp_avg", 0.5), ("exp_avg_sq", 0.25))
    }
    shapes = [{name: tensor.shape for name, tensor in weights.items()}]
    for rank in range(world):
        vectors = {key: _vector(stage, world, rank, tensors, gap) for key, tensors in {"": weights, **moments}.items()}
        inner: dict[str, Any] = {"zero_stage": stage, "partition_count": world if stage == 3 else [world]}
        inner |= {"param_alignment_paddings": [[gap] * len(weights)]} if gap else {}
        state = {
            "state": {0: {"step": torch.tensor(float(step)), **{key: vectors[key] for key in moments}}},
            "param_groups": [{"params": [0]}],
        }
        inner["fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"] = [vectors[""]]
        inner["optimizer_state_dict" if stage == 3 else "base_optimizer_state"] = state
        torch.save({"optimizer_state_dict": inner}, folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    module = {name: torch.empty(0) if stage == 3 else tensor for name, tensor in weights.items()}
    model = {"module": module, "buffer_names": [], "param_shapes": shapes, "global_steps": step, "dp_world_size": world}
    for rank in range(world if stage == 3 else 1):
        torch.save(model, folder / f"{f'zero_pp_rank_{rank}_' if stage == 3 else ''}mp_rank_00_model_states.pt")
    tensors_by_name = {f"{name}::{key}": tensor for key, tensors in moments.items() for name, tensor in tensors.items()}
    return tensors_by_name | {f"{name}::step": torch.tensor(float(step)) for name in weights}


def _vector(stage: int, world: int, rank: int, tensors: dict[str, Tensor], gap: int) -> Tensor:
    """A process's part: of all parameters end to end (stages 1, 2), or of each parameter (stage 3); padded with
    zeros."""
    if stage < 3:
        return _share(
            torch.cat([torch.nn.functional.pad(tensor.flatten(), (0, gap)) for tensor in tensors.values()]),
            world,
            rank,
            2,
        )
    return torch.cat([_share(tensor.flatten(), world, rank, 1) for tensor in tensors.values()])


def _share(flat: Tensor, world: int, rank: int, alignment: int) -> Tensor:
    size = math.ceil(flat.numel() / (world * alignment)) * alignment
    part = flat[rank * size : (rank + 1) * size]
    return torch.cat([part, torch.zeros(size - part.numel())])
