"""Write a folder shard by shard, from sources that are read in batches. Finished shards survive a kill of the writer.

The writer defines the shard format: `tokenize` writes token files.
"""

import contextlib
import itertools
import json
import logging
import os
import shutil
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

from data_prep.command import Progress, exclusive_lock, require_replaceable
from data_prep.text_sources import Batch, Source
from src import files
from src.data import jsonl
from src.errors import DataError

log = logging.getLogger(__name__)
_PLAN, _DONE = "plan.json", ".done.json"


class Writer(Protocol):
    """A context manager that writes one new shard: files NAME.* in a folder. Replaces older leftovers."""

    def __enter__(self) -> Any: ...
    def __exit__(self, *error: object) -> None: ...
    def close(self) -> dict[str, Any] | None:
        """Sync the files; return the entry of the shard in the manifest, with its "name".
        For an empty shard, leave no file and return None."""
        ...


class Part(Protocol):
    """Converted documents of a batch in one split."""

    @property
    def documents(self) -> int: ...
    @property
    def size(self) -> int:
        """Size in the unit of `shard_size`, such as tokens."""
        ...

    @property
    def empty(self) -> int:
        """Number of documents without content, which are left out."""
        ...

    def append_to(self, writer: Any) -> None:
        """Append the part to the shard of a matching `Writer`."""
        ...


OpenWriter = Callable[[Path, str], Writer]
Convert = Callable[[Iterable[Batch]], Iterator[tuple[Part, Part]]]
"""Yields (training part, validation part) for each batch, in order."""


@contextlib.contextmanager
def partial(folder: Path, made_from: dict[str, Any], open_writer: OpenWriter) -> Iterator["Shards"]:
    """Yield the finished shards of `folder` in a hidden folder next to it. Deletes shards with another provenance.

    Raises:
        DataError: `folder` has other files; see `require_replaceable`.
        RunError: another process writes the folder, or the disk refuses.
    """
    require_replaceable(folder)
    partial_folder = _partial_folder_of(folder)
    with exclusive_lock(partial_folder, f"{folder}: another process is making it."):
        plan = json.loads(json.dumps(made_from))
        if (partial_folder / _PLAN).exists() and files.read_json(partial_folder / _PLAN, DataError) != plan:
            log.warning(
                "%s: its shards were made from other sources or with other options: they are made again.",
                partial_folder,
            )
            _empty(partial_folder)
        files.write_json(partial_folder / _PLAN, plan)
        yield Shards(folder, partial_folder, open_writer)


def discard(folder: Path) -> None:
    """Delete the leftovers of a writer that was killed after `folder` was complete."""
    shutil.rmtree(_partial_folder_of(folder), ignore_errors=True)


def _partial_folder_of(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.partial")


def _empty(partial_folder: Path) -> None:
    for path in sorted(
        partial_folder.iterdir(), key=lambda path: path.name != _PLAN
    ):  # delete the plan first: without it, leftovers are not used
        if path.name != ".lock":
            path.unlink()


class Shards:
    """Finished segments of the sources. A segment has a shard for training, one for validation, or both."""

    def __init__(self, folder: Path, partial_folder: Path, open_writer: OpenWriter) -> None:
        self._folder, self._partial_folder, self._open_writer = folder, partial_folder, open_writer
        self._source = 0
        self._segments: list[dict[str, Any]] = []
        while (path := self._done_path(len(self._segments))).exists():
            segment = files.read_json(path, DataError)
            for name, size in segment["bytes"].items():
                if not (partial_folder / name).is_file() or (partial_folder / name).stat().st_size != size:
                    log.warning(
                        "%s: changed after it was written. This shard and all later ones are made again.",
                        partial_folder / name,
                    )
                    return
            self._segments.append(segment)

    def shards_of(self, split: str) -> list[dict[str, Any]]:
        """Manifest entries of the finished shards of a split."""
        return [segment["shards"][split] for segment in self._segments if split in segment["shards"]]

    @property
    def empty(self) -> int:
        """Number of documents that were left out."""
        return sum(segment["empty"] for segment in self._segments)

    def add(self, split: str, source: Source, convert: Convert, shard_size: int) -> None:
        """Convert the rest of the next source. split: split of all its documents, if `convert` does not split them.

        Raises:
            DataError: the source is damaged.
            RunError: the disk refuses.
        """
        mine = [segment for segment in self._segments if segment["source"] == self._source]
        start = _Place(mine[-1]["batches"], mine[-1]["state"]) if mine else _Place(0, None)
        if not (mine and mine[-1]["last"]):
            batches = source.read(start.state)
            if start.state is None:
                batches = itertools.islice(batches, start.batches, None)
            results = _log_progress(source.name, convert(start.record_states(batches)))
            while not self._segment(split, start, results, shard_size):
                pass
        self._source += 1

    def _segment(self, split: str, start: "_Place", results: Iterator[tuple[Part, Part]], shard_size: int) -> bool:
        """Write the shards of a segment, and record its part of the source. Returns whether the source is finished."""
        number, size, empty, is_done = len(self._segments), 0, 0, False
        with contextlib.ExitStack() as stack:
            writers = {
                name: stack.enter_context(self._open_writer(self._partial_folder, f"{name}-{number:05d}"))
                for name in jsonl.SPLITS
            }
            while size < shard_size and not is_done:
                if (parts := next(results, None)) is None:
                    is_done = True
                    continue
                start.finish()
                for name, part in zip(jsonl.SPLITS if split == "train" else ("val", "train"), parts, strict=True):
                    part.append_to(writers[name])
                    size += part.size
                    empty += part.empty
            shards = {name: facts for name, writer in writers.items() if (facts := writer.close()) is not None}
        paths = [path for facts in shards.values() for path in sorted(self._partial_folder.glob(f"{facts['name']}.*"))]
        sizes = {path.name: path.stat().st_size for path in paths}
        done = {"source": self._source, "batches": start.batches, "state": start.state, "last": is_done}
        segment = {**done, "shards": shards, "bytes": sizes, "empty": empty}
        files.sync_directory(self._partial_folder)
        files.write_json(self._done_path(number), segment)
        self._segments.append(segment)
        return is_done

    def _done_path(self, number: int) -> Path:
        return self._partial_folder / f"{number:05d}{_DONE}"

    def publish(self, facts: dict[str, Any]) -> None:
        """Publish the finished shards as the folder itself, replacing an older one.

        Raises:
            RunError: the disk refuses.
        """
        with files.new_directory(self._folder, facts) as new, files.writing(self._folder):
            for name in (name for segment in self._segments for name in segment["bytes"]):
                try:
                    os.link(self._partial_folder / name, new / name)
                except OSError:  # the file system does not support links
                    shutil.copyfile(self._partial_folder / name, new / name)
        shutil.rmtree(self._partial_folder, ignore_errors=True)


class _Place:
    """Finished part of a source: number of batches, and the state after the last one."""

    def __init__(self, batches: int, state: Any) -> None:
        self.batches, self.state = batches, state
        self._states: deque[Any] = deque()

    def record_states(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        for batch in batches:
            self._states.append(batch.state)
            yield batch

    def finish(self) -> None:
        """Count the next batch as finished."""
        self.state = self._states.popleft()
        self.batches += 1


def _log_progress(name: str, results: Iterator[tuple[Part, Part]]) -> Iterator[tuple[Part, Part]]:
    """Yield the `results`, and log the progress every few seconds."""
    progress = Progress(name, "documents")
    for parts in results:
        progress.count(sum(part.documents for part in parts), sum(part.size for part in parts))
        yield parts
