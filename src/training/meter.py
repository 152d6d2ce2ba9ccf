"""How fast a training goes. Timings differ from run to run, so they stay out of scores.jsonl."""

import contextlib
import time
from collections.abc import Iterator
from typing import TypeVar

import torch

from src import distributed
from src.training.loader import Step

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

    def count(self, step: Step) -> None:
        """Count one optimizer step: every real token that the model reads, contexts too."""
        self.steps += 1
        self.sequences += step.sequences
        self.tokens += step.read_tokens

    def tokens_per_second(self) -> float:
        """Rate of this rank since `restart`."""
        return self.tokens / max(time.perf_counter() - self.began - self.apart_seconds, 1e-9)

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
