"""The keys and values of a context that cross-attention blocks read: computed once, at the first token that needs them.

Shapes: B samples, P context positions, D hidden size of the base.
"""

from dataclasses import dataclass, field

from torch import Tensor, nn


@dataclass
class Context:
    """Encoded contexts."""

    hidden: Tensor
    """(B, P, D): the base's last hidden states, after its final norm."""
    mask: Tensor
    """(B, P) bool, True on real tokens."""


@dataclass
class ActiveContext:
    """The context that the decoder reads, with the blocks' key/value cache."""

    context: Context
    mask: Tensor | None
    """The context's; None where all positions are readable: attention without a mask has faster kernels."""
    kv_cache: dict[nn.Module, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """Keys and values by block. They depend on the context alone, so they are computed once."""
