"""Training FLOPs of a cross-attention model; for the rules of counting see src/support/flops.py."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from torch import Tensor, nn

from src.support.flops import (
    FORWARD,
    FROZEN,
    TRAINED,
    Adapters,
    adapter_weights,
    attention_flops,
    decoder_stack,
    head_weights,
)
from src.systems.crossattn.model.encoder import ENCODED_TOGETHER

if TYPE_CHECKING:
    from src.systems.crossattn.model.layers import Block, CrossAttentionLM

PROJECTED = 2
"""Number of passes through the key and value projections: contexts have no gradients."""


def training_flops(model: "CrossAttentionLM") -> Callable[[Mapping[str, Tensor]], int]:
    """A function from a batch to the FLOPs of a training pass, including the padding of questions but not of contexts.

    With `cache_contexts` contexts are encoded once and read many times, so encoding does not count.
    """
    config, stack = model.base.config, decoder_stack(model.base.config)
    trained = model.settings.train_all_params
    adapters = (None if trained else adapter_weights(model.base)) or Adapters()
    # Gradients flow through the decoder's layers down to the lowest block, or to the adapters of the lowest layer.
    below = 0 if trained or any(adapters) else min(model.layer_indices) + model.settings.final_layer
    through = TRAINED if trained else FROZEN
    blocks = model.unique_blocks()
    places, width = len(model.layer_indices), blocks[0].attention.out.in_features
    reading, projecting = _weights(blocks[0])  # all blocks have the same sizes

    def flops(batch: Mapping[str, Tensor]) -> int:
        B, T = batch["input_ids"].shape
        num_scored = int(batch["loss_mask"][:, 1:].sum()) if "loss_mask" in batch else B * T
        total = stack._replace(layers=below).flops(B, T, FORWARD) + stack._replace(layers=stack.layers - below).flops(
            B, T, through
        )
        total += through.matrices * 2 * num_scored * head_weights(config)
        total += adapters.flops(B * T, 0) + adapters.head_flops(config, num_scored)
        P = batch["context_mask"][0].numel()
        if "context_hidden" not in batch and not model.settings.cache_contexts:
            for n, S in _encoding_passes(batch["context_mask"]):
                total += stack.flops(n, S, FORWARD) + adapters.flops(n * S, 0, FORWARD)
        total += places * B * (TRAINED.matrices * 2 * T * reading + TRAINED.attention * attention_flops(T, P, width))
        return total + len(blocks) * PROJECTED * 2 * B * P * projecting

    return flops


def _weights(block: "Block") -> tuple[int, int]:
    """Number of weights in a block's matrices that read the decoder, and in those that read the context."""
    attention = block.attention
    matrices = [module.weight.numel() for module in block.modules() if isinstance(module, nn.Linear)]
    context = sum(matrix.weight.numel() for matrix in (attention.k, attention.v) if matrix is not None)
    return sum(matrices) - context, context + (attention.q.weight.numel() if attention.k is None else 0)


def _encoding_passes(mask_BCS: Tensor) -> list[tuple[int, int]]:
    """(sequences, tokens) of each pass of `encode` over the chunks."""
    lengths = sorted(length for length in mask_BCS.flatten(0, 1).sum(dim=-1).tolist() if length)
    groups = [lengths[i : i + ENCODED_TOGETHER] for i in range(0, len(lengths), ENCODED_TOGETHER)]
    return [(len(group), group[-1]) for group in groups]
