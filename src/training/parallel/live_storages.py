"""Count the bytes of live tensors during a pass with a dispatch mode; with fake tensors, without using the memory."""

import contextlib
import weakref
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

PARTS = ("weights", "gradients", "optimizer", "copies", "activations", "logits")
"""copies: weights in the precision of the loop, gathered layers of a sharded model, and gradients in communication
buffers. logits: with their float32 copies and gradients."""
_MAX_REAL = 2**27
"""Larger tokens and masks are fake too, in bytes."""
_aten = torch.ops.aten
_INDEXING = (_aten.index.Tensor, _aten.index_put.default, _aten.index_put_.default, _aten._index_put_impl_.default)


class LiveStorages(TorchDispatchMode):
    """Within the block, counts the bytes of live tensors by part, and records the peak.

    processes: number of processes that shard the gradients.
    """

    def __init__(self, vocabulary: int = 0, processes: int = 1) -> None:
        super().__init__()
        self.vocabulary, self.processes = vocabulary, processes
        self.live: dict[str, int] = dict.fromkeys(PARTS, 0)
        self.at_peak = dict(self.live)
        self._entries = WeakIdKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = self.compute(func, args, kwargs or {})
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self.hold(tensor, self._part(func, args, tensor))
        return result

    def compute(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation."""
        return func(*args, **kwargs)

    def hold(self, tensor: Tensor, part: str) -> None:
        """Count a tensor as `part` until its storage is freed. A gradient that is already counted changes its part."""
        storage = tensor.untyped_storage()
        if storage in self._entries:
            if part == "gradients":
                self._move(self._entries[storage], part)
            return
        free = part == "gathered"
        entry = {"part": "copies" if free else part, "bytes": 0 if free else storage.nbytes()}
        part = entry["part"]
        self._entries[storage] = entry
        weakref.finalize(storage, self._free, entry).atexit = False
        self.live[part] += entry["bytes"]
        if self._total(self.live) > self._total(self.at_peak):
            self.at_peak = dict(self.live)

    def _total(self, parts: Mapping[str, int]) -> int:
        return sum(parts.values()) - parts["gradients"] + parts["gradients"] // self.processes

    def _move(self, entry: dict[str, Any], part: str) -> None:
        self.live[entry["part"]] -= entry["bytes"]
        self.live[part] += entry["bytes"]
        entry["part"] = part

    def _free(self, entry: dict[str, Any]) -> None:
        self.live[entry["part"]] -= entry["bytes"]

    def _part(self, func: Any, args: Any, output: Tensor) -> str:
        if func is _aten._to_copy.default:
            entry = self._entries.get(args[0].untyped_storage())
            if entry and entry["part"] in ("weights", "copies"):
                return "gathered" if entry.get("gathered") else "copies"
        is_logits = output.is_floating_point() and output.ndim > 1 and output.shape[-1] == self.vocabulary
        return "logits" if is_logits else "activations"


class FakeStorages(LiveStorages):
    """Like `LiveStorages`, with fake weights and activations. Tokens, masks and frames are real, as control flow
    depends on them."""

    def __init__(self, vocabulary: int = 0, processes: int = 1, gpu: bool = True) -> None:
        """gpu: whether to count the memory of a GPU instead of a CPU."""
        super().__init__(vocabulary, processes)
        self.fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.gathered: set[int] = set()
        """Ids of weights that are gathered in the precision of the loop, so that autograd saves no copy."""
        self.device = _LikeGPU() if gpu else contextlib.nullcontext()

    def fake(self, tensor: Tensor) -> Tensor:
        """A fake tensor on the CPU in place of `tensor`."""
        if isinstance(tensor, FakeTensor):
            return tensor
        with self.fake_mode:
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")

    def compute(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation on real tensors if all inputs are real and outputs are small or views. Floating-point
        outputs also need an input."""
        if func in _INDEXING:
            args = (args[0], [part for index in args[1] for part in self._positions(index)], *args[2:])
        inputs = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        stand_ins = tree_map_only(Tensor, self.fake, (args, kwargs))
        if any(isinstance(value, FakeTensor) for value in inputs):
            return func(*stand_ins[0], **stand_ins[1])
        try:
            with self.fake_mode:
                like = func(*stand_ins[0], **stand_ins[1])
        except (DataDependentOutputException, DynamicOutputShapeException):
            return func(*args, **kwargs)
        outputs = [value for value in tree_leaves(like) if isinstance(value, Tensor)]
        if not func.is_view and any(
            value.nbytes > _MAX_REAL or (value.is_floating_point() and not inputs) for value in outputs
        ):
            return like
        return func(*args, **kwargs)

    def _positions(self, index: Any) -> tuple[Any, ...]:
        """Replace a mask by positions; by all positions for a fake mask."""
        if not isinstance(index, Tensor) or index.dtype != torch.bool:
            return (index,)
        if not isinstance(index, FakeTensor):
            return index.nonzero().unbind(1)
        with self.fake_mode:
            return torch.zeros(index.numel(), index.ndim, dtype=torch.long).unbind(1)


class _LikeGPU(TorchFunctionMode):
    """Emulates differences of a GPU: norms and softmax in float32 under autocast; dropout saves a byte mask; fused
    attention with dropout or a mask saves no scores."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (F.layer_norm, F.softmax, torch.softmax, Tensor.softmax) and torch.is_autocast_enabled("cpu"):
            return func(args[0].float(), *args[1:], **kwargs)
        if func is F.dropout:
            arguments = {"p": 0.5, "training": True, **dict(zip(("p", "training"), args[1:], strict=False)), **kwargs}
            return (
                torch.native_dropout(args[0], arguments["p"], True)[0]
                if arguments["training"] and arguments["p"]
                else args[0]
            )
        if func is F.scaled_dot_product_attention:
            arguments = dict(zip(("attn_mask", "dropout_p", "is_causal"), args[3:], strict=False))
            return func(*args[:3], **{**arguments, **kwargs, "dropout_p": 0.0})
        return func(*args, **kwargs)
