"""Tokenise batches of documents in worker processes, in order."""

import hashlib
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from itertools import islice

import numpy as np

from data_prep.text_sources import Batch
from src.data.text import token_files
from src.data.text.tokenizers import SafeTokenizer
from src.errors import RunError

_AHEAD = 4
"""Batches queued per process, so that it does not wait for the next one."""


@dataclass(frozen=True)
class Job:
    """The settings of all processes."""

    encoder: SafeTokenizer
    dtype: str
    """Data type of the ids."""
    field: str
    val_rate: float
    """Share of validation documents. The text of a document determines its split."""


@dataclass(frozen=True)
class Tokens:
    """Tokenised documents of one split."""

    ids: np.ndarray
    """The ids of all documents, each followed by the end token."""
    lengths: np.ndarray
    """(documents,) int64: number of tokens per document, with the end token."""
    empty: int = 0
    """Number of documents without a token, which are left out."""

    @property
    def documents(self) -> int:
        return len(self.lengths)

    @property
    def size(self) -> int:
        return len(self.ids)

    def append_to(self, writer: token_files.Writer) -> None:
        writer.append(self.ids, self.lengths)


def is_validation(text: str, rate: float) -> bool:
    """Whether a document is in the share `rate` for validation. Equal texts are in the same split."""
    digest = hashlib.sha256(text.encode()).digest()
    return int.from_bytes(digest[:8], "big") < rate * 2.0**64


def tokenise_batch(job: Job, batch: Batch) -> tuple[Tokens, Tokens]:
    """Tokenise a batch; return its training and its validation documents, in order.

    Raises:
        DataError: a row is malformed; the message has its place.
    """
    texts = batch.documents(job.field)
    is_for_validation = [bool(job.val_rate) and is_validation(text, job.val_rate) for text in texts]
    train, val = (
        [text for text, validates in zip(texts, is_for_validation, strict=True) if validates is expected]
        for expected in (False, True)
    )
    return _tokens(job, train), _tokens(job, val)


def _tokens(job: Job, texts: list[str]) -> Tokens:
    encoded = job.encoder.encode_all(texts)
    pieces = [np.array([*ids, job.encoder.eos_id], dtype=job.dtype) for ids in encoded if ids]
    ids = np.concatenate(pieces) if pieces else np.empty(0, job.dtype)
    return Tokens(ids, np.array([len(piece) for piece in pieces], dtype=np.int64), len(texts) - len(pieces))


class Workers:
    """Context manager that tokenises in `count` processes, or in this process if `count` is 1."""

    def __init__(self, job: Job, count: int) -> None:
        self._job, self._count = job, count
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> "Workers":
        if self._count > 1:
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(self._count, context, _begin, (self._job,))
        return self

    def __exit__(self, *error: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)

    def map_batches(self, batches: Iterable[Batch]) -> Iterator[tuple[Tokens, Tokens]]:
        """Yield `tokenise_batch` of every batch, in order.

        Raises:
            RunError: a process was killed.
            DataError: a batch is malformed. All previous batches have been yielded.
        """
        if self._pool is None:
            for batch in batches:
                yield tokenise_batch(self._job, batch)
            return
        stream = iter(batches)
        futures: deque[Future[tuple[Tokens, Tokens]]] = deque()
        try:
            while True:
                futures.extend(
                    self._pool.submit(_tokenise, batch) for batch in islice(stream, self._count * _AHEAD - len(futures))
                )
                if not futures:
                    return
                yield futures.popleft().result()
        except BrokenProcessPool:
            raise RunError(
                "--processes: a tokenizing process was killed, perhaps because it ran out of memory. "
                "Start again with fewer; finished shards are saved."
            ) from None


_jobs: list[Job] = []


def _begin(job: Job) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # each process has a core
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # at Ctrl-C only the command reports it
    _jobs.append(job)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None, "runs in a child process"
    parent.join()
    os._exit(1)


def _tokenise(batch: Batch) -> tuple[Tokens, Tokens]:
    return tokenise_batch(_jobs[0], batch)
