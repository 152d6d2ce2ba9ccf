"""Products with trained matrices in float8, by torchao:
operands with 3 bits of mantissa and scales of their own, results in bfloat16.

Micikevicius et al. 2022, "FP8 formats for deep learning" (arXiv 2209.05433). The weights stay as they are, in memory
and in files, and so do their names. Passes without gradients (evaluation, generation) compute as without: what a
checkpoint scores does not depend on it.
"""

import logging
from dataclasses import replace
from types import MethodType

import torch
from torch import Tensor, nn

from src.errors import ConfigError
from src.training.parallel.compile import layers

MULTIPLE = 16
"""What the kernels ask of both sides of a matrix."""
log = logging.getLogger(__name__)


def convert_layers(model: nn.Module, scaling: str, emulate: bool = False) -> int:
    """Let the trained matrices in the layers of `model` multiply in float8; returns their number.

    Not the output projection and embeddings, adapters, frozen or quantized matrices, and those with a side that is no
    multiple of 16. `model` is changed in place. To be called before `compile.compile_layers` and before it is shared
    among processes.

    scaling: "tensorwise" or "rowwise", as `LoopConfig.float8`. emulate: whether numbers are rounded as in float8 and
    multiplied in float32, as a CPU can.

    Raises:
        ConfigError: it has no such matrix.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training  # pyright: ignore[reportMissingImports]
    from torchao.float8.float8_linear import Float8Linear  # pyright: ignore[reportMissingImports]

    # Padded, as the gradient of a matrix sums over the tokens of a batch, of which there may be any number.
    settings = replace(Float8LinearConfig.from_recipe_name(scaling), emulate=emulate, pad_inner_dim=True)
    count = 0
    for layer in layers(model):
        convert_to_float8_training(layer, module_filter_fn=_is_converted, config=settings)
        for part in layer.modules():
            if isinstance(part, Float8Linear):
                part.forward = MethodType(_forward, part)
                count += 1
    if not count:
        raise ConfigError(
            f"loop.float8: the layers of {type(model).__name__} have no "
            f"trained nn.Linear whose sides are multiples of {MULTIPLE} (adapters aside). Leave loop.float8 out."
        )
    log.info("%d matrices multiply in float8 (%s).", count, scaling)
    return count


def _is_converted(module: nn.Module, name: str) -> bool:
    if (
        type(module) is not nn.Linear or "lora_" in name or not module.weight.requires_grad
    ):  # subclasses multiply in their own way
        return False
    return module.in_features % MULTIPLE == 0 and module.out_features % MULTIPLE == 0


def _forward(self: nn.Linear, input: Tensor) -> Tensor:  # noqa: A002  the name that nn.Linear gives it
    return type(self).forward(self, input) if torch.is_grad_enabled() else nn.Linear.forward(self, input)
