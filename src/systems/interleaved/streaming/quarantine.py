"""Record unreadable documents, and stop the training if there are too many.

An unreadable document becomes padding without loss, so that other rows stay the same, and is recorded in
quarantine.jsonl of the run. A restart skips recorded documents without another attempt, so that it reads the same rows.
Programming errors are never skipped.
"""

import json
import math
import os
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from src.errors import DataError
from src.experiments.config import Config as StrictConfig
from src.files import reading, writing
from src.support.parsing import parse_json
from src.systems.interleaved.streaming.shard_files import ChangedShardError, ShardError

FILE = "quarantine.jsonl"


class ErrorPolicy(StrictConfig):
    """The action for each kind of error, and the limits that stop a training. Not part of an experiment's id."""

    bad_document: Literal["skip_document", "raise"] = "skip_document"
    """An image or a text cannot be decoded."""
    changed_shard: Literal["raise", "skip_shard"] = "raise"
    """A tar changed since it was indexed."""
    unavailable_shard: Literal["raise", "skip_shard"] = "raise"
    """A tar cannot be read, after all retries."""
    max_documents: float = Field(default=0.001, ge=0, le=1)
    """Maximum share of unreadable documents; one is always allowed."""
    max_shards: float = Field(default=0.01, ge=0, le=1)
    """Maximum share of skipped shards; one is always allowed."""
    max_consecutive: int = Field(default=100, gt=0)
    """Consecutive unreadable documents after which a process stops."""


class Quarantine:
    """The documents and shards to skip."""

    def __init__(self, policy: ErrorPolicy, documents: int, shards: int) -> None:
        """documents, shards: totals of the data set."""
        self.policy = policy
        self.path: Path | None = None
        self._max = {
            "document": max(1, int(policy.max_documents * documents)),
            "shard": max(1, int(policy.max_shards * shards)),
        }
        self._total = {"document": documents, "shard": shards}
        self._records: set[tuple[str, str, int | None, int]] = set()
        self._in_a_row = 0

    def open(self, run: Path) -> None:
        """Use the record in the folder of a run, and skip the documents in it.

        Raises:
            DataError: there are more than the policy allows.
        """
        self.attach(run)
        for kind in self._max:
            self._require_few(kind, str(self.path))

    def attach(self, run: Path) -> None:
        """Skip the documents recorded in the folder of a run, without a limit."""
        self.path = run / FILE
        self._read()

    def holds(self, source: str, shard: str, document: int, piece: int) -> bool:
        """Whether a piece of a document is skipped. document: number within the shard."""
        return (source, shard, document, piece) in self._records or (source, shard, None, 0) in self._records

    def note_success(self) -> None:
        """Reset the count of consecutive unreadable documents."""
        self._in_a_row = 0

    def add(self, error: DataError, source: str, shard: str, document: int, piece: int, offset: int) -> None:
        """Record a piece of a document, or its shard, as unreadable after an error.

        Raises:
            DataError: the policy or its limits do not allow it; names the document and its shard.
        """
        is_shard_error, policy = isinstance(error, ShardError), self.policy
        kind = (
            ("changed_shard" if isinstance(error, ChangedShardError) else "unavailable_shard")
            if is_shard_error
            else "bad_document"
        )
        where = f"{source}: document {document} of {shard}, at byte {offset}"
        actions = {
            "changed_shard": policy.changed_shard,
            "unavailable_shard": policy.unavailable_shard,
            "bad_document": policy.bad_document,
        }
        if actions[kind] == "raise":
            skip = "skip_shard" if is_shard_error else "skip_document"
            text = str(error).rstrip(".")
            raise DataError(
                f"{where}: {text}. To skip it, resume the same run with --set data.errors.{kind}={skip}"
            ) from None
        number, piece = (None, 0) if is_shard_error else (document, piece)
        self._read()  # entries of other processes
        if (source, shard, number, piece) not in self._records:
            record = {
                "source": source,
                "shard": shard,
                "document": number,
                "piece": piece,
                "offset": offset,
                "reason": str(error),
            }
            self._append(record)
        self._in_a_row += 1
        self._require_few("shard" if is_shard_error else "document", f"{where}: {error}")
        if self._in_a_row >= policy.max_consecutive:
            raise DataError(
                f"{where}: {error}. None of {self._in_a_row} documents in a row can be read. Repair the data, "
                f"or resume the same run with --set data.errors.max_consecutive={10 * policy.max_consecutive}"
            )

    def _require_few(self, kind: str, where: str) -> None:
        unreadable = len({key[:3] for key in self._records if (key[2] is None) == (kind == "shard")})
        if unreadable > self._max[kind]:
            total = self._total[kind]
            raise DataError(
                f"{where}. {unreadable} {kind}s of {total} cannot be read, more than data.errors.max_{kind}s allows"
                f"{f'; {self.path} lists all' if self.path else ''}. Repair the data, or resume the same run with "
                f"--set data.errors.max_{kind}s={_share_above(unreadable, total)}"
            )

    def _append(self, record: dict[str, Any]) -> None:
        self._records.add((record["source"], record["shard"], record["document"], record["piece"]))
        if self.path is not None:
            with writing(self.path):
                # A single write, so that lines of different processes do not mix.
                descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
                try:
                    size = os.fstat(descriptor).st_size
                    is_partial = size and os.pread(descriptor, 1, size - 1) != b"\n"
                    os.write(descriptor, ("\n" * bool(is_partial) + json.dumps(record) + "\n").encode())
                finally:
                    os.close(descriptor)

    def _read(self) -> None:
        if self.path is None or not self.path.exists():
            return
        with reading(self.path, DataError):
            lines = self.path.read_text().split("\n")
        for line in lines:
            try:
                record = parse_json(line, self.path, DataError)
                self._records.add((record["source"], record["shard"], record["document"], record["piece"]))
            except (DataError, KeyError, TypeError):
                continue  # a partial line after a kill or a full disk: the document is recorded again


def _share_above(count: int, total: int) -> float:
    """A rounded share of `total` that allows twice `count`."""
    share = 2 * count / total
    digits = 1 - math.floor(math.log10(share))
    return min(1.0, math.ceil(share * 10**digits) / 10**digits)
