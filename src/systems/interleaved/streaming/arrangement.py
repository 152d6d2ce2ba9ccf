"""Order of the documents in each lane: a pure function of the seed and the epoch, without a shuffle buffer.

An epoch of a source is a permutation of its documents: none, of the shards (`shards`), or of the shards and of the
documents within windows (`window`). With rates, each of V lanes selects sources by a periodic schedule and takes every
V-th document of a source; each source has its own epochs. Without rates, all sources form one sequence, and each lane
takes every V-th document.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Literal

from src.data.mixture.interleaving import Interleaving, shares
from src.data.orders import feistel_permute
from src.data.packing.lanes import permute_rest

_EPOCHS = 4
PERIOD = 4096
"""Period of the schedule of sources, in documents."""


@dataclass
class Source:
    """Document order of one source."""

    sizes: Sequence[int]
    """Number of documents per shard."""
    shuffle: Literal["none", "shards", "window"]
    window: int
    """Documents per shuffle window."""
    seed: str
    _ends: dict[int, tuple[list[int], list[int]]] = field(default_factory=dict, repr=False)
    """Epoch -> shards in order, and the place where each ends. Has recent epochs, as lanes can be in two at a time."""

    def __post_init__(self) -> None:
        self.count = sum(self.sizes)
        self.starts = [0, *accumulate(self.sizes)]
        """The first document of each shard."""

    def document(self, epoch: int, place: int) -> int:
        """The document at a place of an epoch: a number below `count`, numbered across the shards."""
        if self.shuffle == "none":
            return place
        if self.shuffle == "window":
            number = place // self.window
            first = number * self.window
            place = first + feistel_permute(
                place - first, min(self.window, self.count - first), f"{self.seed}/{epoch}/{number}"
            )
        if epoch not in self._ends:
            while len(self._ends) >= _EPOCHS:
                del self._ends[next(iter(self._ends))]
            order = [feistel_permute(i, len(self.sizes), f"{self.seed}/{epoch}") for i in range(len(self.sizes))]
            self._ends[epoch] = order, list(accumulate(self.sizes[shard] for shard in order))
        order, ends = self._ends[epoch]
        at = bisect_right(ends, place)
        return self.starts[order[at]] + place - (ends[at] - self.sizes[order[at]])


class JoinedSources:
    """An `Arrangement` of several sources as one sequence.
    An epoch has each document once; sources are spread evenly."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self.sources = sources
        self.starts = [0, *accumulate(source.count for source in sources)]
        """The first document of each source, numbered through the sources."""
        self.count = self.starts[-1]
        self._spread = Interleaving([source.count for source in sources])

    def epoch(self, lane: int, lanes: int, number: int) -> int:
        """See `packing.lanes.Arrangement`."""
        return (number * lanes + lane) // self.count

    def document(self, lane: int, lanes: int, number: int, reshuffles: Sequence[Sequence[int]] = ()) -> tuple[int, int]:
        """See `packing.lanes.Arrangement`. A reshuffle moves blocks of documents, as `_block` says."""
        epoch = self.epoch(lane, lanes, number)
        if reshuffles:
            permute = _block_permutation(max(_block(source, lanes) for source in self.sources), self.sources[0].seed)
            number = permute_rest(number, (lane, lanes, self.count), reshuffles, permute)
        place = (
            number * lanes + lane + epoch
        ) % self.count  # shifted per epoch, so that a lane does not repeat the same few documents
        source, place = (0, place) if len(self.sources) == 1 else self._spread.place(place)
        return epoch, self.starts[source] + self.sources[source].document(epoch, place)


class Streams:
    """An `Arrangement` of several sources by rates. Each source has its own epochs."""

    def __init__(self, sources: Sequence[Source], rates: Sequence[float]) -> None:
        """rates: weights of the sources; they need not sum to 1."""
        self.sources = sources
        self.starts = [0, *accumulate(source.count for source in sources)]
        """The first document of each source, numbered through the sources."""
        self.count = self.starts[-1]
        self.counts = shares(rates, PERIOD)
        """Documents of each source in a period."""
        spread = Interleaving(self.counts)
        self._schedule = [spread.place(place) for place in range(PERIOD)]
        """Place in the period -> source, and number of its earlier documents in the period."""
        self._before = [[0] * len(sources)]
        """Documents of each source before each place of the period."""
        for source, _ in self._schedule:
            self._before.append([count + (number == source) for number, count in enumerate(self._before[-1])])

    def turn(self, lane: int, lanes: int, number: int) -> tuple[int, int]:
        """The source of a lane's document, and the number of earlier documents of that source in the lane.

        Lanes start at different places of the period, so that each step has documents of each source.
        """
        first = lane * PERIOD // lanes
        period, place = divmod(first + number, PERIOD)
        source, earlier = self._schedule[place]
        return source, period * self.counts[source] + earlier - self._before[first][source]

    def count_of_source(self, lane: int, lanes: int, number: int, source: int) -> int:
        """Number of documents of a source among the first `number` of a lane."""
        first = lane * PERIOD // lanes
        period, place = divmod(first + number, PERIOD)
        return period * self.counts[source] + self._before[place][source] - self._before[first][source]

    def epoch(self, lane: int, lanes: int, number: int) -> int:
        """The epoch of the document's source; see `packing.lanes.Arrangement`."""
        source, turn = self.turn(lane, lanes, number)
        return (turn * lanes + lane) // self.sources[source].count

    def document(self, lane: int, lanes: int, number: int, reshuffles: Sequence[Sequence[int]] = ()) -> tuple[int, int]:
        """See `packing.lanes.Arrangement`. A reshuffle moves blocks of documents, as `_block` says."""
        number_of_source, turn = self.turn(lane, lanes, number)
        source = self.sources[number_of_source]
        epoch = (turn * lanes + lane) // source.count
        firsts = [(self.count_of_source(lane, lanes, start, number_of_source), branch) for start, branch in reshuffles]
        turn = permute_rest(
            turn, (lane, lanes, source.count), firsts, _block_permutation(_block(source, lanes), source.seed)
        )
        place = (
            turn * lanes + lane + epoch
        ) % source.count  # shifted per epoch, so that a lane does not repeat the same few documents
        return epoch, self.starts[number_of_source] + source.document(epoch, place)


def arrange(sources: Sequence[Source], rates: Sequence[float]) -> "JoinedSources | Streams":
    """The order of several sources: by rates, or without rates in proportion to their sizes."""
    return Streams(sources, rates) if len(sources) > 1 and rates else JoinedSources(sources)


def _block(source: Source, lanes: int) -> int:
    """Documents per lane in a window, or in a shard.
    A reshuffle moves such blocks, so that no more shards are open than before."""
    documents = source.window if source.shuffle == "window" else source.count // len(source.sizes)
    return max(1, documents // lanes)


def _block_permutation(block: int, seed: str) -> Callable[[int, int, int], int]:
    return lambda place, size, branch: _permute_blocks(place, size, block, f"{seed}/{branch}")


def _permute_blocks(position: int, size: int, block: int, key: str) -> int:
    """Apply a permutation of 0..size-1 to a position: it shuffles complete blocks, and positions within each block.
    A shorter last block stays last."""
    number, place = divmod(position, block)
    whole = size // block
    if number < whole:
        number = feistel_permute(number, whole, key)
    return number * block + feistel_permute(place, min(block, size - number * block), f"{key}/{number}")
