"""Which document of which source a lane takes when: functions of the seed and the epoch, without a buffer.

Every source has epochs of its own. In each, a place has one document: places are in the order of the shards, of shards in another order
(`shards`), or of such shards with documents mixed within windows (`window`). A lane takes sources by a schedule of a fixed period, in
which they are spread evenly, and of each source every V-th place.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Literal

from src.data.mixture.interleaving import Interleaving, shares
from src.orders import feistel_permute

_EPOCHS = 4
PERIOD = 4096
"""Documents after which the schedule of sources begins anew."""


@dataclass
class Source:
    """The places of one source."""

    sizes: Sequence[int]
    """Documents of each shard."""
    shuffle: Literal["none", "shards", "window"]
    window: int
    """Documents among which `window` mixes."""
    seed: str
    _ends: dict[int, tuple[list[int], list[int]]] = field(default_factory=dict, repr=False)
    """Of the last epochs that were asked for: the shards in their order, and the places at which they end. Lanes are in two at a time."""

    def __post_init__(self) -> None:
        self.count = sum(self.sizes)
        self.starts = [0, *accumulate(self.sizes)]
        """The first document of each shard."""

    def document(self, epoch: int, place: int) -> int:
        """The document at a place of an epoch: a number below `count`, which counts through the shards."""
        if self.shuffle == "none":
            return place
        if self.shuffle == "window":
            number = place // self.window
            first = number * self.window
            place = first + feistel_permute(place - first, min(self.window, self.count - first), f"{self.seed}/{epoch}/{number}")
        if epoch not in self._ends:
            while len(self._ends) >= _EPOCHS:
                del self._ends[next(iter(self._ends))]
            order = [feistel_permute(i, len(self.sizes), f"{self.seed}/{epoch}") for i in range(len(self.sizes))]
            self._ends[epoch] = order, list(accumulate(self.sizes[shard] for shard in order))
        order, ends = self._ends[epoch]
        at = bisect_right(ends, place)
        return self.starts[order[at]] + place - (ends[at] - self.sizes[order[at]])


class Streams:
    """An `Arrangement` of the documents of several sources, by rates. Document numbers count through the sources."""

    def __init__(self, sources: Sequence[Source], rates: Sequence[float] = ()) -> None:
        """rates: shares of the documents; they need not sum to 1. None: in proportion to the documents of each source."""
        self.sources = sources
        self.starts = [0, *accumulate(source.count for source in sources)]
        self.count = self.starts[-1]
        self.counts = shares(rates or [source.count for source in sources], PERIOD)
        if not rates:  # in proportion, but each at least once
            self.counts = [max(1, count) for count in self.counts]
            self.counts[self.counts.index(max(self.counts))] -= sum(self.counts) - PERIOD
        """Documents of each source in a period."""
        spread = Interleaving(self.counts)
        self._schedule = [spread.place(place) for place in range(PERIOD if len(sources) > 1 else 0)]
        """(source, how many of it came before in the period) by place in the period."""
        self._before = [[0] * len(sources)]
        """Documents of each source before each place of the period."""
        for source, _ in self._schedule:
            self._before.append([count + (number == source) for number, count in enumerate(self._before[-1])])

    def source_of(self, document: int) -> int:
        """Number of the source of a document."""
        return bisect_right(self.starts, document) - 1

    def turn(self, lane: int, lanes: int, number: int) -> tuple[int, int]:
        """The source of a lane's document, and how many of that source the lane has taken before it.

        Lanes begin at different places of the period, so that a step has a share of each source.
        """
        if len(self.sources) == 1:
            return 0, number
        first = lane * PERIOD // lanes
        period, place = divmod(first + number, PERIOD)
        source, taken = self._schedule[place]
        return source, period * self.counts[source] + taken - self._before[first][source]

    def count_of_source(self, lane: int, lanes: int, number: int, source: int) -> int:
        """Documents of a source among the first `number` of a lane."""
        if len(self.sources) == 1:
            return number
        first = lane * PERIOD // lanes
        period, place = divmod(first + number, PERIOD)
        return period * self.counts[source] + self._before[place][source] - self._before[first][source]

    def epoch(self, lane: int, lanes: int, number: int) -> int:
        """See `packing.lanes.Arrangement`: that of the document's source."""
        source, turn = self.turn(lane, lanes, number)
        return (turn * lanes + lane) // self.sources[source].count

    def document(self, lane: int, lanes: int, number: int, reshuffles: Sequence[Sequence[int]] = ()) -> tuple[int, int]:
        """See `packing.lanes.Arrangement`.

        A reshuffle moves blocks of documents, those of a window or of a shard, so that no more shards are open than before.
        """
        source, turn = self.turn(lane, lanes, number)
        own = self.sources[source]
        epoch = (turn * lanes + lane) // own.count
        for start, branch in reversed(reshuffles):
            first = self.count_of_source(lane, lanes, start, source)
            if first <= turn and (first * lanes + lane) // own.count == epoch:
                end = -((lane - (epoch + 1) * own.count) // lanes)  # the first turn of the next epoch
                turn = first + _permute_blocks(turn - first, end - first, self._block(own, lanes), f"{own.seed}/{branch}")
        place = (turn * lanes + lane + epoch) % own.count  # moved on in each epoch: else a lane may meet the same few for ever
        return epoch, self.starts[source] + own.document(epoch, place)

    @staticmethod
    def _block(source: Source, lanes: int) -> int:
        """Turns of a lane in a window, or in a shard."""
        together = source.window if source.shuffle == "window" else source.count // len(source.sizes)
        return max(1, together // lanes)


def _permute_blocks(position: int, size: int, block: int, key: str) -> int:
    """Image of a position under a permutation of 0..size-1 that moves whole blocks, and mixes each; a shorter last one stays last."""
    number, place = divmod(position, block)
    whole = size // block
    if number < whole:
        number = feistel_permute(number, whole, key)
    return number * block + feistel_permute(place, min(block, size - number * block), f"{key}/{number}")
