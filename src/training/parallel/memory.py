"""Save memory: gradient checkpointing, activation offloading, reuse of CPU memory, and advice on out-of-memory errors.

Gradients are bitwise unchanged.
"""

import contextlib
import ctypes
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from src.errors import ConfigError, RunError
from src.training.parallel.compilation import Compiled, layers

log = logging.getLogger(__name__)
MIN_BYTES = 2**20
"""Smaller tensors are not offloaded, as copying costs more than the memory."""


@contextlib.contextmanager
def oom_advice() -> Iterator[None]:
    """Convert a GPU's out-of-memory error to a RunError with advice."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        remedy = (
            "Try --gradient_checkpointing, or lower loop.micro_batch, which does not change the sequences per step."
        )
        raise RunError(f"{str(error).splitlines()[0]} {remedy}") from error


def reuse_freed_memory() -> None:
    """Reuse freed memory for the next step, instead of returning it to the system. Does nothing without glibc.

    By default glibc returns large blocks to the kernel in each pass and requests new pages in the next, which slows
    down a training on a CPU. Blocks above 32 MiB are still returned, as they would fragment memory and raise
    the peak.
    """
    trim_threshold, mmap_threshold = -1, -3  # malloc.h
    never, most = -1, 2**25  # most: the maximum of glibc
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(trim_threshold, never)
        mallopt(mmap_threshold, most)


def checkpoint_layers(model: nn.Module, how: str = "full") -> int:
    """Apply gradient checkpointing: every layer of `model` saves only its inputs. Returns the number of layers.

    Chen et al. 2016, "Training deep nets with sublinear memory cost" (arXiv 1604.06174). Recomputation uses the same
    dropout. `model` is changed in place, but not the names of its weights. Passes without gradients do not change.

    how: "full", or "selective", which also saves the results of products with weights and of fused attention, so that
    only cheap operations are recomputed (Korthikanti et al. 2022, arXiv 2205.05198, section 5).

    Raises:
        ConfigError: the model has no layers, or `how` is "selective" and layers are compiled.
    """
    model_layers = layers(model)
    if not model_layers:
        raise ConfigError(f"--gradient_checkpointing: {type(model).__name__} has no layers. Leave it out.")
    if how == "selective" and any(isinstance(layer.forward, Compiled) for layer in model_layers):
        raise ConfigError(
            "--gradient_checkpointing selective: not supported with compiled layers. Use 'full', or leave it out."
        )
    for layer in model_layers:
        layer.forward = _CheckpointedLayer(layer.forward, how == "selective")
    more = ", and the results of their products" if how == "selective" else ""
    log.info("%d layers save only their inputs for the backward pass%s.", len(model_layers), more)
    return len(model_layers)


class _CheckpointedLayer:
    """Calls `forward` and saves only its inputs for the backward pass;
    if `selective`, also results that are expensive to compute."""

    def __init__(self, forward: Callable[..., Any], selective: bool) -> None:
        self.forward = forward
        self.context = {"context_fn": partial(create_selective_checkpoint_contexts, _policy)} if selective else {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.forward(*args, **kwargs)  # without saving the random state
        return checkpoint(self.forward, *args, use_reentrant=False, preserve_rng_state=True, **self.context, **kwargs)


def _policy(_: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if _is_expensive(func, args, kwargs) else CheckpointPolicy.PREFER_RECOMPUTE


def _is_expensive(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether to save a result: products with weights, and fused attention without dropout. With dropout, recomputation
    after it would draw other numbers.

    Unfused attention is recomputed: its scores need most of the memory, and T5 adds its bias in place.
    """
    if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
        return True
    if not (hasattr(func, "_schema") and func._schema.name.startswith("aten::_scaled_dot_product")):
        return False
    arguments = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | dict(kwargs)
    return not arguments.get("dropout_p", 0.0)


@contextlib.contextmanager
def offload_activations(model: nn.Module, least_bytes: int = MIN_BYTES) -> Iterator["Offload"]:
    """Within the block, move tensors saved by a forward pass of `model` to host memory, pinned if there is a GPU.

    Weights are not moved, but cast or gathered copies of weights are.
    """
    offload = Offload(model, least_bytes)
    with saved_tensors_hooks(offload.pack, offload.unpack):
        yield offload


class Offload:
    """Moves saved tensors to the host and back, and counts their bytes."""

    def __init__(self, model: nn.Module, least_bytes: int) -> None:
        self.least_bytes = least_bytes
        self.num_bytes = 0
        """Bytes moved to the host."""
        self.num_returned = 0
        """Number of tensors moved back."""
        self._weights = {_storage_key(tensor) for tensor in [*model.parameters(), *model.buffers()]}

    def pack(self, tensor: Tensor) -> "Tensor | _HostTensor":
        """Move a tensor to the host, unless it is small or a weight."""
        size = tensor.numel() * tensor.element_size()
        if size < self.least_bytes or _storage_key(tensor) in self._weights or tensor.layout != torch.strided:
            return tensor
        extent = 1 + sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
        gaps = extent > tensor.numel()
        source = tensor.detach() if gaps else tensor.detach().as_strided((extent,), (1,), tensor.storage_offset())
        pinned = tensor.device.type == "cuda"
        numbers = torch.empty(source.shape, dtype=source.dtype, device="cpu", pin_memory=pinned)
        # Copies in both directions run in the computing stream, so that no buffer is read too early.
        numbers.copy_(source, non_blocking=pinned)
        self.num_bytes += numbers.nbytes
        return _HostTensor(numbers, tensor.device, tensor.shape, tensor.stride(), gaps)

    def unpack(self, packed: "Tensor | _HostTensor") -> Tensor:
        """Return the packed tensor with its original strides, which compiled code needs."""
        if isinstance(packed, Tensor):
            return packed
        self.num_returned += 1
        if not packed.gaps:
            return packed.numbers.to(packed.device, non_blocking=True).as_strided(packed.shape, packed.strides)
        room = torch.empty_strided(packed.shape, packed.strides, dtype=packed.numbers.dtype, device=packed.device)
        return room.copy_(packed.numbers, non_blocking=True)


@dataclass(frozen=True)
class _HostTensor:
    """A tensor on the host."""

    numbers: Tensor
    """With `gaps`, a tensor of the original shape; else the flat memory from its first to its last element."""
    device: torch.device
    """Original device."""
    shape: torch.Size
    strides: tuple[int, ...]
    gaps: bool
    """Whether the tensor has gaps in memory between its first and last element."""


def _storage_key(tensor: Tensor) -> int:
    """Key of a tensor's storage, equal for all views."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.untyped_storage().data_ptr()
