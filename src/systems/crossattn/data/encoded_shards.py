"""Shards of hidden states, each written by one process in batches and read by memory map.

NAME.states has the vectors of all tokens, concatenated. NAME.index has a record of fixed size for each sequence. A
record is written after its vectors, so the files of a killed writer are valid up to the last record.

Shapes: S tokens of a sequence, D hidden size.
"""

import fcntl
import os
import time
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from src.errors import DataError, RunError
from src.files import sync_directory, writing

if TYPE_CHECKING:
    from torch import Tensor

RECORD = np.dtype([("key", "V32"), ("first", "<i8"), ("tokens", "<i4"), ("states_crc", "<u4"), ("record_crc", "<u4")])
"""key: sha256 of the ids. first: index of the sequence's first token in the file. tokens: its number of tokens.
Checksums: crc32 of the vectors and of the record."""
STATES, INDEX = ".states", ".index"
DTYPES = {"bfloat16": np.dtype("<u2"), "float16": np.dtype("<u2"), "float32": np.dtype("<u4")}
"""Types of the states, and the integer types for their bits in numpy, which has no bfloat16."""
_PATIENCE_SECONDS = 60.0


class Writer:
    """Appends to a new shard. Entries are valid after `commit`."""

    def __init__(self, folder: Path, name: str, hidden_size: int, dtype: str) -> None:
        """Raises RunError if the files cannot be written."""
        self._shape, self._dtype = hidden_size, dtype
        self._path = folder / name
        with writing(self._path):
            self._index = open(f"{self._path}{INDEX}", "xb", buffering=0)  # noqa: SIM115  closed by `close`
            fcntl.flock(self._index, fcntl.LOCK_EX)
            self._states = open(f"{self._path}{STATES}", "xb")  # noqa: SIM115
            sync_directory(folder)
        self._tokens = 0
        self._records: list[tuple[Any, ...]] = []

    def append(self, key: bytes, states: "Tensor") -> None:
        """Append the states (S, D) of the sequence with `key`.

        Raises:
            DataError: the states are not finite in the type of the shard.
        """
        import torch

        cpu_states = states.to(getattr(torch, self._dtype)).cpu().contiguous()
        if not bool(cpu_states.isfinite().all()):
            advice = (
                " Use bfloat16, as the maximum of float16 is 65504."
                if self._dtype == "float16"
                else " Check the weights of the base and their type."
            )
            raise DataError(
                f"{self._path}: states of an input of {len(states)} tokens are not finite in {self._dtype}.{advice}"
            )
        data = cpu_states.view(torch.uint8).numpy().data
        with writing(self._path):
            self._states.write(data)
        self._records.append((key, self._tokens, len(states), zlib.crc32(data)))
        self._tokens += len(states)

    def commit(self) -> int:
        """Make the appended entries durable; returns their number.

        Raises:
            RunError: the files cannot be written.
        """
        count = len(self._records)
        if count:
            with writing(self._path):
                self._states.flush()
                os.fdatasync(self._states.fileno())
                self._index.write(_make_records(self._records).tobytes())
                os.fdatasync(self._index.fileno())
            self._records = []
        return count

    def close(self) -> None:
        """Commit and release the lock on the shard."""
        self.commit()
        self._states.close()
        self._index.close()


def _make_records(rows: Sequence[tuple[Any, ...]]) -> np.ndarray:
    records = np.zeros(len(rows), RECORD)
    for i, row in enumerate(rows):
        records[i] = (*row, 0)
    records["record_crc"] = _checksums(records)
    return records


def _checksums(records: np.ndarray) -> list[int]:
    size = RECORD.itemsize - RECORD["record_crc"].itemsize
    return [zlib.crc32(record.tobytes()[:size]) for record in records]


def read_index(folder: Path, name: str, entries: int | None = None) -> np.ndarray:
    """The records of a shard, in the order of writing. entries: the required number; None for all intact ones.

    Raises:
        DataError: a record is missing or damaged.
    """
    path = folder / f"{name}{INDEX}"
    if not path.is_file():
        raise DataError(f"{path}: missing. Run data_prep.crossattn.preproc_nq again.")
    data = path.read_bytes()
    records = np.frombuffer(data[: len(data) // RECORD.itemsize * RECORD.itemsize], RECORD)
    good = records["record_crc"] == np.array(_checksums(records), "<u4")
    num_intact = len(records) if good.all() else int(good.argmin())
    if entries is None:
        return records[:num_intact]
    if num_intact != entries or len(data) != entries * RECORD.itemsize:
        raise DataError(
            f"{path}: damaged: {num_intact} of {entries} records are intact. Run data_prep.crossattn.preproc_nq again."
        )
    return records


def recover(folder: Path, name: str, row_bytes: int, num_compared: int = 64) -> np.ndarray:
    """Repair the shard of a killed writer: truncate an incomplete end, delete a shard without records.
    Returns its records.

    row_bytes: bytes of one token's vector. num_compared: number of records, from the end, for which to verify the
    checksums of the vectors; earlier ones were committed.

    Raises:
        RunError: a process is still writing the shard.
    """
    index, states = folder / f"{name}{INDEX}", folder / f"{name}{STATES}"
    if not index.is_file():
        with writing(states):
            states.unlink(missing_ok=True)
        return np.empty(0, RECORD)
    with writing(index), open(index, "r+b") as file:
        _wait_for_lock(file, index)
        records, size = read_index(folder, name), states.stat().st_size if states.is_file() else 0
        ends = (records["first"] + records["tokens"]) * row_bytes
        num_valid = int((np.append(ends, 2**62) > size).argmax())
        if num_valid:
            with open(states, "rb") as data:
                first = max(num_valid - num_compared, 0)
                num_valid = first + _count_whole_states(records[first:num_valid], data, row_bytes)
        if not num_valid:
            states.unlink(missing_ok=True)
            index.unlink()
            return records[:0]
        file.truncate(num_valid * RECORD.itemsize)
        os.fsync(file.fileno())
        with open(states, "r+b") as data:
            data.truncate(int(ends[num_valid - 1]))
            os.fsync(data.fileno())
        return records[:num_valid]


def _count_whole_states(records: np.ndarray, file: Any, row_bytes: int) -> int:
    """Number of records before the first with damaged vectors."""
    for i, record in enumerate(records):
        file.seek(int(record["first"]) * row_bytes)
        if zlib.crc32(file.read(int(record["tokens"]) * row_bytes)) != int(record["states_crc"]):
            return i
    return len(records)


def _wait_for_lock(file: Any, path: Path) -> None:
    """Lock `file`. Waits for a writer that is about to exit because its parent has exited."""
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while True:
        try:
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise RunError(f"{path}: another process is writing it. Wait for it to finish, or stop it.") from None
            time.sleep(0.05)


def unlisted_shards(folder: Path, listed_names: Sequence[str]) -> list[str]:
    """Names of the shards in `folder` that are not in `listed_names`."""
    return sorted(path.stem for path in folder.glob(f"*{INDEX}") if path.stem not in listed_names)
