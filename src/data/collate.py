"""Pad lists of ids to tensors. Masks are made from lengths, not from ids, so the padding id can also be a real token.

Shapes: B samples, T tokens of the longest sample, C context chunks of the sample with the most chunks, S tokens of the
longest chunk.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from src.experiments.batches import PackedBatch, Seq2SeqBatch, TokenBatch

if TYPE_CHECKING:
    import numpy as np

NOT_LEARNED = -100
"""Label of padding, which the losses ignore."""


def pad_tokens(
    ids: Sequence[Sequence[int]],
    loss_masks: Sequence[Sequence[bool]],
    pad_id: int,
    pad_left: bool = False,
    length: int | None = None,
) -> TokenBatch:
    """Pad B sequences to (B, T): on the right, or on the left for generation.
    length: T, by default that of the longest."""
    input_ids, attention_mask = pad_ids(ids, pad_id, length or 0, pad_left)
    loss_mask, _ = pad_ids(loss_masks, False, length or 0, pad_left)
    return {"input_ids": input_ids, "attention_mask": attention_mask, "loss_mask": loss_mask.bool()}


def pack_tokens(
    ids: Sequence[Sequence[int]],
    loss_masks: Sequence[Sequence[bool]],
    lengths: Sequence[Sequence[int]],
    pad_id: int,
    length: int,
) -> PackedBatch:
    """Pad B rows of joined documents on the right to (B, length). lengths: tokens of each document, by row."""
    batch = pad_tokens(ids, loss_masks, pad_id, length=length)
    positions_BT = torch.empty_like(batch["input_ids"])
    for positions_T, row in zip(positions_BT, lengths, strict=True):
        positions_T.copy_(torch.cat([torch.arange(n) for n in (*row, length - sum(row))]))
    return {**batch, "position_ids": positions_BT}


def pad_chunks(samples: Sequence[Sequence[Sequence[int]]], pad_id: int) -> tuple[Tensor, Tensor]:
    """Pad context chunks of B samples on the right to ids (B, C, S) int64 and a mask (B, C, S), True on real tokens.

    A sample with fewer chunks gets all-False mask rows, never another sample's chunk.
    """
    most = max(map(len, samples))
    ids, mask = pad_ids([chunk for chunks in samples for chunk in (*chunks, *[()] * (most - len(chunks)))], pad_id)
    return ids.view(len(samples), most, -1), mask.view(len(samples), most, -1)


def seq2seq(
    inputs: "Sequence[Sequence[int] | np.ndarray]",
    targets: "Sequence[Sequence[int] | np.ndarray]",
    pad_id: int,
    start_id: int,
    lengths: tuple[int, ...] = (0, 0),
) -> Seq2SeqBatch:
    """Pad B inputs to (B, S) and B targets to (B, T) on the right.
    The decoder reads `start_id`, then the targets without the last token.

    pad_id: padding of the encoder's and the decoder's inputs; labels are padded with `NOT_LEARNED`. lengths: minimum of
    S and T.
    """
    input_ids, attention_mask = pad_ids(inputs, pad_id, lengths[0])
    labels, loss_mask = pad_ids(targets, NOT_LEARNED, lengths[1])
    decoder_input_ids = torch.full_like(labels, start_id)
    decoder_input_ids[:, 1:] = labels[:, :-1].masked_fill(~loss_mask[:, :-1], pad_id)
    return {
        "input_ids": input_ids,
        "attention_mask": attention_mask,
        "decoder_input_ids": decoder_input_ids,
        "labels": labels,
        "loss_mask": loss_mask,
    }


def pad_ids(
    sequences: "Sequence[Sequence[int] | np.ndarray]", fill: int, length: int = 0, pad_left: bool = False
) -> tuple[Tensor, Tensor]:
    """Pad B lists with `fill`: (B, T) int64 with T >= length, and a mask (B, T), True on the sequences' own values."""
    lengths = torch.tensor([len(sequence) for sequence in sequences])
    T = max(int(lengths.max()), length)
    ids = torch.full((len(sequences), T), fill, dtype=torch.int64)
    for row, sequence in zip(ids.numpy(), sequences, strict=True):
        row[T - len(sequence) if pad_left else 0 :][: len(sequence)] = sequence
    mask = torch.arange(T) < lengths[:, None]
    return ids, mask.flip(1) if pad_left else mask
