"""How fast a training goes. Timings differ from run to run, so they stay out of scores.jsonl."""

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from src import distributed

T = TypeVar("T")


class Meter:
    """Sums since `restart`, on this rank."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Begin anew."""
        self.began = time.perf_counter()
        self.apart_seconds = self.wait_seconds = 0.0
        self.steps = self.tokens = self.sequences = 0

    def waiting(self, batches: Iterator[T]) -> T:
        """The next item; the time until it comes counts as waiting for data."""
        before = time.perf_counter()
        item = next(batches)
        self.wait_seconds += time.perf_counter() - before
        return item

    def count(self, batches: Sequence[Mapping[str, Tensor]]) -> None:
        """Count one optimizer step on these micro-batches: every real token that the model reads, contexts too."""
        self.steps += 1
        self.sequences += sum(len(batch["input_ids"]) for batch in batches)
        self.tokens += sum(int(batch[mask].sum()) for batch in batches for mask in ("attention_mask", "context_mask") if mask in batch)

    @contextlib.contextmanager
    def apart(self) -> Iterator[None]:
        """Time spent inside is not training time (evaluation, checkpoints)."""
        before = time.perf_counter()
        yield
        self.apart_seconds += time.perf_counter() - before

    def row(self) -> dict[str, float]:
        """Rates over all ranks since `restart`. Collective."""
        tokens, sequences = distributed.total([self.tokens, self.sequences])
        total = time.perf_counter() - self.began
        seconds = max(total - self.apart_seconds, 1e-9)
        row = {
            "seconds": total,
            "steps_per_second": self.steps / seconds,
            "tokens_per_second": tokens / seconds,
            "sequences_per_second": sequences / seconds,
            "data_wait_rate": self.wait_seconds / seconds,
        }
        if torch.cuda.is_available():
            row["peak_memory_bytes"] = torch.cuda.max_memory_allocated()
        return row
