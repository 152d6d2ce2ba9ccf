"""Throughput, memory, energy and MFU since the last row. Not in scores.jsonl, as timings differ between runs."""

import contextlib
import resource
import sys
import time
from collections.abc import Iterator
from typing import TypeVar

import torch
from torch import nn

from src.support import distributed
from src.training.loader import Step
from src.training.monitoring import flops
from src.training.monitoring.energy import Energy
from src.training.spec import Experience

T = TypeVar("T")


class ThroughputMeter:
    """Measures this rank since `restart`. With `model` and `precision` also model FLOPs and, on a known GPU, MFU.

    With `experience` also the seconds of each phase of rollouts.
    """

    def __init__(
        self, model: nn.Module | None = None, precision: str = "float32", experience: Experience | None = None
    ) -> None:
        self._experience = experience
        self._flops_of = flops.batch_flops(model) if model is not None else None
        self._peak = flops.peak_flops(torch.cuda.get_device_name(), precision) if torch.cuda.is_available() else None
        self._energy = Energy()
        self.restart()

    def restart(self) -> None:
        """Reset all sums."""
        self.began = time.perf_counter()
        self.apart_seconds = self.wait_seconds = 0.0
        self.steps = self.tokens = self.sequences = self.flops = 0
        self._joules = self._energy.joules()

    def waiting(self, batches: Iterator[T]) -> T:
        """Return the next item, and count the time until it arrives as waiting for data."""
        before = time.perf_counter()
        item = next(batches)
        self.wait_seconds += time.perf_counter() - before
        return item

    def count(self, step: Step) -> None:
        """Count one optimizer step, and its tokens without padding, contexts included."""
        self.steps += 1
        self.sequences += step.sequences
        self.tokens += step.read_tokens
        if self._flops_of is not None:
            self.flops += sum(map(self._flops_of, step.batches))

    def rates(self) -> tuple[float, float]:
        """(tokens per second, seconds per step) of this rank since `restart`, with waiting for data."""
        seconds = max(time.perf_counter() - self.began - self.apart_seconds, 1e-9)
        return self.tokens / seconds, seconds / max(self.steps, 1)

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Exclude the block from training time (evaluation, checkpoints)."""
        before = time.perf_counter()
        yield
        self.apart_seconds += time.perf_counter() - before

    def row(self) -> dict[str, float]:
        """Rates over all ranks since `restart`. Collective. Without a step since then, rates of steps are absent.

        `data_wait_seconds`: of the rank that waited longest; `data_wait_rate`: its share of the training time.
        `peak_host_memory_bytes`, `peak_memory_bytes` (GPU): maximum over ranks, since the start of the process.
        `rewards_seconds` etc.: phases of rollouts on this rank, included in `data_wait_seconds`.
        `model_flops_per_second`, `mfu`: see flops.py. `watts`: sum over all GPUs, including evaluations and
        checkpoints.
        """
        joules = self._energy.joules()
        energy = None if joules is None or self._joules is None else joules - self._joules
        gpu = torch.cuda.is_available()
        mine = (
            self.tokens,
            self.sequences,
            self.flops,
            energy,
            self.wait_seconds,
            _host_bytes(),
            torch.cuda.max_memory_allocated() if gpu else 0,
        )
        tokens, sequences, operations, energies, waits, host, device = zip(
            *distributed.all_gather_list([mine]), strict=True
        )
        total = time.perf_counter() - self.began
        seconds = max(total - self.apart_seconds, 1e-9)
        row = {
            "seconds": total,
            "data_wait_seconds": max(waits),
            "data_wait_rate": max(waits) / seconds,
            "peak_host_memory_bytes": max(host),
        }
        if self.steps:
            row["steps_per_second"] = self.steps / seconds
            row["tokens_per_second"] = sum(tokens) / seconds
            row["sequences_per_second"] = sum(sequences) / seconds
        if self.steps and self._flops_of is not None:
            row["model_flops_per_second"] = sum(operations) / seconds
            if self._peak:
                row["mfu"] = flops.mfu(row["model_flops_per_second"], self._peak, len(tokens))
        if None not in energies:
            row["watts"] = sum(energies) / max(total, 1e-9)
        if gpu:
            row["peak_memory_bytes"] = max(device)
        if self._experience:
            row |= {f"{name}_seconds": value for name, value in self._experience.seconds().items()}
        return row


def _host_bytes() -> int:
    """Peak resident memory of this process, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
