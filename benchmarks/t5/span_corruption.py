"""Span corruption of packed text: our samples and batches against the algorithm of nanoT5 and Hugging Face's T5
collators.

    python -m benchmarks.t5.span_corruption [--sequences 2048] [--batch 128] [--rounds 5]

Rows of 568 tokens become inputs of 512 and targets of 114, as tensors with decoder inputs and masks, by one process on
one thread. Ours includes all work of training: the row by index from the packed documents, a generator seeded with
(seed, epoch, index), the mask, sentinels, end tokens, the batch. The peer, written here as published, stacks the same
rows, draws each row's mask from one global generator, and corrupts the batch with array operations; it has no index, no
packing and returns no masks. First the two are compared on the same masks. Rounds alternate; the fastest counts. Tokens
are those of the raw rows.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from src.data.collate import NOT_LEARNED
from src.data.text.documents import Documents, PackedRows, join_documents
from src.systems.t5.denoising import noise
from src.systems.t5.denoising.dataset import MaskRng, SingleObjectiveDataset
from src.systems.t5.denoising.span_corruption import mask_spans

DENSITY, MEAN_SPAN, VOCABULARY, EOS, PAD = 0.15, 3.0, 32_100, 1, 0
RAW, TARGETS = noise.lengths(512, DENSITY, MEAN_SPAN)
TARGET = 1.5e6
SENTINELS = np.arange(VOCABULARY - 1, VOCABULARY - 101, -1, dtype=np.int32)


class _Encoder:
    """The part of an encoder that a data set uses."""

    pad_id = PAD


def ours(sequences: int) -> SingleObjectiveDataset:
    """A data set of `sequences` rows, from documents of 20 to 2,000 tokens."""
    rng, texts, total = np.random.default_rng(0), [], 0
    while total < sequences * RAW:
        texts.append(rng.integers(2, VOCABULARY - 100, rng.integers(20, 2000)).tolist())
        total += len(texts[-1]) + 1
    documents = Documents([join_documents(texts, EOS)], EOS, "", Path("texts"))
    encoder: Any = _Encoder()
    return SingleObjectiveDataset(
        PackedRows(documents, RAW),
        partial(mask_spans, shares=(DENSITY, MEAN_SPAN), sentinels=SENTINELS, eos_id=EOS),
        MaskRng(0, is_fixed=False),
        encoder,
        "",
    )


def published_mask(length: int) -> np.ndarray:
    """One row's mask, from NumPy's global generator."""
    num_noise = min(max(round(length * DENSITY), 1), length - 1)
    num_spans = max(round(num_noise / MEAN_SPAN), 1)

    def segmentation(num_items: int, num_segments: int) -> np.ndarray:
        indices = np.arange(num_items - 1) < (num_segments - 1)
        np.random.shuffle(indices)  # noqa: NPY002  as published
        segment_id = np.cumsum(np.pad(indices, [[1, 0]]))
        _, lengths = np.unique(segment_id, return_counts=True)
        return lengths

    noise_lengths = segmentation(num_noise, num_spans)
    kept_lengths = segmentation(length - num_noise, num_spans)
    interleaved = np.reshape(np.stack([kept_lengths, noise_lengths], axis=1), [num_spans * 2])
    starts = np.cumsum(interleaved)[:-1]
    indicator = np.zeros((length,), dtype=np.int8)
    indicator[starts] = True
    return np.equal(np.cumsum(indicator) % 2, 1)[:length]


def published_sentinels(mask: np.ndarray) -> np.ndarray:
    """(B, L): the sentinel at the start of a run, -1 on its other tokens, 0 elsewhere."""
    starts = mask - np.roll(mask, 1, axis=-1) * mask
    starts[:, 0] = mask[:, 0]
    ids = np.where(starts != 0, np.cumsum(starts, axis=-1), starts)
    ids = np.where(ids != 0, VOCABULARY - ids, 0)
    return ids - (mask - starts)


def published_filtered(rows: np.ndarray, sentinels: np.ndarray) -> np.ndarray:
    """Runs become their sentinel, and each row gets its end token."""
    full = np.where(sentinels != 0, sentinels, rows)
    tokens = full[full >= 0].reshape((len(rows), -1))
    return np.concatenate([tokens, np.full((len(rows), 1), EOS, dtype=np.int32)], axis=-1)


def published_batch(rows: np.ndarray, masks: np.ndarray) -> dict[str, torch.Tensor]:
    """The batch of rows (B, L)."""
    inputs = published_filtered(rows, published_sentinels(masks.astype(np.int8)))
    labels = published_filtered(rows, published_sentinels((~masks).astype(np.int8)))
    shifted = np.zeros_like(labels)
    shifted[:, 1:], shifted[:, 0] = labels[:, :-1], PAD
    shifted = np.where(shifted == NOT_LEARNED, PAD, shifted)
    arrays = {"input_ids": inputs, "labels": labels, "decoder_input_ids": shifted}
    return {name: torch.from_numpy(array.astype(np.int64)) for name, array in arrays.items()}


def compare(data: SingleObjectiveDataset, rows: Sequence[np.ndarray]) -> None:
    """Both give the same batch where they draw the same masks."""
    masks = [noise.noise_mask(RAW, DENSITY, MEAN_SPAN, MaskRng(0, is_fixed=False).generator(0, i)) for i in range(8)]
    batch: Any = data.collate([data.sample(0, i) for i in range(8)])
    for name, tensor in published_batch(np.stack(rows[:8]), np.stack(masks)).items():
        assert torch.equal(batch[name], tensor), name
    assert batch["input_ids"].shape == (8, 512)
    assert batch["labels"].shape == (8, TARGETS)


def main() -> None:
    """Compare, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in {"sequences": 2048, "batch": 128, "rounds": 5}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    args = parser.parse_args()
    torch.set_num_threads(1)
    data = ours(args.sequences)
    rows = [data._rows.row(i) for i in range(args.sequences)]
    compare(data, rows)

    def our_batch(numbers: range) -> object:
        return data.collate([data.sample(0, i) for i in numbers])

    def peers_batch(numbers: range) -> object:
        return published_batch(np.array([rows[i] for i in numbers]), np.asarray([published_mask(RAW) for _ in numbers]))

    makers: dict[str, Callable[[range], object]] = {"ours": our_batch, "published": peers_batch}
    best = dict.fromkeys(makers, float("inf"))
    batches = [range(i, i + args.batch) for i in range(0, args.sequences - args.batch + 1, args.batch)]
    for _ in range(args.rounds):
        for name, make in makers.items():
            began = time.perf_counter()
            for numbers in batches:
                make(numbers)
            best[name] = min(best[name], time.perf_counter() - began)
    count = len(batches) * args.batch
    print(f"{'':>12} {'M tokens/s':>11} {'us/sequence':>12}")
    for name, seconds in best.items():
        print(f"{name:>12} {count * RAW / seconds / 1e6:11.2f} {seconds / count * 1e6:12.1f}")
    print(f"ours / published: {best['published'] / best['ours']:.2f} times")
    is_met = count * RAW / best["ours"] >= TARGET
    print(f"target {TARGET / 1e6} M tokens/s: {'met' if is_met else 'MISSED'}")


if __name__ == "__main__":
    main()
