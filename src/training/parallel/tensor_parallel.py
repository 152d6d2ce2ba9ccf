"""Tensor parallelism (Shoeybi et al. 2019, arXiv 1909.08053): the matrices of each layer are cut between neighbouring processes.

They read the same micro-batch. Each computes some of the heads of attention and some of the columns of the feed-forward layers, and
what comes out is added up twice a layer. Embeddings, norms and the output projection are computed by all of them; FSDP2 shares out where
they are kept. Which matrices are cut between rows and which between columns is what transformers publishes for a family.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from src.errors import ConfigError

_STYLES: dict[str, type[ParallelStyle]] = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}


def cut_matrices(model: nn.Module, mesh: DeviceMesh) -> None:
    """Cut the matrices of the layers of `model`, which every process has whole or which have no numbers yet. No message is passed.

    Raises:
        ConfigError: its family is not known to be cut, its sizes are not multiples of the mesh's, or it has adapters.
    """
    found = False
    for part, plan in _decoders(model):
        found = True
        _require_multiples(part.config, mesh.size())
        for name, module in part.named_modules():
            style = plan.get(_pattern(name))
            if style is None:
                continue
            if style not in _STYLES or not isinstance(module, nn.Linear):
                what = f"has {style!r} layers" if style not in _STYLES else f"has no plain matrix {name!r}"
                raise ConfigError(f"--tensor_parallel: {part.config.model_type!r} {what}, which are not cut here. Leave it out.")
            parallelize_module(module, mesh, _STYLES[style](), src_data_rank=None)
    if not found:
        raise ConfigError(
            f"--tensor_parallel: transformers tells no way to cut a {type(model).__name__}. Use a family such as Llama, Mistral or Qwen2, "
            "or leave it out."
        )


def as_rows(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors, cut between rows alone: those that are cut between columns, too, are put together one at a time. Collective."""
    return {name: _as_rows(tensor) if isinstance(tensor, DTensor) else tensor for name, tensor in tensors.items()}


def _decoders(model: nn.Module) -> Iterator[tuple[Any, Mapping[str, str]]]:
    """The base models of transformers in `model` that have a plan, and that."""
    for part in model.modules():
        if getattr(part, "base_model", None) is part and (plan := getattr(part.config, "base_model_tp_plan", None)):
            yield part, plan


def _pattern(name: str) -> str:
    """As plans write it: "layers.*.mlp.up_proj" of "layers.3.mlp.up_proj"."""
    return ".".join("*" if word.isdigit() else word for word in name.split("."))


def _require_multiples(config: Any, processes: int) -> None:
    heads = config.num_attention_heads
    sizes = {
        "num_attention_heads": heads,
        "num_key_value_heads": getattr(config, "num_key_value_heads", None) or heads,
        "intermediate_size": config.intermediate_size,
    }
    for name, size in sizes.items():
        if size % processes:
            raise ConfigError(f"--tensor_parallel {processes}: the model's {name} is {size}, no multiple of it. Give a divisor.")


def _as_rows(tensor: DTensor) -> Tensor:
    if not any(placement.is_shard(1) for placement in tensor.placements):
        return tensor
    whole = tensor.redistribute(placements=[Replicate() if part.is_shard(1) else part for part in tensor.placements])
    return whole.redistribute(placements=[Shard(0) if part.is_shard(1) else part for part in tensor.placements])
