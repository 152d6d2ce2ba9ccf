"""Tensor parallelism (arXiv 1909.08053): the matrices of each layer are cut between neighbouring processes.

They read the same micro-batch. Each computes some of the heads of attention and some of the columns of the feed-forward
layers, and what comes out is added up twice a layer. Embeddings, norms and the output projection are computed by all of
them; FSDP2 shares out where they are kept. Which matrices are cut between rows and which between columns is what
transformers publishes for a family.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from src import distributed
from src.errors import ConfigError

_STYLES: dict[str, type[ParallelStyle]] = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}


def cut_matrices(model: nn.Module, mesh: DeviceMesh) -> None:
    """Cut the matrices of the layers of `model`, which every process has whole or which have no numbers yet.
    No message is passed.

    Raises:
        ConfigError: its family is not known to be cut, its sizes are not multiples of the mesh's, or it has adapters.
    """
    cut: list[str] = []
    for part, plan in _decoders(model):
        styles = {name: style for name, _ in part.named_modules() if (style := plan.get(_pattern(name)))}
        _require_plain(part, styles)
        _require_parts(part, styles, mesh.size())
        for name, style in styles.items():
            parallelize_module(part.get_submodule(name), mesh, _STYLES[style](), src_data_rank=None)
        cut += styles
    if not cut:
        raise ConfigError(
            f"--tensor_parallel: transformers tells no way to cut a {type(model).__name__}. "
            "Use a family such as Llama, Mistral or Qwen2, or leave it out."
        )


def average_copies(model: nn.Module, mesh: DeviceMesh) -> None:
    """Give the gradients of what is not cut, which the processes of `mesh` compute each for itself,
    the same bits in all. Collective.

    Kernels of GPUs may sum in another order each time, and copies that are updated apart would drift apart.
    """
    whole = [
        grad.to_local()
        for parameter in model.parameters()
        if isinstance(grad := parameter.grad, DTensor)
        and not (distributed.TENSOR_MESH in (grad.device_mesh.mesh_dim_names or ()) and grad.placements[-1].is_shard())
    ]
    if whole:
        flat = torch.cat([grad.flatten() for grad in whole])
        dist.all_reduce(flat, group=mesh.get_group())
        flat /= mesh.size()
        for grad, mean in zip(whole, flat.split([grad.numel() for grad in whole]), strict=True):
            grad.copy_(mean.view_as(grad))


def as_rows(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors, cut between rows alone:
    those that are cut between columns, too, are put together one at a time. Collective."""
    return {name: _as_rows(tensor) if isinstance(tensor, DTensor) else tensor for name, tensor in tensors.items()}


def _decoders(model: nn.Module) -> Iterator[tuple[Any, Mapping[str, str]]]:
    """The base models of transformers in `model` that have a plan, and that."""
    for part in model.modules():
        if getattr(part, "base_model", None) is part and (plan := getattr(part.config, "base_model_tp_plan", None)):
            yield part, plan


def _pattern(name: str) -> str:
    """As plans write it: "layers.*.mlp.up_proj" of "layers.3.mlp.up_proj"."""
    return ".".join("*" if word.isdigit() else word for word in name.split("."))


def _require_parts(part: Any, styles: Mapping[str, str], processes: int) -> None:
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        size = getattr(part.config, name, None)
        if isinstance(size, int) and size % processes:
            raise ConfigError(
                f"--tensor_parallel {processes}: the model's {name} is {size}, no multiple of it. Give a divisor."
            )
    if getattr(part.config, "attention_dropout", 0) and any(
        part.get_submodule(name).weight.requires_grad for name in styles
    ):
        raise ConfigError(
            f"--tensor_parallel: the model's attention_dropout is {part.config.attention_dropout}, and heads of "
            f"several processes would "
            "drop alike. Set it to 0 in its config.json, or leave --tensor_parallel out."
        )


def _require_plain(part: Any, styles: Mapping[str, str]) -> None:
    """That what is cut are matrices,
    and that nothing beside them in a layer's attention or MLP would see some of the heads only."""
    refusal = (
        f"--tensor_parallel: {part.config.model_type!r} has {{}}, which is not cut here. Leave --tensor_parallel out."
    )
    for name, style in styles.items():
        if style not in _STYLES or type(part.get_submodule(name)) is not nn.Linear:
            raise ConfigError(refusal.format(f"{name!r} of another kind than a plain matrix"))
    for above in sorted({name.rpartition(".")[0] for name in styles}):
        for name, _ in part.get_submodule(above).named_parameters(prefix=above):
            if name.rpartition(".")[0] not in styles:
                raise ConfigError(refusal.format(repr(name)))


def _as_rows(tensor: DTensor) -> Tensor:
    if not any(placement.is_shard(1) for placement in tensor.placements):
        return tensor
    whole = tensor.redistribute(placements=[Replicate() if part.is_shard(1) else part for part in tensor.placements])
    return whole.redistribute(placements=[Shard(0) if part.is_shard(1) else part for part in tensor.placements])
