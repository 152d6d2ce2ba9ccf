"""What cannot be read, once it was planned to be: when that stops a training, and the record of it in the run's folder.

A document that turns out bad leaves padding without loss in its row, so that no row moves, and stands in quarantine.jsonl. A restart
passes over what stands there without trying it again, so that it reads the same. Mistakes in a program are never passed over.
"""

import json
import os
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from src.config import Config as StrictConfig
from src.data.streaming.shard_files import ShardChanged, ShardError
from src.errors import DataError
from src.files import reading, writing

FILE = "quarantine.jsonl"


class ErrorPolicy(StrictConfig):
    """What is done about each kind of error, and how many are too many."""

    bad_document: Literal["skip_document", "raise"] = "skip_document"
    """An image or a text cannot be decoded."""
    changed_shard: Literal["raise", "skip_shard"] = "raise"
    """A tar is not the one that was indexed."""
    unavailable_shard: Literal["raise", "skip_shard"] = "raise"
    """A tar cannot be read, after as many tries as its source makes."""
    most_documents: float = Field(default=0.001, ge=0, le=1)
    """Share of the documents of the data set that may be bad; one always may."""
    most_shards: float = Field(default=0.01, ge=0, le=1)
    """Share of the shards that may be passed over; one always may."""
    most_in_a_row: int = Field(default=100, gt=0)
    """Bad documents that a process may read one after another."""


class Quarantine:
    """The documents and shards that are passed over."""

    def __init__(self, policy: ErrorPolicy, documents: int, shards: int) -> None:
        """documents, shards: of the whole data set."""
        self.policy = policy
        self.path: Path | None = None
        self._most = {"document": max(1, int(policy.most_documents * documents)), "shard": max(1, int(policy.most_shards * shards))}
        self._of = {"document": documents, "shard": shards}
        self._known: set[tuple[str, str, int | None]] = set()
        self._in_a_row = 0

    def open(self, run: Path) -> None:
        """Keep the record in the folder of a run, and pass over what stands there.

        Raises:
            DataError: the record is damaged.
        """
        self.path = run / FILE
        self._read()

    def holds(self, source: str, shard: str, document: int) -> bool:
        """Whether a document, by its number in its shard, is passed over."""
        return (source, shard, document) in self._known or (source, shard, None) in self._known

    def note_success(self) -> None:
        """Take note that a document was read."""
        self._in_a_row = 0

    def add(self, error: DataError, source: str, shard: str, document: int, offset: int) -> None:
        """Pass over a document, or its shard, because of an error, if the policy says so and there are not too many.

        Raises:
            DataError: the policy refuses; says which document of which shard.
        """
        of_shard = isinstance(error, ShardError)
        policy = self.policy
        action = (
            (policy.changed_shard if isinstance(error, ShardChanged) else policy.unavailable_shard) if of_shard else policy.bad_document
        )
        where = f"{source}: document {document} of {shard}, at byte {offset}"
        if action == "raise":
            raise DataError(f"{where}: {error}") from None
        number = None if of_shard else document
        self._read()  # what other processes have found
        if (source, shard, number) not in self._known:
            self._append({"source": source, "shard": shard, "document": number, "offset": offset, "reason": str(error)})
        self._in_a_row += 1
        kind = "shard" if of_shard else "document"
        found = sum((number is None) == of_shard for _, _, number in self._known)
        if found > self._most[kind]:
            raise DataError(
                f"{where}: {error}. {found} {kind}s of {self._of[kind]} cannot be read, more than data.errors.most_{kind}s allows"
                f"{f'; all are in {self.path}' if self.path else ''}."
            )
        if self._in_a_row >= policy.most_in_a_row:
            raise DataError(f"{where}: {error}. No document of {self._in_a_row} in a row can be read: data.errors.most_in_a_row.")

    def _append(self, record: dict[str, Any]) -> None:
        self._known.add((record["source"], record["shard"], record["document"]))
        if self.path is not None:
            with writing(self.path):
                descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)  # one write: lines of processes do not mix
                try:
                    os.write(descriptor, (json.dumps(record) + "\n").encode())
                finally:
                    os.close(descriptor)

    def _read(self) -> None:
        if self.path is None or not self.path.exists():
            return
        with reading(self.path, DataError):
            lines = self.path.read_text().split("\n")
        for number, line in enumerate(lines[:-1], 1):  # a kill may have cut the last
            try:
                record = json.loads(line)
                self._known.add((record["source"], record["shard"], record["document"]))
            except (ValueError, KeyError, TypeError):
                raise DataError(f"{self.path}:{number}: no record of a quarantine. Restore the file, or delete the line.") from None
