"""The micro-batches of this process, optimizer step by optimizer step."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from src import distributed
from src.experiments.branches import Branch
from src.training import order
from src.training.config import LoopConfig
from src.training.evaluation import to_device


@dataclass(frozen=True)
class Reading:
    """How data are read."""

    branches: Sequence[Branch] = ()
    num_workers: int | None = None
    """Processes that read beside this one; None: 2 beside a GPU, else none, as they would take the cores that train."""


@dataclass(frozen=True)
class Step:
    """What one process reads in one optimizer step. Counted before it goes to the device, where counting would wait for it."""

    batches: Sequence[Mapping[str, Tensor]]
    loss_tokens: int
    """True entries of the loss masks."""
    read_tokens: int
    """Real tokens that the model reads, contexts too."""
    sequences: int


class _Samples(Dataset):
    """Lets a DataLoader ask for samples by (epoch, index)."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __getitem__(self, key: tuple[int, int]) -> Any:
        return self.dataset.sample(*key)


class _Plan(Sampler):
    """Hands an iterator of (epoch, index) lists to a DataLoader."""

    def __init__(self, micro_batches: Iterator[list[tuple[int, int]]]) -> None:
        self.micro_batches = micro_batches

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        return self.micro_batches


def steps(
    dataset: Any, config: LoopConfig, seed: int, first_step: int, device: torch.device, reading: Reading | None = None
) -> Iterator[Step]:
    """Yield the micro-batches of this process, on `device`, for each optimizer step from `first_step` on. Endless.

    `dataset` has `len`, `sample(epoch, index)` (a pure function) and `collate(samples)`.
    """
    reading = reading or Reading()
    rank, world_size = distributed.rank(), distributed.world_size()
    share = order.Share(config.sequences_per_step, config.micro_batch, rank, world_size)
    gpu = device.type == "cuda"
    batches = DataLoader(
        _Samples(dataset),
        batch_sampler=_Plan(order.micro_batches(seed, len(dataset), first_step, share, reading.branches)),
        collate_fn=dataset.collate,
        num_workers=(2 if gpu else 0) if reading.num_workers is None else reading.num_workers,  # samples are pure: no number changes
        worker_init_fn=distributed.ignore_stops,
        pin_memory=gpu,
        generator=torch.Generator(),  # else it draws from the global one
    )
    stream = iter(batches)
    count = config.sequences_per_step // config.micro_batch // world_size
    while True:
        batches = [next(stream) for _ in range(count)]
        yield Step(
            [to_device(batch, device) for batch in batches],
            loss_tokens=_true(batches, "loss_mask"),
            read_tokens=_true(batches, "attention_mask") + _true(batches, "context_mask"),
            sequences=sum(len(batch["input_ids"]) for batch in batches),
        )


def _true(batches: Sequence[Mapping[str, Tensor]], mask: str) -> int:
    return sum(int(batch[mask].sum()) for batch in batches if mask in batch)
