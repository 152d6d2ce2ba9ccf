"""Shards of any format: those that are whole survive a failure, and what is made in two goes has the bytes of what is
made in one."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from data_prep import shards
from data_prep.text_sources import Batch, Source
from src import files
from src.errors import DataError


class Lines:
    """A shard of one file of lines."""

    def __init__(self, folder: Path, name: str) -> None:
        self.name, self.path, self.lines = name, folder / f"{name}.txt", []

    def __enter__(self) -> "Lines":
        return self

    def __exit__(self, *error: object) -> None: ...

    def close(self) -> dict[str, Any] | None:
        if not self.lines:
            return None
        self.path.write_text("".join(f"{line}\n" for line in self.lines))
        return {"name": self.name, "lines": len(self.lines)}


@dataclass
class Upper:
    """The texts of a batch in capitals."""

    texts: list[str]
    empty: int = 0

    @property
    def documents(self) -> int:
        return len(self.texts)

    @property
    def size(self) -> int:
        return sum(map(len, self.texts))

    def append_to(self, writer: Lines) -> None:
        writer.lines += self.texts


def convert(batches: Iterable[Batch]) -> Iterator[tuple[Upper, Upper]]:
    """Every third text is for validation."""
    for batch in batches:
        texts = [text.upper() for _, text in batch.texts]
        if "BAD" in texts:
            raise DataError("bad.")
        yield (
            Upper([text for text in texts if int(text[1:]) % 3]),
            Upper([text for text in texts if not int(text[1:]) % 3]),
        )


def make(folder: Path, bad: int | None = None) -> list[int]:
    """Make the folder; returns the batches that were read. bad: one that cannot be converted."""
    read = []

    def batches(_state: Any) -> Iterator[Batch]:
        for number in range(8):
            read.append(number)
            yield Batch("s", texts=[("s:1", "bad" if number == bad else f"t{10 * number + i}") for i in range(10)])

    with shards.partial(folder, {"a": 1}, Lines) as new:
        new.add("train", Source("s", {}, batches), convert, shard_size=50)
        new.publish({"splits": {split: new.shards_of(split) for split in ("train", "val")}})
    return read


def test_finished_shards_survive_a_failure(tmp_path: Path):
    make(tmp_path / "whole")
    with pytest.raises(DataError, match=r"^bad\.$"):
        make(tmp_path / "again", bad=5)
    assert not (tmp_path / "again").exists()
    finished_times = {path.name: path.stat().st_mtime_ns for path in (tmp_path / ".again.partial").glob("*.txt")}
    assert len(finished_times) == 4, "two segments of both splits; the third was not whole"
    make(tmp_path / "again")
    assert not (tmp_path / ".again.partial").exists()
    assert (
        finished_times.items()
        <= {path.name: path.stat().st_mtime_ns for path in (tmp_path / "again").glob("*.txt")}.items()
    )
    manifest = files.read_manifest(tmp_path / "again", DataError)
    assert manifest == files.read_manifest(tmp_path / "whole", DataError)
    assert [entry["lines"] for entry in manifest["splits"]["train"]] == [13, 13, 14, 13]
