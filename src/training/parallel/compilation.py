"""Compile the layers of a model with torch.compile. Layers of one class share one graph, with static shapes.

Only passes with gradients are compiled. Evaluation and generation have varying shapes and run uncompiled.
"""

import logging
import os
import shutil
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from src.errors import ConfigError

log = logging.getLogger(__name__)


def layers(model: nn.Module) -> list[nn.Module]:
    """The repeated layers of a model: the entries of its module lists and dicts, without nested ones."""
    found_layers: dict[int, nn.Module] = {}
    inner: set[int] = set()
    for part in model.modules():
        if id(part) in inner or not isinstance(part, nn.ModuleList | nn.ModuleDict):
            continue
        for layer in part.values() if isinstance(part, nn.ModuleDict) else part:
            # Excludes adapters, which are single matrices in dicts.
            if any(True for _ in layer.children()) and any(True for _ in layer.parameters()):
                found_layers[id(layer)] = layer
                inner |= {id(module) for module in layer.modules()}
    return list(found_layers.values())


def compile_layers(model: nn.Module) -> int:
    """Compile the layers of `model` lazily, at the first training pass; returns the number of layers.

    `model` is changed in place, but not the names of its weights. Blocks of a cross-attention model are not compiled,
    as contexts vary in shape. Call it before `memory.checkpoint_layers`, so that recomputation uses the same graph.

    Raises:
        ConfigError: the model has no list of layers, or the machine has no compiler.
    """
    require_compiler(torch.cuda.is_available())
    lists = [part for part in model.modules() if isinstance(part, nn.ModuleList)]
    listed_ids = {id(layer) for part in lists for layer in part}
    compiled_layers = [layer for layer in layers(model) if id(layer) in listed_ids]
    if not compiled_layers:
        raise ConfigError(
            f"loop.compile: {type(model).__name__} has no list of layers to compile. Remove loop.compile."
        )
    for layer in compiled_layers:  # layers of one class share a graph, as they compile the same function
        layer.forward = Compiled(layer, layer.forward, torch.compile(type(layer).forward, dynamic=False))
    log.info("%d layers are compiled at the first step.", len(compiled_layers))
    return len(compiled_layers)


class Compiled:
    """One layer's forward: the compiled graph in training passes, else the original function."""

    def __init__(self, layer: nn.Module, plain: Callable[..., Any], graph: Callable[..., Any]) -> None:
        self.layer, self.plain, self.graph = layer, plain, graph
        self.shape: torch.Size | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.plain(*args, **kwargs)
        shape = next(value.shape for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
        if self.shape not in (None, shape):
            raise ConfigError(
                f"loop.compile: a layer was compiled for shape {list(self.shape or ())}, got {list(shape)}. "
                "Pad every batch to one length, or remove loop.compile."
            )
        self.shape = shape
        return self.graph(self.layer, *args, **kwargs)


def require_compiler(gpu: bool) -> None:
    """Check that the compiler for torch.compile is installed: C++ for a CPU, C for a GPU.

    Raises:
        ConfigError: there is no compiler.
    """
    variable, names = ("CC", ("gcc", "clang", "cc")) if gpu else ("CXX", ("g++", "clang++"))
    compilers = (os.environ[variable],) if os.environ.get(variable) else names
    if not any(shutil.which(name) for name in compilers):
        raise ConfigError(
            f"loop.compile: torch.compile needs a compiler, but {' or '.join(compilers)} is not on the PATH. "
            f"Install one (Debian: `apt install {names[0]}`), set {variable}, or remove loop.compile."
        )
