"""The micro-batches of this process, optimizer step by optimizer step."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Sampler
from torch.utils.data import Dataset as TorchDataset

from src import distributed
from src.interfaces import Dataset, SourcedDataset
from src.runs.history.branches import Branch
from src.training import data_order
from src.training.config import LoopConfig
from src.training.validation import to_device


@dataclass(frozen=True)
class LoaderOptions:
    """How data are read."""

    branches: Sequence[Branch] = ()
    num_workers: int | None = None
    """Processes that read beside this one; None: 2 beside a GPU, else none, as they would take the cores that train."""


@dataclass(frozen=True)
class Step:
    """What one process reads in one optimizer step. Counted on the CPU, as counting on a GPU would synchronise."""

    batches: Sequence[Mapping[str, Tensor]]
    sources: Sequence[Tensor | None]
    """Of each micro-batch, (B,) int64: the number in `sources` of the data set of each sequence. None where it names one source or none."""
    loss_tokens: int
    """True entries of the loss masks."""
    read_tokens: int
    """Real tokens that the model reads, contexts too."""
    sequences: int


class _Samples(TorchDataset):
    """Adapts a data set to torch's DataLoader: samples by (epoch, index), with the numbers of their sources."""

    def __init__(self, dataset: Dataset) -> None:
        self.dataset = dataset
        names = sources(dataset)
        self.numbers = {name: number for number, name in enumerate(names)} if len(names) > 1 else {}

    def __getitem__(self, key: tuple[int, int]) -> tuple[Any, int | None]:
        number = None
        if self.numbers and isinstance(self.dataset, SourcedDataset):
            number = self.numbers[self.dataset.source(key[1])]
        return self.dataset.sample(*key), number

    def collate(self, samples: Sequence[tuple[Any, int | None]]) -> tuple[Mapping[str, Tensor], Tensor | None]:
        """A micro-batch, and the numbers of its sources."""
        batch = self.dataset.collate([sample for sample, _ in samples])
        return batch, torch.tensor([number for _, number in samples]) if self.numbers else None


def sources(dataset: Dataset) -> Sequence[str]:
    """Names of the sources of `dataset`; empty if it does not tell its samples' sources."""
    return dataset.sources if isinstance(dataset, SourcedDataset) else ()


class _BatchSampler(Sampler):
    """Passes an iterator of (epoch, index) lists to a DataLoader."""

    def __init__(self, micro_batches: Iterator[list[tuple[int, int]]]) -> None:
        self.micro_batches = micro_batches

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        return self.micro_batches


def steps(
    dataset: Dataset, config: LoopConfig, seed: int, first_step: int, device: torch.device, options: LoaderOptions | None = None
) -> Iterator[Step]:
    """Yield the micro-batches of this process, on `device`, for each optimizer step from `first_step` on. Endless.

    `dataset` has `len`, `sample(epoch, index)` (a pure function) and `collate(samples)`; for the loss by source also `sources`, their
    names, and `source(index)`.
    """
    options = options or LoaderOptions()
    rank, world_size = distributed.rank(), distributed.world_size()
    share = data_order.RankShare(config.sequences_per_step, config.micro_batch, rank, world_size)
    gpu = device.type == "cuda"
    samples = _Samples(dataset)
    batches = DataLoader(
        samples,
        batch_sampler=_BatchSampler(data_order.micro_batches(seed, len(dataset), first_step, share, options.branches)),
        collate_fn=samples.collate,
        num_workers=(2 if gpu else 0) if options.num_workers is None else options.num_workers,  # samples are pure: no number changes
        worker_init_fn=distributed.ignore_stops,
        pin_memory=gpu,
        generator=torch.Generator(),  # else it draws from the global one
    )
    stream = iter(batches)
    count = config.sequences_per_step // config.micro_batch // world_size
    while True:
        batches, numbers = zip(*(next(stream) for _ in range(count)), strict=True)
        yield Step(
            [to_device(batch, device) for batch in batches],
            [number if number is None else number.to(device, non_blocking=True) for number in numbers],
            loss_tokens=_count_true(batches, "loss_mask"),
            read_tokens=_count_true(batches, "attention_mask") + _count_true(batches, "context_mask"),
            sequences=sum(len(batch["input_ids"]) for batch in batches),
        )


def _count_true(batches: Sequence[Mapping[str, Tensor]], mask: str) -> int:
    return sum(int(batch[mask].sum()) for batch in batches if mask in batch)
