"""Download remote tars before a training reads them, in the order of the documents."""

from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from src.data.orders import RankShare
from src.data.packing.lanes import Arrangement
from src.systems.interleaved.streaming.manifest import Shard
from src.systems.interleaved.streaming.remote.cache import ShardCache
from src.systems.interleaved.streaming.remote.downloads import Downloads
from src.systems.interleaved.streaming.remote.transfer import REMOTE

HORIZON = 16_384
"""Maximum number of documents that a process looks ahead."""


class ReadAhead:
    """Caches the next remote tars of one process's lanes. Does not affect rows or their order."""

    def __init__(
        self,
        arrangement: Arrangement,
        share: RankShare,
        shard_of: Callable[[int], Shard],
        count: int,
        cache: ShardCache,
    ) -> None:
        """share: of this process. shard_of: function from a document to its tar.
        count: number of upcoming tars to request at a time."""
        self._arrangement, self._share, self._shard_of, self._count = arrangement, share, shard_of, count
        self._lanes = [
            _Lane(v) for g in share.numbers for v in range(g * share.micro_batch, (g + 1) * share.micro_batch)
        ]
        self.coming = Counter[Shard]()
        """Number of upcoming documents per tar; tars are in the order of their first use."""
        self._downloads = Downloads(cache)

    def advance(self, cursor: Mapping[str, Any]) -> None:
        """Advance to a cursor, and request the tars that are needed next.

        cursor: entries of `lanes.LaneOrder` for all lanes of this process; empty at the start of a training.
        """
        in_rows = dict[Shard, None]()
        for lane in self._lanes:
            position, _, _, reshuffles, rows, _ = cursor.get(str(lane.number), (0, 0, 0, [], [], []))
            if lane.reshuffles != reshuffles:  # the order of the next documents changed
                self.coming -= Counter(lane.coming)
                lane.coming.clear()
                lane.reshuffles = list(reshuffles)
            while lane.coming and lane.position < position:
                shard = lane.open[lane.position] = lane.coming.popleft()
                self.coming -= Counter([shard])
                lane.position += 1
            lane.position = position
            lane.open = {
                number: lane.open.get(number) or self._find(lane, number) for row in rows for number in row[::2]
            }
            in_rows |= dict.fromkeys(lane.open.values())
        while len(self.coming) <= self._count and len(self._lanes[0].coming) * len(self._lanes) < HORIZON:
            for lane in self._lanes:
                shard = self._find(lane, lane.position + len(lane.coming))
                lane.coming.append(shard)
                self.coming[shard] += 1
        requests = [*in_rows, *list(self.coming)[: self._count]]
        self._downloads.request([shard for shard in dict.fromkeys(requests) if shard.url.startswith(REMOTE)])

    def close(self) -> None:
        """Stop downloading."""
        self._downloads.close()

    def _find(self, lane: "_Lane", number: int) -> Shard:
        _, document = self._arrangement.document(lane.number, self._share.per_step, number, lane.reshuffles)
        return self._shard_of(document)


@dataclass
class _Lane:
    """Read position and look-ahead of one lane."""

    number: int
    position: int = 0
    reshuffles: list[Any] = field(default_factory=list)
    coming: deque[Shard] = field(default_factory=deque)
    """Tars of the documents starting at `position`."""
    open: dict[int, Shard] = field(default_factory=dict)
    """Tars of the documents in open rows."""
