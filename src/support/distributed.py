"""Rank, world size, collectives and graceful stops. The only module that reads RANK, WORLD_SIZE and LOCAL_RANK."""

import contextlib
import ctypes
import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType
from typing import Any, Literal, TypeVar

from src.errors import LaunchError, UserError
from src.support import torch_settings

T = TypeVar("T")
REQUEUE = 75
"""Exit code of a training that stopped gracefully before its end (EX_TEMPFAIL of sysexits.h): a restart resumes it."""
INTERRUPTED_EXIT = 130
"""Exit code of a training that a person stopped, as after Ctrl-C in a shell: schedulers do not restart it."""
OWN_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
"""Environment variable for separate rendezvous stores of torchrun's agent and the ranks."""
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
"""Sent by schedulers before a kill and before the time limit, and by a person."""
_PARENT = os.getppid()


@dataclass(frozen=True)
class Reason:
    """Why a training stops before its end."""

    by: str
    """Name of the signal, or of the limit."""
    kind: Literal["signal", "limit", "person"] = "signal"
    """A training stopped by a person is not restarted automatically."""

    @property
    def by_hand(self) -> bool:
        """Whether a person requested the stop."""
        return self.kind == "person"


_requested: Reason | None = None
_deferred = False
_limit: Callable[[], Reason | None] | None = None


class StopTraining(BaseException):
    """Stops the training of this process. A BaseException, like KeyboardInterrupt, so that no library swallows it."""

    def __init__(self, reason: Reason, everywhere: bool = False, step: int | None = None) -> None:
        super().__init__(reason.by)
        self.reason = reason
        self.everywhere = everywhere
        """True if every rank raises it at the same point."""
        self.step = step
        """Step of the last checkpoint; None if the training had not started."""

    @property
    def exit_code(self) -> int:
        """`REQUEUE`, after which schedulers restart the job, or `INTERRUPTED_EXIT`, after which they do not."""
        return INTERRUPTED_EXIT if self.reason.by_hand else REQUEUE


def rank() -> int:
    """Global rank; 0 in a single process."""
    return int(os.environ.get("RANK", 0))


def local_rank() -> int:
    """Rank on this machine: the index of the device."""
    return int(os.environ.get("LOCAL_RANK", 0))


def world_size() -> int:
    """Number of processes that train together."""
    return int(os.environ.get("WORLD_SIZE", 1))


def local_world_size() -> int:
    """Number of processes on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def is_main() -> bool:
    """Whether this is rank 0, which writes the files."""
    return rank() == 0


def is_copy(tensor: Any) -> bool:
    """Whether a lower rank has the same shard of a DTensor."""
    mesh = getattr(tensor, "device_mesh", None)
    return mesh is not None and any(
        part.is_replicate() and place for part, place in zip(tensor.placements, mesh.get_coordinate(), strict=True)
    )


@contextlib.contextmanager
def session(deterministic: bool = False) -> Iterator[None]:
    """Join the process group on entry, and leave it gracefully on success; a failing process exits at once.
    Applies `torch_settings`.

    Backend: nccl on machines with GPUs, one GPU per process; gloo on CPUs.

    Raises:
        LaunchError: fewer GPUs than processes on this machine; or variables of the launcher that are incomplete, or
            with which restarts of killed processes would hang.
    """
    torch_settings.make(deterministic)
    if world_size() == 1:
        yield
        return
    import torch
    import torch.distributed as dist

    if int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0)) and os.environ.get(OWN_STORE) != "1":
        raise LaunchError(
            f"--max-restarts: with torch 2.13, half of the restarts after the death of a process hang, unless "
            f"{OWN_STORE}=1 is set. Set it for torchrun, or leave --max-restarts out."
        )
    _end_with_parent()
    gpu = torch.cuda.is_available()
    if gpu and local_rank() >= torch.cuda.device_count():
        raise LaunchError(
            f"process {local_rank()}: this machine has {torch.cuda.device_count()} GPUs. Start fewer processes."
        )
    if "RANK" not in os.environ:
        raise LaunchError(
            f"WORLD_SIZE is {world_size()}, but RANK is not set. "
            "Start several processes with torchrun, or unset WORLD_SIZE."
        )
    if gpu:
        torch.cuda.set_device(local_rank())
    dist.init_process_group("cpu:gloo,cuda:nccl" if gpu else "gloo", timeout=torch_settings.COLLECTIVE_TIMEOUT)
    try:
        yield
    except StopTraining as stopped:
        if stopped.everywhere:
            _leave_group()
        raise
    _leave_group()


def ensure_group() -> None:
    """Create a single-process group if the launcher has not created a group: some libraries require one.
    It exists until the process ends."""
    import torch
    import torch.distributed as dist
    from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]  it is in torch's manual

    if world_size() == 1 and not dist.is_initialized():
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo", store=HashStore(), rank=0, world_size=1
        )
        os.environ.setdefault("OMPI_COMM_WORLD_LOCAL_RANK", "0")  # DeepSpeed reads this without a launcher


def _leave_group() -> None:
    import torch.distributed as dist

    dist.barrier()
    gc.collect()  # gloo's threads of a group that a model in a cycle refers to can abort the process at its exit
    dist.destroy_process_group()


def _end_with_parent() -> None:
    """Let the kernel kill this process when the launcher dies, since a rank could hang forever. Linux only."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
        if os.getppid() != _PARENT:  # it died before the call above
            raise SystemExit(143)


@contextlib.contextmanager
def stoppable() -> Iterator[None]:
    """Within the block, a stop signal raises `StopTraining` once:
    immediately or, after `defer_stop`, when the training checks for it.

    Main thread only. A second Ctrl-C aborts immediately. An ignored SIGINT (nohup) stays ignored.
    """
    global _requested, _deferred
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _requested, _deferred = None, False
    numbers = [n for n in STOP_SIGNALS if n != signal.SIGINT or signal.getsignal(n) is not signal.SIG_IGN]
    before = {number: signal.signal(number, _on_signal) for number in numbers}
    hook = sys.unraisablehook
    # If Python cannot raise, as in a callback of an import, it would print a traceback. The stop is recorded anyway.
    sys.unraisablehook = lambda unraisable: None if isinstance(unraisable.exc_value, StopTraining) else hook(unraisable)
    try:
        yield
    finally:
        sys.unraisablehook = hook
        _requested, _deferred = None, False
        for number, handler in before.items():
            signal.signal(number, handler)


def defer_stop() -> None:
    """Only record stop signals until `allow_stop`; `stop_requested` returns them."""
    global _deferred  # noqa: PLW0603  see stoppable
    _deferred = True


def allow_stop() -> None:
    """From now on, a stop signal raises `StopTraining` at once. Raises it now for a recorded signal."""
    global _deferred  # noqa: PLW0603  see stoppable
    _deferred = False
    if _requested:
        _deferred = True
        raise StopTraining(_requested)


@contextlib.contextmanager
def stop_when(limit: Callable[[], Reason | None]) -> Iterator[None]:
    """Within the block, `stop_requested` also returns the result of `limit`."""
    global _limit  # noqa: PLW0603  see stoppable
    _limit = limit
    try:
        yield
    finally:
        _limit = None


def stop_requested() -> Reason | None:
    """Why this process should stop: a signal, or a limit. None if it can continue."""
    return _requested or (_limit() if _limit else None)


def stop_together() -> None:
    """Raise `StopTraining` on every rank if any rank should stop. Collective.

    Raises:
        StopTraining: with `everywhere`, and without a step.
    """
    if any(all_reduce_sum([stop_requested() is not None])):
        raise agreed_stop(None)


def agreed_stop(step: int | None) -> StopTraining:
    """The exception for every rank to raise after they agreed to stop. Collective."""
    reasons = all_gather_list([reason] if (reason := stop_requested()) else [])
    return StopTraining(next((reason for reason in reasons if reason.by_hand), reasons[0]), everywhere=True, step=step)


def ignore_stops(_: int = 0) -> None:
    """For worker processes: ignore stop signals, and end when the main process ends or is killed."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_after, args=(os.getppid(),), daemon=True).start()


def _end_after(parent: int) -> None:
    """End this process once its parent has ended.

    If its parent is killed, a worker of torch's DataLoader waits forever to deliver its batch, since the other end of
    the pipe is open in the worker itself. It would not free its memory, its ports, and open shards of the cache.
    """
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def _on_signal(number: int, _: FrameType | None) -> None:
    global _requested, _deferred  # noqa: PLW0603  see stoppable
    if number == signal.SIGINT and _requested and _requested.by_hand:
        raise KeyboardInterrupt
    _requested = _requested or Reason(signal.Signals(number).name, "person" if number == signal.SIGINT else "signal")
    if not _deferred:
        _deferred = True  # a second signal must not interrupt the handling of the first
        raise StopTraining(_requested)


@contextlib.contextmanager
def raise_together() -> Iterator[None]:
    """If any rank raises a UserError inside the block, every rank raises the first one.
    Collective; the block must not call collectives."""
    failures: list[UserError] = []
    try:
        yield
    except UserError as error:
        failures = [error]
    failures = all_gather_list(failures)
    if failures:
        failures[0].everywhere = True
        raise failures[0]


def broadcast_from_rank0(compute: Callable[[], T], timeout: timedelta | None = None) -> T:
    """Call `compute` on rank 0, and return its result, or raise its exception, on every rank. Must be picklable.

    timeout: how long the other ranks wait. None: `torch_settings.COLLECTIVE_TIMEOUT`, as in every collective.
    """
    if world_size() == 1:
        return compute()
    import torch.distributed as dist

    # The timeout is a property of the group.
    group: Any = dist.new_group(backend="gloo", timeout=timeout) if timeout else None
    box: list[Any] = [None, None]
    if is_main():
        try:
            box[0] = compute()
        except Exception as error:  # noqa: BLE001  re-raised on every rank below
            box[1] = error
    dist.broadcast_object_list(box, src=0, group=group)
    error = box[1]
    if isinstance(error, UserError):
        error.everywhere = True
    if error is not None:
        raise error
    return box[0]


def all_reduce_max(value: int) -> int:
    """The largest of all ranks' values. Collective."""
    if world_size() == 1:
        return value
    import torch
    import torch.distributed as dist

    largest = torch.tensor(value)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return int(largest)


def all_reduce_sum(values: Sequence[float]) -> list[float]:
    """Sums over ranks, element by element, in float64. Collective."""
    if world_size() == 1:
        return [float(v) for v in values]
    import torch
    import torch.distributed as dist

    sums = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(sums)
    return sums.tolist()


def all_gather_list(items: list[T]) -> list[T]:
    """The lists of all ranks, concatenated, on every rank. Items must be picklable. Collective."""
    if world_size() == 1:
        return items
    import torch.distributed as dist

    lists: list[Any] = [None] * world_size()
    dist.all_gather_object(lists, items)
    return [item for part in lists for item in part]
