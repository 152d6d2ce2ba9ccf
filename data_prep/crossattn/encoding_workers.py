"""Encode in one process per device, each with its own model and shard."""

import contextlib
import logging
import multiprocessing
import os
import time
import traceback
import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from data_prep.command import Progress
from src.errors import RunError, UserError
from src.experiments.config import Places
from src.experiments.interfaces import ModelConfig
from src.systems.crossattn.data.encoded_shards import Writer
from src.systems.crossattn.data.encoded_store import context_key

log = logging.getLogger(__name__)
Batch = Sequence[Sequence[int]]
_AHEAD = 2
"""Batches queued per worker, so that it does not wait for the next one."""


@dataclass(frozen=True)
class Job:
    """The settings of all workers."""

    model: ModelConfig
    places: Places
    folder: Path
    """The folder of the store."""
    hidden_size: int
    dtype: str
    commit_seconds: float = 1.0
    """Seconds between commits: the work that a crash can lose."""


class Encoding:
    """Base model on one device that encodes batches into a new shard."""

    def __init__(self, job: Job, device: str) -> None:
        self._job, self._device = job, device
        self._model: Any = None
        self._writer: Writer | None = None
        self._last_commit = time.monotonic()

    def take(self, batch: Batch) -> None:
        """Encode a batch of token sequences.

        Raises:
            RunError: the device is out of memory.
            DataError: hidden states are not finite.
        """
        import torch

        from src.systems.crossattn.model.encoder import encode

        if self._model is None:
            self._load()
        ids = torch.zeros(len(batch), max(map(len, batch)), dtype=torch.int64)
        mask = torch.zeros(ids.shape, dtype=torch.bool)
        for n, sequence in enumerate(batch):
            ids[n, : len(sequence)] = torch.tensor(sequence)
            mask[n, : len(sequence)] = True
        try:
            hidden = encode(self._model, ids.to(self._device), mask.to(self._device), together=len(batch))
        except torch.OutOfMemoryError as error:
            size = "x".join(map(str, ids.shape))
            raise RunError(
                f"{self._device}: out of memory in a batch of {size} tokens. "
                "Make --batch_size or --batch_tokens smaller."
            ) from error
        assert self._writer is not None
        for n, sequence in enumerate(batch):
            self._writer.append(context_key(sequence), hidden[n, : len(sequence)])
        if time.monotonic() - self._last_commit >= self._job.commit_seconds:
            self._writer.commit()
            self._last_commit = time.monotonic()

    def close(self) -> None:
        """Commit the encoded batches."""
        if self._writer is not None:
            self._writer.close()

    def _load(self) -> None:
        job = self._job
        self._model = job.model.build(job.places).to(self._device).eval()
        self._writer = Writer(job.folder, uuid.uuid4().hex[:12], job.hidden_size, job.dtype)


def encode_all(job: Job, batches: Iterable[Batch], devices: Sequence[str]) -> int:
    """Encode all `batches`: in this process for one device, else in one process per device.
    Returns the number of sequences.

    Batches that were committed before an error are not lost.

    Raises:
        RunError: a worker failed; the message has the device and the reason. There is no retry on other devices.
        UserError: raised in a worker.
    """
    progress = Progress("encoding", "inputs")
    stream = iter(batches)
    first = next(stream, None)
    if first is None:
        return 0
    if len(devices) > 1:
        _in_processes(job, chain([first], stream), devices, progress)
        return progress.items
    encoding = Encoding(job, devices[0])
    try:
        for batch in chain([first], stream):
            encoding.take(batch)
            progress.count(len(batch), sum(map(len, batch)))
    except UserError:
        raise
    except Exception as error:  # the class of the error depends on the device
        raise RunError(_worker_error(devices[0], _line(error))) from error
    finally:
        encoding.close()
    return progress.items


def _line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


def _worker_error(device: str, what: str) -> str:
    return f"{device}: {what.rstrip('.')}. Fix it and start again: finished work is saved."


def _in_processes(job: Job, batches: Iterator[Batch], devices: Sequence[str], progress: Progress) -> None:
    context = multiprocessing.get_context("spawn")
    workers: dict[Any, tuple[Any, str, list[Batch]]] = {}
    threads = max((os.cpu_count() or 1) // len(devices), 1)
    try:
        for device in devices:
            here, there = context.Pipe()
            process = context.Process(target=_work, args=(job, device, threads, there), daemon=True)
            process.start()
            there.close()
            initial_batches = list(islice(batches, _AHEAD))
            workers[here] = process, device, initial_batches
            with contextlib.suppress(ConnectionError):
                for batch in initial_batches or [None]:
                    here.send(batch)
        while workers:
            for pipe in wait(list(workers)):
                _serve(pipe, workers, batches, progress)
    finally:
        for process, _, _ in workers.values():
            process.terminate()
            process.join()


def _serve(
    pipe: Any, workers: dict[Any, tuple[Any, str, list[Batch]]], batches: Iterator[Batch], progress: Progress
) -> None:
    """Handle one message of a worker: None for a finished batch, "closed", or an error."""
    process, device, pending = workers[pipe]
    try:
        message = pipe.recv()
    except (EOFError, ConnectionError):
        process.join()
        raise RunError(_worker_error(device, f"its process ended with exit code {process.exitcode}")) from None
    if isinstance(message, UserError):
        raise message
    if message == "closed":
        process.join()
        del workers[pipe]
        return
    if message is not None:
        raise RunError(_worker_error(device, message))
    finished = pending.pop(0)
    progress.count(len(finished), sum(map(len, finished)))
    batch = next(batches, None)
    if batch is not None:
        pending.append(batch)
    if batch is not None or not pending:
        with contextlib.suppress(ConnectionError):  # it has exited: its last message is read next
            pipe.send(batch)


def _work(job: Job, device: str, threads: int, pipe: Connection) -> None:
    """Main function of a worker. Ends on request, or when the parent process ends."""
    import torch

    torch.set_num_threads(threads)
    encoding = Encoding(job, device)
    try:
        while (batch := pipe.recv()) is not None:
            encoding.take(batch)
            pipe.send(None)
        encoding.close()
        pipe.send("closed")
    except (EOFError, ConnectionError, KeyboardInterrupt):  # the parent process ended, or all were interrupted
        encoding.close()
    except UserError as error:
        encoding.close()
        pipe.send(error)
    except Exception as error:  # noqa: BLE001  the parent reports any error of the device
        log.error("%s failed:\n%s", device, traceback.format_exc())
        encoding.close()
        pipe.send(_line(error))
