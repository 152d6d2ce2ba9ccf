"""Saves memory: gradient checkpointing, activation offloading, reuse of CPU memory, and advice on out-of-memory errors.

None of it changes a bit of a gradient.
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
LEAST_BYTES = 2**20
"""A tensor smaller than that stays where it is: the copy would cost more than the room."""


@contextlib.contextmanager
def oom_advice() -> Iterator[None]:
    """Turn an exhausted GPU into a RunError that says what to change."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        remedy = (
            "Try --gradient_checkpointing, or lower loop.micro_batch: a step reads the same sequences in more pieces."
        )
        raise RunError(f"{str(error).splitlines()[0]} {remedy}") from error


def reuse_freed_memory() -> None:
    """Keep freed memory in this process for the next step, instead of returning it to the system.
    Does nothing without glibc.

    As it comes glibc gives large blocks back to the kernel in each pass and takes fresh pages in the next, for which a
    training on a CPU pays with a part of its time (LOG.md). Blocks above 32 MiB are still given back: kept, they would
    part the memory into pieces that fit nothing, and the peak would grow.
    """
    trim_threshold, mmap_threshold = -1, -3  # malloc.h
    never, most = -1, 2**25  # most: glibc refuses a larger one
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(trim_threshold, never)
        mallopt(mmap_threshold, most)


def checkpoint_layers(model: nn.Module, how: str = "full") -> int:
    """Gradient checkpointing: every layer of `model` saves only its inputs; returns the number of layers.

    Chen et al. 2016, "Training deep nets with sublinear memory cost" (arXiv 1604.06174). Dropout draws again what it
    drew before. `model` is changed in place, the names of its weights are not. A layer behaves as ever where no
    gradients are taken.

    how: "selective" saves also what products with weights and fused attention give, so that only cheap operations are
    computed again (Korthikanti et al. 2022, arXiv 2205.05198, section 5).

    Raises:
        ConfigError: it has no layers, or compiled ones of which parts were to be saved.
    """
    model_layers = layers(model)
    if not model_layers:
        raise ConfigError(
            f"--gradient_checkpointing: {type(model).__name__} has no layers to compute again. Leave it out."
        )
    if how == "selective" and any(isinstance(layer.forward, Compiled) for layer in model_layers):
        raise ConfigError(
            "--gradient_checkpointing selective: compiled layers are saved whole or not at all. "
            "Write 'full', or leave it out."
        )
    for layer in model_layers:
        layer.forward = _CheckpointedLayer(layer.forward, how == "selective")
    more = ", and the results of their products" if how == "selective" else ""
    log.info("%d layers keep only their inputs for the backward pass%s.", len(model_layers), more)
    return len(model_layers)


class _CheckpointedLayer:
    """Calls `forward` and saves only its inputs for the backward pass;
    if `selective`, also what `_is_dear` to compute."""

    def __init__(self, forward: Callable[..., Any], selective: bool) -> None:
        self.forward = forward
        self.context = {"context_fn": partial(create_selective_checkpoint_contexts, _policy)} if selective else {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.forward(*args, **kwargs)  # without the trouble of noting the random state
        return checkpoint(self.forward, *args, use_reentrant=False, preserve_rng_state=True, **self.context, **kwargs)


def _policy(_: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if _is_expensive(func, args, kwargs) else CheckpointPolicy.PREFER_RECOMPUTE


def _is_expensive(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Products with weights, and fused attention, unless it draws:
    what is computed again behind it would draw other numbers.

    Not the products of attention that is not fused: its scores are what needs the memory, and T5 adds its bias to them
    in place.
    """
    if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
        return True
    if not (hasattr(func, "_schema") and func._schema.name.startswith("aten::_scaled_dot_product")):
        return False
    arguments = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | dict(kwargs)
    return not arguments.get("dropout_p", 0.0)


@contextlib.contextmanager
def offload_activations(model: nn.Module, least_bytes: int = LEAST_BYTES) -> Iterator["Offload"]:
    """Context of a forward pass of `model`: saved tensors are moved to host memory, pinned if there is a GPU.

    Weights stay where they are; of weights that a pass casts or gathers, the copies that it made go as well.
    """
    offload = Offload(model, least_bytes)
    with saved_tensors_hooks(offload.pack, offload.unpack):
        yield offload


class Offload:
    """Moves saved tensors to the host and back, and counts them."""

    def __init__(self, model: nn.Module, least_bytes: int) -> None:
        self.least_bytes = least_bytes
        self.num_bytes = 0
        """Moved to the host."""
        self.num_returned = 0
        """Tensors that came back."""
        self._weights = {_storage_key(tensor) for tensor in [*model.parameters(), *model.buffers()]}

    def pack(self, tensor: Tensor) -> "Tensor | _HostTensor":
        """The stand-in for `tensor`."""
        size = tensor.numel() * tensor.element_size()
        if size < self.least_bytes or _storage_key(tensor) in self._weights or tensor.layout != torch.strided:
            return tensor
        extent = 1 + sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
        gaps = extent > tensor.numel()
        source = tensor.detach() if gaps else tensor.detach().as_strided((extent,), (1,), tensor.storage_offset())
        pinned = tensor.device.type == "cuda"
        numbers = torch.empty(source.shape, dtype=source.dtype, device="cpu", pin_memory=pinned)
        # Copies in both directions wait in the stream that computes, so neither end is read too early.
        numbers.copy_(source, non_blocking=pinned)
        self.num_bytes += numbers.nbytes
        return _HostTensor(numbers, tensor.device, tensor.shape, tensor.stride(), gaps)

    def unpack(self, packed: "Tensor | _HostTensor") -> Tensor:
        """The packed tensor with its original strides, which compiled code relies on."""
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
    """With `gaps` in the shape of the tensor, else all that lies between its first and its last number, flat."""
    device: torch.device
    """Where it came from."""
    shape: torch.Size
    strides: tuple[int, ...]
    gaps: bool
    """Whether it used only a part of the memory between its first and its last number."""


def _storage_key(tensor: Tensor) -> int:
    """Key of its storage, the same for all its views."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.untyped_storage().data_ptr()
