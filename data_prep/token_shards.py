"""Writing a folder of token files, shard by shard; whole shards survive a kill of the writer."""

import contextlib
import itertools
import json
import logging
import os
import shutil
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from data_prep.command import Progress, exclusive_lock
from data_prep.text_sources import Batch, Source
from data_prep.token_workers import Tokens
from src import files
from src.data import jsonl
from src.data.text import token_files
from src.errors import DataError

log = logging.getLogger(__name__)
_PLAN, _DONE = "plan.json", ".done.json"
Tokenise = Callable[[Iterable[Batch]], Iterator[tuple[Tokens, Tokens]]]


@contextlib.contextmanager
def partial(folder: Path, made_from: dict[str, Any]) -> Iterator["Shards"]:
    """The finished shards of `folder`, in a hidden folder beside it. Shards of another provenance are deleted.

    Raises:
        RunError: another process writes them, or the disk refuses.
    """
    beside = _beside(folder)
    with exclusive_lock(beside, f"{folder}: another process is making it."):
        plan = json.loads(json.dumps(made_from))
        if (beside / _PLAN).exists() and files.read_json(beside / _PLAN, DataError) != plan:
            log.warning("%s: the shards in it were made from something else, or in another way: they are made anew.", beside)
            _empty(beside)
        files.write_json(beside / _PLAN, plan)
        yield Shards(folder, beside, plan)


def discard(folder: Path) -> None:
    """Delete the leftovers of a writer that was killed after `folder` was whole."""
    shutil.rmtree(_beside(folder), ignore_errors=True)


def _beside(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.partial")


def _empty(beside: Path) -> None:
    for path in sorted(beside.iterdir(), key=lambda path: path.name != _PLAN):  # the plan first: without it nothing is trusted
        if path.name != ".lock":
            path.unlink()


class Shards:
    """Segments of the sources, each with a shard of training documents and one of validation documents; either may be missing."""

    def __init__(self, folder: Path, beside: Path, made_from: dict[str, Any]) -> None:
        self._folder, self._beside = folder, beside
        self._dtype = token_files.id_dtype(made_from["tokenizer"]["vocab_size"])
        self._source = 0
        self._segments: list[dict[str, Any]] = []
        while (path := self._done_path(len(self._segments))).exists():
            segment = files.read_json(path, DataError)
            for name, size in segment["bytes"].items():
                if not (beside / name).is_file() or (beside / name).stat().st_size != size:
                    log.warning("%s: not as it was written. It is made anew, and all that follow.", beside / name)
                    return
            self._segments.append(segment)

    def shards_of(self, split: str) -> list[dict[str, Any]]:
        """The finished shards of a split, as in the manifest."""
        return [segment["shards"][split] for segment in self._segments if split in segment["shards"]]

    def add(self, split: str, source: Source, tokenise: Tokenise, shard_tokens: int) -> None:
        """Tokenise the rest of the next source. split: that of all its documents, if `tokenise` does not split them.

        Raises:
            DataError: the source is damaged.
            RunError: the disk refuses.
        """
        mine = [segment for segment in self._segments if segment["source"] == self._source]
        begun = _Place(mine[-1]["batches"], mine[-1]["state"]) if mine else _Place(0, None)
        if not (mine and mine[-1]["last"]):
            left = source.read(begun.state)
            if begun.state is None:
                left = itertools.islice(left, begun.batches, None)
            results = _log_progress(source.name, tokenise(begun.record_states(left)))
            while not self._segment(split, begun, results, shard_tokens):
                pass
        self._source += 1

    def _segment(self, split: str, begun: "_Place", results: Iterator[tuple[Tokens, Tokens]], shard_tokens: int) -> bool:
        """Write the shards of a segment, and record which part of the source they hold; returns whether the source ends with them."""
        number, tokens, ended = len(self._segments), 0, False
        with contextlib.ExitStack() as opened:
            writers = {
                name: opened.enter_context(token_files.Writer(self._beside, f"{name}-{number:05d}", self._dtype)) for name in jsonl.SPLITS
            }
            while tokens < shard_tokens and not ended:
                if (parts := next(results, None)) is None:
                    ended = True
                    continue
                begun.finish()
                for name, part in zip(jsonl.SPLITS if split == "train" else ("val", "train"), parts, strict=True):
                    writers[name].append(part.ids, part.lengths)
                    tokens += len(part.ids)
            shards = {name: facts for name, writer in writers.items() if (facts := writer.close()) is not None}
        names = [facts["name"] + end for facts in shards.values() for end in (token_files.IDS, token_files.ENDS)]
        sizes = {name: (self._beside / name).stat().st_size for name in names}
        done = {"source": self._source, "batches": begun.batches, "state": begun.state, "last": ended}
        segment = {**done, "shards": shards, "bytes": sizes}
        files.sync_directory(self._beside)
        files.write_json(self._done_path(number), segment)
        self._segments.append(segment)
        return ended

    def _done_path(self, number: int) -> Path:
        return self._beside / f"{number:05d}{_DONE}"

    def publish(self, facts: dict[str, Any]) -> None:
        """Turn the finished shards into the folder itself, replacing an older one.

        Raises:
            RunError: the disk refuses.
        """
        with files.new_directory(self._folder, facts) as new, files.writing(self._folder):
            for name in (name for segment in self._segments for name in segment["bytes"]):
                try:
                    os.link(self._beside / name, new / name)
                except OSError:  # the file system has no links
                    shutil.copyfile(self._beside / name, new / name)
        shutil.rmtree(self._beside, ignore_errors=True)


class _Place:
    """The finished part of a source: the number of batches, and the state after the last."""

    def __init__(self, batches: int, state: Any) -> None:
        self.batches, self.state = batches, state
        self._given: deque[Any] = deque()

    def record_states(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        for batch in batches:
            self._given.append(batch.state)
            yield batch

    def finish(self) -> None:
        """Count the next batch as finished."""
        self.state = self._given.popleft()
        self.batches += 1


def _log_progress(name: str, results: Iterator[tuple[Tokens, Tokens]]) -> Iterator[tuple[Tokens, Tokens]]:
    """The `results`; logs the progress every few seconds."""
    progress = Progress(name, "documents")
    for parts in results:
        progress.count(sum(len(part.lengths) for part in parts), sum(len(part.ids) for part in parts))
        yield parts
