"""Time that steps wait for data, against torch's DataLoader at its defaults: python -m benchmarks.training.loading
[--seconds 0.4]

A step reads eight micro-batches, and a reader reads four times as fast as the step computes. Both are simulated by
sleeping, so that a busy machine does not disturb the result: only the read-ahead strategies differ.
"""

import argparse
import contextlib
import time
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader

from src.data.orders import order_of
from src.training import loader
from src.training.config import LoopConfig
from src.training.state import State

STEPS, MICRO_BATCHES, TOKENS = 25, 8, 2048


@dataclass
class Slow:
    """Samples that take a while to read."""

    seconds: float

    def sample(self, epoch: int, index: int) -> int:
        time.sleep(self.seconds)
        return index

    def __getitem__(self, index: int) -> int:
        return self.sample(0, index)

    def collate(self, samples: list[int]) -> dict[str, torch.Tensor]:
        shape = len(samples), TOKENS
        return {"input_ids": torch.zeros(shape, dtype=torch.long), "loss_mask": torch.ones(shape, dtype=torch.bool)}

    def __len__(self) -> int:
        return STEPS * MICRO_BATCHES * 2


def ours(dataset: Any, workers: int) -> Generator[Any]:
    """The steps of our loader."""
    values = {
        "steps": STEPS,
        "sequences_per_step": MICRO_BATCHES,
        "micro_batch": 1,
        "learning_rate": 1e-3,
        "eval_every": STEPS,
    }
    config = LoopConfig.model_validate({**values, "best_metric": "val_loss", "best_mode": "min"})
    order = order_of(dataset, 0, config.sequences_per_step, config.steps)
    return loader.StepLoader(dataset, order, config, torch.device("cpu"), num_workers=workers).steps(State(inputs={}))


def torchs(dataset: Any, workers: int) -> Generator[Any]:
    """The same of a DataLoader with torch's own prefetch_factor."""
    batches = iter(DataLoader(dataset, batch_size=1, collate_fn=dataset.collate, num_workers=workers))
    while True:
        yield [next(batches) for _ in range(MICRO_BATCHES)]


def waits(steps: Generator[Any], seconds: float) -> float:
    """Share of the time, once the first step has come."""
    wait_seconds = 0.0
    with contextlib.closing(steps):
        next(steps)
        for _ in range(STEPS):
            time.sleep(seconds)
            before = time.perf_counter()
            next(steps)
            wait_seconds += time.perf_counter() - before
    return wait_seconds / (wait_seconds + STEPS * seconds)


def main() -> None:
    """Print both for one and two readers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=0.4, help="that a step computes (default: 0.4)")
    seconds = parser.parse_args().seconds
    for workers in (1, 2):
        data = Slow(seconds / 4 / MICRO_BATCHES)
        mine, theirs = waits(ours(data, workers), seconds), waits(torchs(data, workers), seconds)
        print(
            f"{workers} reader{'s' * (workers > 1)}: {100 * mine:.1f} % of the time is waited for data, torch's "
            f"loader {100 * theirs:.1f} %"
        )


if __name__ == "__main__":
    main()
