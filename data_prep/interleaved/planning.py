"""Forecast of a training on streamed documents: how full rows are, drops, open tars, how far documents move.

The lanes of the training make rows from a sample of documents. They read only the indexes of the tars if these have
counts of tokens.
"""

import math
import time
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from src.data.orders import Key
from src.data.packing.lanes import Lane, Packing
from src.errors import ConfigError
from src.systems.interleaved.streaming.arrangement import Joined, Source, Streams
from src.systems.interleaved.streaming.dataset import StreamedDataset
from src.systems.interleaved.streaming.documents import Piece

OPEN_ROWS = (1, 2, 4, 8, 16, 32)
_LANES = 8
"""Lanes of a step that are simulated, at most."""
_SETTLED = 2
"""Times as many rows as are open that a lane makes before its rows count:
those that it makes first are fuller than all later ones."""
ENOUGH = 0.005
"""Share of a row: fills that differ by less are the same."""
_NO_LIMIT = 1 << 40


class OfSource(NamedTuple):
    """Numbers of one source in the sample."""

    name: str
    documents: int
    """Documents in the sample."""
    left_out: int
    """Bad documents, and those that the rules drop."""
    too_long: int
    """Documents that lose a part, or all, as they are longer than a row."""
    images: int
    text_tokens: int
    image_tokens: int
    tokens_left_out: int
    """Tokens of documents that are too long."""


@dataclass(frozen=True)
class Rows:
    """Rows that a sample of documents makes."""

    keys: Sequence[Key]
    tokens: Sequence[int]
    """Tokens of each row, without padding."""
    frames: Sequence[int]
    """Frames of each row."""
    fill: float
    """Share of the tokens of rows that is no padding."""


class Simulation:
    """Rows that some lanes of a step make from a sample of documents."""

    def __init__(self, data: StreamedDataset, seed: int, lanes: int, sample: int) -> None:
        """lanes: rows of a step. sample: documents, over all simulated lanes."""
        self.data, self.lanes, self.sample = data, lanes, sample
        self.room = (data.config.sequence_tokens, data.config.max_frames)
        self._cache: dict[int, dict[int, list[Piece]]] = {}
        """Pieces of documents, by the limit of frames in a row."""
        self.packing = replace(data.packing(data.arrangement(seed)), groups=(), group_of=None)

    @cached_property
    def rows(self) -> Rows:
        """With the given settings."""
        return self.pack(self.data.config.open_rows, self.room[1])

    @cached_property
    def fills(self) -> dict[int, float]:
        """Fill by number of open rows."""
        return {count: self.pack(count, self.room[1]).fill for count in OPEN_ROWS}

    @cached_property
    def without_limit(self) -> Rows:
        """Rows with room for all frames."""
        return self.pack(self.data.config.open_rows, _NO_LIMIT)

    def pack(self, open_rows: int, max_frames: int) -> Rows:
        """The rows that the lanes make of a sample, once their open rows are as full as they stay.

        Raises:
            ConfigError: the sample is too small for a row.
            DataError: no document fits into a row.
        """
        room, pieces_of = (self.room[0], max_frames), self._cache.setdefault(max_frames, {})

        def pieces(document: int) -> list[Piece]:
            if document not in pieces_of:
                source, number = self.data.locate(document)
                pieces_of[document] = self.data.documents[source].pieces(number, room)
            return pieces_of[document]

        packing = replace(
            self.packing,
            sizes=lambda _, document: [(piece.tokens, piece.frames) for piece in pieces(document)],
            room=room,
            open_rows=open_rows,
        )
        keys, padding = list[Key](), 0
        for lane in self._lanes(packing):
            for _ in range(_SETTLED * open_rows):
                lane.next_row()
            end, before = lane.taken + self._per_lane, lane.padding
            while (row := lane.fill(end)) is not None:
                keys.append(tuple(row))
            padding += lane.padding - before
        if not keys:
            raise ConfigError(f"--sample {self.sample}: too few documents to fill a row. Write a larger number.")
        results = [[pieces(document)[number] for _, document, number in _triples(key)] for key in keys]
        tokens = [sum(piece.tokens for piece in row) for row in results]
        return Rows(
            keys, tokens, [sum(piece.frames for piece in row) for row in results], 1 - padding / (len(keys) * room[0])
        )

    @property
    def _per_lane(self) -> int:
        return -(-self.sample // min(self.lanes, _LANES))

    def _lanes(self, packing: Packing) -> list[Lane]:
        count = min(self.lanes, _LANES)
        return [Lane(packing, number * self.lanes // count, self.lanes) for number in range(count)]

    @cached_property
    def documents(self) -> list[int]:
        """Those of the sample, each once, in no order that means anything."""
        return sorted(
            {lane.document(number)[1] for lane in self._lanes(self.packing) for number in range(self._per_lane)}
        )

    @cached_property
    def lengths(self) -> list[int]:
        """Tokens of each document of the sample that is not left out, as if a row had room for it."""
        results = list[int]()
        for document in self.documents:
            source, number = self.data.locate(document)
            if elements := self.data.documents[source].elements(number):
                results.append(sum(element.tokens for element in elements) + len(self.data.documents[source].texts.end))
        return results

    def by_source(self) -> list[OfSource]:
        """The sample by source."""
        counts = [[0] * 7 for _ in self.data.source_names]
        for document in self.documents:
            source, number = self.data.locate(document)
            elements = self.data.documents[source].elements(number)
            pieces = self.data.documents[source].pieces(number, self.room) if elements else []
            read = sum(element.tokens for piece in pieces for element in piece.elements)
            images = [element.tokens for element in elements if element.grid]
            every = sum(element.tokens for element in elements)
            more = (1, not elements, read < every, len(images), every - sum(images), sum(images), every - read)
            counts[source] = [before + new for before, new in zip(counts[source], more, strict=True)]
        return [OfSource(name, *numbers) for name, numbers in zip(self.data.source_names, counts, strict=True)]

    @property
    def documents_a_step(self) -> float:
        """Documents of the rows of a step, with those that are left out."""
        per_row = sum(len(key) // 3 for key in self.rows.keys) / len(self.rows.keys)
        out = sum(one.left_out for one in self.by_source()) / max(1, len(self.documents))
        return self.lanes * per_row / max(1 - out, 1e-9)

    def enough_open_rows(self) -> int:
        """The fewest that fill rows as well as the most do."""
        best = max(self.fills.values())
        return next(count for count, fill in self.fills.items() if fill >= best - ENOUGH)

    def enough_frames(self) -> int:
        """Frames that 99 of 100 rows do not exceed."""
        return quantile(self.without_limit.frames, 0.99)

    def enough_tokens(self) -> int:
        """Tokens that 99 of 100 documents do not exceed."""
        return quantile(self.lengths, 0.99) if self.lengths else 0

    def read(self, seconds: float) -> tuple[int, float]:
        """Read and decode rows in this process for `seconds`; returns the number of rows and the seconds it took.

        Raises:
            DataError: too much cannot be read.
        """
        began, count = time.perf_counter(), 0
        for count, key in enumerate(self.rows.keys, start=1):  # noqa: B007
            self.data.sample(*key)
            if time.perf_counter() - began >= seconds:
                break
        return count, time.perf_counter() - began


def shard_order(source: Source) -> list[int]:
    """The tars of a source in the order of its first epoch."""
    plain, order, place = replace(source, shuffle="none" if source.shuffle == "none" else "shards"), list[int](), 0
    while place < source.count:
        order.append(bisect_right(source.starts, plain.document(0, place)) - 1)
        place += source.sizes[order[-1]]
    return order


def shards_together(source: Source, documents: int) -> int:
    """How many tars hold documents that are read at about the same time, at most.

    That is two neighbouring windows, because lanes progress at different speeds; without windows, it is this number of
    `documents`.
    """
    ends = list(accumulate(source.sizes[shard] for shard in shard_order(source)))
    windows = source.shuffle == "window"
    band = 2 * source.window if windows else max(1, documents)
    begins = range(0, source.count, source.window) if windows else [end - 1 for end in ends]
    return max(bisect_left(ends, min(begin + band, source.count)) - bisect_right(ends, begin) + 1 for begin in begins)


def moves(source: Source, sample: int) -> list[int]:
    """How many places documents are from where the order of the tars has them, for evenly spaced places of an epoch."""
    order = shard_order(source)
    begins = dict(zip(order, accumulate((source.sizes[shard] for shard in order), initial=0), strict=False))
    results, count = list[int](), min(sample, source.count)
    for number in range(count):
        place = number * source.count // count
        document = source.document(0, place)
        shard = bisect_right(source.starts, document) - 1
        results.append(abs(begins[shard] + document - source.starts[shard] - place))
    return results


def sources_of(simulation: Simulation) -> Sequence[Source]:
    """The sources of its documents, in the order of their names."""
    arrangement = simulation.packing.arrangement
    assert isinstance(arrangement, (Joined, Streams)), "documents are streamed"
    return arrangement.sources


def _triples(key: Key) -> Iterable[tuple[int, int, int]]:
    return zip(key[::3], key[1::3], key[2::3], strict=True)


def quantile(values: Sequence[int], share: float) -> int:
    """The smallest value that this share of the values does not exceed."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]
