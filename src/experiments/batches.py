"""Typed dicts of tensors that the data sets hand to the models.

Shapes: B samples, T tokens of the longest sample, C context chunks, S tokens of the longest chunk,
P positions of all chunks of a sample, D hidden size of the model that encoded them.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, NotRequired, TypedDict

if TYPE_CHECKING:
    import torch
    from torch import Tensor


def to_device(batch: "Mapping[str, Tensor]", device: "torch.device") -> "dict[str, Tensor]":
    """The batch on `device`. Copies from pinned memory do not block the CPU."""
    return {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}


class TokenBatch(TypedDict):
    """Sequences for a causal language model."""

    input_ids: "Tensor"
    """(B, T) int64."""
    attention_mask: "Tensor"
    """(B, T) bool, True on real tokens."""
    loss_mask: "Tensor"
    """(B, T) bool, True on tokens that count in the loss. Never True at t = 0."""


class PackedBatch(TokenBatch):
    """Rows of several documents that do not attend to each other. The model gets positions, and no attention mask.

    Transformers derives the document boundaries from the positions, but only if there is no attention mask."""

    position_ids: "Tensor"
    """(B, T) int64: positions within each document, from 0.
    The padding at the end of a row is a document of its own."""


class RankedBatch(TokenBatch):
    """Replies to C conversations: B rows, each a conversation followed by one reply."""

    ranks: "Tensor"
    """(B,) int64: rank of each reply within its conversation. Lower is better; equal ranks are ties."""
    sample_of_row: "Tensor"
    """(B,) int64: the number of the conversation of each row, from 0."""
    scores: NotRequired["Tensor"]
    """(B,) float32: the score of each reply in the data, if all have one."""
    mismatch_mask: NotRequired["Tensor"]
    """(B,) bool, True on rows of labeled replies that only estimate the KL: a prompt with another prompt's reply."""
    reference_logps: NotRequired["Tensor"]
    """(B,) float32: summed log-probability of each row's learned tokens under the initial model."""


class InterleavedBatch(PackedBatch):
    """Packed rows of documents of text and images.
    N frames in all rows, E pixels per side, S sources, K counts."""

    frames: "Tensor"
    """(N, 3, E, E) float32: the frames of all images, row by row, in order; N can be 0. There is no padding."""
    source_ids: "Tensor"
    """(B, T) int64: the number of the source of each token; ignored for padding."""
    loss_weights: NotRequired["Tensor"]
    """(B, T) float32: how much the loss of each token counts; without it all count 1."""
    source_counts: "Tensor"
    """(S, K) int64: the counts of each source, in the order of `systems.interleaved.streaming.dataset.COUNTED`."""
    cached: "Tensor"
    """(2,) int64: reads of remote shards: those from the cache, and all."""


class ContextBatch(TokenBatch):
    """Sequences and the contexts that they can read."""

    context_ids: "Tensor"
    """(B, C, S) int64."""
    context_mask: "Tensor"
    """(B, C, S) bool, True on real tokens; all False for a chunk that a sample does not have."""


class Seq2SeqBatch(TypedDict):
    """Inputs of an encoder and targets of its decoder. S tokens of the longest input, T of the longest target."""

    input_ids: "Tensor"
    """(B, S) int64."""
    attention_mask: "Tensor"
    """(B, S) bool, True on real tokens."""
    decoder_input_ids: "Tensor"
    """(B, T) int64: the input of the decoder, a start token and the targets except the last."""
    labels: "Tensor"
    """(B, T) int64: the targets, -100 where nothing is learned."""
    loss_mask: "Tensor"
    """(B, T) bool, True on targets that are learned: where `labels` is not -100."""


class DepthBatch(Seq2SeqBatch):
    """Shuffled sentences, with the attention masks of DEPTH. `attention_mask` has the real tokens."""

    encoder_mask: "Tensor"
    """(B, S, S) bool, True where a token of the input (second axis) sees another (third)."""
    decoder_mask: "Tensor"
    """(B, T, T) bool, True where a token that the decoder reads sees another."""
    cross_mask: "Tensor"
    """(B, T, S) bool, True where a token that the decoder reads sees one of the input."""
    loss_weights: NotRequired["Tensor"]
    """(B, T) float32: how much the loss of each target counts; without it all count 1."""


class EncodedBatch(TokenBatch):
    """Sequences with contexts that are already encoded."""

    context_hidden: "Tensor"
    """(B, P, D): hidden states of all chunks of a sample, concatenated; zeros where `context_mask` is False."""
    context_mask: "Tensor"
    """(B, P) bool, True on real tokens."""
