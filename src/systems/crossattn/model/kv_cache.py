"""Cache of the keys and values of a context, computed once per cross-attention block at the first use.

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
    """The context's mask; None if all positions are readable, as attention without a mask has faster kernels."""
    kv_cache: dict[nn.Module, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """Keys and values by block. They depend only on the context, so they are computed once."""
