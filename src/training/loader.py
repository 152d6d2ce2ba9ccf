"""Load the micro-batches of this process, step by step."""

import os
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Sampler, get_worker_info
from torch.utils.data import Dataset as TorchDataset

from src.data.orders import Cursor, Key, MicroBatch, Order, RankShare, ReadAheadDataset
from src.errors import UserError
from src.experiments.batches import to_device
from src.experiments.dataset_protocols import Dataset, DecodedDataset, SourcedDataset
from src.support import distributed
from src.training.config import LoopConfig
from src.training.state import State
from src.training.validation import count_loss_tokens, count_true

_SMALL = 2**20
"""Workers send smaller tensors, in bytes, as numpy arrays."""
_SOURCES = "sources of the samples"
"""Key for the sources next to the names of a batch."""


@dataclass(frozen=True)
class Step:
    """One rank's share of an optimizer step. Counts are computed on the CPU, as a GPU would have to synchronize."""

    batches: Sequence[Mapping[str, Tensor]]
    """On the CPU."""
    sources: Sequence[Tensor | None]
    """Per micro-batch (B,) int64 on the CPU: index of each sequence's source. None with fewer than two sources."""
    count: float
    """This rank's share of the divisor of the summed losses."""
    loss_tokens: int
    """True entries of the loss masks."""
    read_tokens: int
    """Tokens that the model reads without padding, contexts included."""
    sequences: int
    keys: Sequence[Sequence[Key]]
    """Per micro-batch, the keys of its samples."""
    cursor: Cursor
    """Entries of the order's cursor that this rank has changed by the end of this step."""
    counters: Mapping[str, Sequence[float]]
    """Counters of the order on this rank: sum and count by name."""
    passes: int
    """Passes on the busiest rank; other ranks pad with zero-weight passes."""
    copies: "Copies"
    """Copies batches to the device."""

    def on_device(self) -> Iterator[tuple[Mapping[str, Tensor], Tensor | None, bool]]:
        """Yield the micro-batch of each pass, its sources, and whether it counts. Zero-weight passes repeat the first
        micro-batch. The next micro-batch is copied while a pass computes."""
        count = len(self.batches)
        parts = [*zip(self.batches, self.sources, strict=True)] + [(self.batches[0], self.sources[0])] * (
            self.passes - count
        )
        ahead = self.copies.start(*parts[0])
        for a in range(self.passes):
            now, ahead = ahead, self.copies.start(*parts[a + 1]) if a + 1 < self.passes else ahead
            yield *self.copies.wait(now), a < count


class Copies:
    """Copies micro-batches to a device; to a GPU on a separate stream, in parallel with computation."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def start(self, batch: Mapping[str, Tensor], sources_B: Tensor | None) -> tuple[dict[str, Tensor], Any]:
        """Start a copy. Pass the result to `wait`."""
        both = {**batch, **({} if sources_B is None else {_SOURCES: sources_B})}
        with torch.cuda.stream(self.stream):  # does nothing without a stream
            return to_device(both, self.device), self.stream and self.stream.record_event()

    def wait(self, transfer: tuple[dict[str, Tensor], Any]) -> tuple[Mapping[str, Tensor], Tensor | None]:
        """Return micro-batch and sources, ready for the following computation. The CPU does not wait."""
        copies, event = transfer
        if event is not None:
            computing = torch.cuda.current_stream(self.device)
            computing.wait_event(event)  # not for later copies
            for tensor in copies.values():
                tensor.record_stream(computing)  # else a later copy could reuse its memory while it is read
        return {name: tensor for name, tensor in copies.items() if name != _SOURCES}, copies.get(_SOURCES)


class _Samples(TorchDataset):
    """Adapts a data set to torch's DataLoader: samples by key, with the number of their source."""

    def __init__(self, dataset: Dataset, pinned: bool = False) -> None:
        """pinned: whether batches are copied to pinned memory for a GPU."""
        self.dataset, self.pinned = dataset, pinned
        names = sources(dataset)
        self.numbers = {name: number for number, name in enumerate(names)} if len(names) > 1 else {}

    def __getitem__(self, key: Key) -> tuple[Any, int | None] | UserError:
        number = None
        try:
            if self.numbers and isinstance(self.dataset, SourcedDataset):
                number = self.numbers[self.dataset.sample_source(*key)]
            return self.dataset.sample(*key), number
        except UserError as error:  # if a worker raised it, torch would hide it in a traceback
            return error

    def collate(self, samples: Sequence[Any]) -> tuple[Mapping[str, Tensor], Tensor | None] | UserError:
        """Collate a micro-batch and the numbers of its sources; returns the error of its first bad sample, if any."""
        errors = [sample for sample in samples if isinstance(sample, UserError)]
        if errors:
            return errors[0]
        batch = self.dataset.collate([sample for sample, _ in samples])
        if get_worker_info() and not self.pinned:  # torch passes each tensor as a file, which is slow for small ones
            batch = {name: tensor.numpy() if tensor.nbytes < _SMALL else tensor for name, tensor in batch.items()}
        return batch, torch.tensor([number for _, number in samples]) if self.numbers else None


def sources(dataset: Dataset) -> Sequence[str]:
    """Names of the sources of `dataset`; empty without sources."""
    return dataset.sources if isinstance(dataset, SourcedDataset) else ()


class _BatchSampler(Sampler):
    """Passes the keys of micro-batches to a DataLoader, which reads ahead, and queues their cursors and counters."""

    def __init__(self, micro_batches: Iterator[MicroBatch]) -> None:
        self.micro_batches = micro_batches
        self.ahead: deque[MicroBatch] = deque()

    def __iter__(self) -> Iterator[list[Key]]:
        for each in self.micro_batches:
            self.ahead.append(each)
            yield each.keys


@dataclass(frozen=True)
class StepLoader:
    """Reads the micro-batches of this process."""

    dataset: Dataset
    order: Order
    config: LoopConfig
    device: torch.device
    count: Callable[[Mapping[str, Tensor]], float] = count_loss_tokens
    """Divisor of the summed loss of a batch on the CPU; see `TrainSpec`."""
    num_workers: int | None = None
    """Worker processes; they do not change results. None: 2 on a GPU, else 0, as workers would take the cores of the
    training, or 1 for decoded data (`DecodedDataset`) if a core is free."""

    def steps(self, start: State) -> Generator[Step]:
        """Yield the data of each optimizer step after the state `start`, endlessly.

        `close` ends the worker processes.
        """
        share = RankShare(
            self.config.sequences_per_step, self.config.micro_batch, distributed.rank(), distributed.world_size()
        )
        gpu = self.device.type == "cuda"
        workers = self._count_workers(gpu) if self.num_workers is None else self.num_workers
        samples = _Samples(self.dataset, gpu)
        sampler = _BatchSampler(self.order.micro_batches(start.step, share, dict(start.cursor)))
        batches = DataLoader(
            samples,
            batch_sampler=sampler,
            collate_fn=samples.collate,
            num_workers=workers,
            prefetch_factor=max(2, -(-len(share.numbers) // workers))
            if workers
            else None,  # the complete next step, during this step
            worker_init_fn=distributed.ignore_stops,
            pin_memory=gpu,
            generator=torch.Generator(),  # else it draws from the global one
        )
        stream, copies = iter(batches), Copies(self.device)
        ahead = self.dataset.read_ahead(self.order, share) if isinstance(self.dataset, ReadAheadDataset) else None
        behind: Cursor = {}
        try:
            if ahead:
                ahead.advance(start.cursor)
            while True:
                read = [next(stream) for _ in share.numbers]
                for error in (each for each in read if isinstance(each, UserError)):
                    raise error
                batches, numbers = zip(*read, strict=True)
                batches = [{name: torch.as_tensor(tensor) for name, tensor in batch.items()} for batch in batches]
                keys, cursors, counters = zip(*(sampler.ahead.popleft() for _ in share.numbers), strict=True)
                behind = {name: value for part in (behind, *cursors) for name, value in part.items()}
                if ahead:
                    ahead.advance({**start.cursor, **behind})
                yield Step(
                    batches,
                    numbers,
                    count=sum(self.count(batch) for batch in batches),
                    loss_tokens=count_true(batches, "loss_mask"),
                    read_tokens=count_true(batches, "attention_mask") + count_true(batches, "context_mask"),
                    sequences=sum(len(batch["input_ids"]) for batch in batches),
                    keys=keys,
                    cursor=behind,
                    counters={
                        name: [sum(values) for values in zip(*(each[name] for each in counters), strict=True)]
                        for name in counters[0]
                    },
                    passes=share.passes,
                    copies=copies,
                )
        finally:
            if ahead:
                ahead.close()
            del stream  # else a traceback could keep worker processes alive

    def _count_workers(self, gpu: bool) -> int:
        if gpu:
            return 2
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return int(isinstance(self.dataset, DecodedDataset) and cores > distributed.local_world_size())
