"""Statistics of the inputs and outputs of each module in one forward pass."""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from src.training.monitoring import tensor_statistics


@dataclass(frozen=True)
class Activation:
    """Sums of one input or output of a module."""

    name: str
    """Name of the module; "" for the model itself."""
    type: str
    """Class of the module."""
    context: str
    """`input[i]`, `input[name]`, `output`, `output[i]`, `output[name]` or `output[i][j]`."""
    sums: Tensor
    """(P,), see statistics.PARTS."""


@contextlib.contextmanager
def watch_activations(model: nn.Module, activations: list[Activation]) -> Iterator[None]:
    """Within the block, append the statistics of every module's inputs and outputs to `activations`.

    Only floating-point tensors are included. There is one entry per (name, type, context): recomputation by gradient
    checkpointing is ignored. Compiled models are skipped, as hooks would recompile them.
    """
    if is_compiled(model):
        yield
        return
    seen: set[tuple[str, str]] = set()
    hooks = [
        module.register_forward_hook(_Hook(name, type(module).__name__, seen, activations), with_kwargs=True)
        for name, module in model.named_modules()
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def is_compiled(model: nn.Module) -> bool:
    """Whether the model or a part of it is compiled."""
    return any(
        type(part).__name__ == "OptimizedModule" or part._compiled_call_impl is not None for part in model.modules()
    )


class _Hook:
    def __init__(self, name: str, kind: str, seen: set[tuple[str, str]], activations: list[Activation]) -> None:
        self.name, self.kind, self.seen, self.activations = name, kind, seen, activations

    def __call__(self, module: nn.Module, inputs: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if (self.name, self.kind) in self.seen:
            return
        self.seen.add((self.name, self.kind))
        entries = [*_tensors("input", inputs, 1), *_tensors("input", kwargs, 1), *_tensors("output", output, 2)]
        self.activations += [
            Activation(self.name, self.kind, context, tensor_statistics.sums(tensor)) for context, tensor in entries
        ]


def _tensors(context: str, value: Any, depth: int) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors in `value`, including nested tuples, lists and dicts up to `depth`."""
    if isinstance(value, Tensor):
        if value.is_floating_point() and value.layout == torch.strided:
            yield context, value
    elif depth and isinstance(value, Mapping):
        for key, entry in value.items():
            yield from _tensors(f"{context}[{key}]", entry, depth - 1)
    elif depth and isinstance(value, tuple | list):
        for index, entry in enumerate(value):
            yield from _tensors(f"{context}[{index}]", entry, depth - 1)
