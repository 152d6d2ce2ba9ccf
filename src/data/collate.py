"""Lists of ids to padded tensors. Masks come from lengths, never from ids, so a padding id may also be a real token.

Shapes: B samples, T tokens of the longest sample, C context chunks of the sample with most, S tokens of the longest chunk.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from src.batches import Seq2SeqBatch, TokenBatch

if TYPE_CHECKING:
    import numpy as np

NOT_LEARNED = -100
"""Label of what is padding, as the losses know it."""


def pad_tokens(
    ids: Sequence[Sequence[int]], loss_masks: Sequence[Sequence[bool]], pad_id: int, left: bool = False, length: int | None = None
) -> TokenBatch:
    """Pad B sequences to (B, T): on the right, or on the left for generation. length: T where it is not that of the longest."""
    B, T = len(ids), length or max(len(sequence) for sequence in ids)
    input_ids = torch.full((B, T), pad_id)
    attention_mask = torch.zeros(B, T, dtype=torch.bool)
    loss_mask = torch.zeros(B, T, dtype=torch.bool)
    for b, (sequence, mask) in enumerate(zip(ids, loss_masks, strict=True)):
        place = slice(T - len(sequence), T) if left else slice(len(sequence))
        input_ids[b, place] = torch.tensor(sequence, dtype=torch.int64)
        attention_mask[b, place] = True
        loss_mask[b, place] = torch.tensor(mask, dtype=torch.bool)
    return {"input_ids": input_ids, "attention_mask": attention_mask, "loss_mask": loss_mask}


def pad_chunks(samples: Sequence[Sequence[Sequence[int]]], pad_id: int) -> tuple[Tensor, Tensor]:
    """Pad the context chunks of B samples on the right to ids (B, C, S) int64 and a mask (B, C, S), True on real tokens.

    A sample with fewer chunks gets all-False mask rows, never another sample's chunk.
    """
    B, C = len(samples), max(len(chunks) for chunks in samples)
    S = max(len(chunk) for chunks in samples for chunk in chunks)
    ids = torch.full((B, C, S), pad_id)
    mask = torch.zeros(B, C, S, dtype=torch.bool)
    for b, chunks in enumerate(samples):
        for c, chunk in enumerate(chunks):
            ids[b, c, : len(chunk)] = torch.tensor(chunk, dtype=torch.int64)
            mask[b, c, : len(chunk)] = True
    return ids, mask


def seq2seq(
    inputs: "Sequence[Sequence[int] | np.ndarray]", targets: "Sequence[Sequence[int] | np.ndarray]", pad_id: int, start_id: int
) -> Seq2SeqBatch:
    """Pad B inputs to (B, S) and B targets to (B, T) on the right. The decoder reads `start_id`, then the targets but the last.

    pad_id: what both read where there is padding; the labels there are `NOT_LEARNED`.
    """
    input_ids, attention_mask = _pad(inputs, pad_id)
    labels, loss_mask = _pad(targets, NOT_LEARNED)
    decoder_input_ids = torch.full_like(labels, start_id)
    decoder_input_ids[:, 1:] = labels[:, :-1].masked_fill(~loss_mask[:, :-1], pad_id)
    return {
        "input_ids": input_ids,
        "attention_mask": attention_mask,
        "decoder_input_ids": decoder_input_ids,
        "labels": labels,
        "loss_mask": loss_mask,
    }


def _pad(sequences: "Sequence[Sequence[int] | np.ndarray]", fill: int) -> tuple[Tensor, Tensor]:
    """(B, T) int64, and a mask (B, T), True on what is no padding."""
    lengths = torch.tensor([len(sequence) for sequence in sequences])
    longest = int(lengths.max())
    ids = torch.full((len(sequences), longest), fill)
    rows = ids.numpy()
    for row, sequence in zip(rows, sequences, strict=True):
        row[: len(sequence)] = sequence
    return ids, torch.arange(longest) < lengths[:, None]
