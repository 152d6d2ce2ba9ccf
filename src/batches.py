"""What crosses from data to models: typed dicts of tensors.

Shapes: B samples, T tokens of the longest sample, C context chunks, S tokens of the longest chunk,
P positions of all chunks of a sample, D hidden size of the model that encoded them.
"""

from typing import TYPE_CHECKING, TypedDict

if TYPE_CHECKING:
    from torch import Tensor


class TokenBatch(TypedDict):
    """Sequences for a causal language model."""

    input_ids: "Tensor"
    """(B, T) int64."""
    attention_mask: "Tensor"
    """(B, T) bool, True on real tokens."""
    loss_mask: "Tensor"
    """(B, T) bool, True on tokens whose prediction from the tokens before them is scored. Never True at t = 0."""


class ContextBatch(TokenBatch):
    """Sequences and, beside them, the contexts that they may read."""

    context_ids: "Tensor"
    """(B, C, S) int64."""
    context_mask: "Tensor"
    """(B, C, S) bool, True on real tokens; all False for a chunk that a sample does not have."""


class EncodedBatch(TokenBatch):
    """Sequences and, beside them, contexts that were encoded before."""

    context_hidden: "Tensor"
    """(B, P, D): hidden states of all chunks of a sample, one behind the other; zeros where `context_mask` is False."""
    context_mask: "Tensor"
    """(B, P) bool, True on real tokens."""
