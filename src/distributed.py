"""The processes of one training: who I am, what all agree on. The only reader of RANK, WORLD_SIZE and LOCAL_RANK."""

import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from src.errors import LaunchError, UserError

T = TypeVar("T")
_PARENT = os.getppid()


def rank() -> int:
    """Global rank, 0 where nobody launched several processes."""
    return int(os.environ.get("RANK", 0))


def local_rank() -> int:
    """Rank on this machine: it picks the device."""
    return int(os.environ.get("LOCAL_RANK", 0))


def world_size() -> int:
    """Number of processes that train together."""
    return int(os.environ.get("WORLD_SIZE", 1))


def is_main() -> bool:
    """Rank 0: the one that writes."""
    return rank() == 0


@contextlib.contextmanager
def session() -> Iterator[None]:
    """Join the process group on entry and leave it in order on success; a failing process leaves at once.

    Backend: nccl between GPUs where the machine has any, one for each process; gloo between CPUs.

    Raises:
        LaunchError: there are GPUs, but fewer than processes on this machine; or the launcher's variables are incomplete.
    """
    if world_size() == 1:
        yield
        return
    import torch
    import torch.distributed as dist

    _end_with_parent()
    gpu = torch.cuda.is_available()
    if gpu and local_rank() >= torch.cuda.device_count():
        raise LaunchError(f"process {local_rank()} has no GPU: this machine has {torch.cuda.device_count()}. Start fewer processes.")
    if "RANK" not in os.environ:
        raise LaunchError(f"WORLD_SIZE is {world_size()}, but RANK is not set. Start several processes with torchrun, or unset WORLD_SIZE.")
    if gpu:
        torch.cuda.set_device(local_rank())
    dist.init_process_group("cpu:gloo,cuda:nccl" if gpu else "gloo")
    yield
    dist.barrier()
    dist.destroy_process_group()


def _end_with_parent() -> None:
    """Have the kernel send SIGTERM when the launcher dies, as a rank without it may wait for ever. Linux only."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM)
        if os.getppid() != _PARENT:  # it died before the kernel was asked
            raise SystemExit(143)


@contextlib.contextmanager
def together() -> Iterator[None]:
    """A block that all ranks leave well, or all with the same UserError: the first of any rank. Collective; no collective inside."""
    failures: list[UserError] = []
    try:
        yield
    except UserError as error:
        failures = [error]
    failures = gathered(failures)
    if failures:
        failures[0].everywhere = True
        raise failures[0]


def from_main(compute: Callable[[], T]) -> T:
    """Call `compute` on rank 0 only and give its result, or its exception, to every rank. Results must be picklable."""
    if world_size() == 1:
        return compute()
    import torch.distributed as dist

    box: list[Any] = [None, None]
    if is_main():
        try:
            box[0] = compute()
        except Exception as error:  # noqa: BLE001  re-raised on every rank below
            box[1] = error
    dist.broadcast_object_list(box, src=0)
    error = box[1]
    if isinstance(error, UserError):
        error.everywhere = True
    if error is not None:
        raise error
    return box[0]


def total(values: Sequence[float]) -> list[float]:
    """Sums over ranks, element by element, in float64. Collective."""
    if world_size() == 1:
        return [float(v) for v in values]
    import torch
    import torch.distributed as dist

    sums = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(sums)
    return sums.tolist()


def gathered(items: list[T]) -> list[T]:
    """The lists of all ranks, one after another, on every rank. Items must be picklable. Collective."""
    if world_size() == 1:
        return items
    import torch.distributed as dist

    lists: list[Any] = [None] * world_size()
    dist.all_gather_object(lists, items)
    return [item for part in lists for item in part]
