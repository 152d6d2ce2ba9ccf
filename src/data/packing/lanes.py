"""Pack complete documents into rows, in lanes. Row v of each step is the next row of lane v, at any world size and
after any restart.

A lane takes every V-th document of an endless sequence of epochs, where V is the number of sequences per step. It adds
each document to its first open row with room. If no row has room, it emits the row that is closest to one of its limits
(tokens or frames). No row stays open while more than `MAX_AGE * open_rows` rows are emitted. The state of a lane is the
number of documents taken and the contents of its open rows.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import ge, sub
from typing import Any, Protocol

from src.data.orders import Cursor, Key, MicroBatch, RankShare, feistel_permute
from src.errors import DataError, RunError
from src.runs.history.branches import Branch

HEADER = "of"
"""Cursor entry with the number of lanes and the digest of the documents; written by the process of lane 0."""
MAX_AGE = 8
"""Limits the age of open rows. Without it a row with 600 of 1,000 tokens waits forever if every document has 650
tokens."""
Size = tuple[int, ...]
"""Tokens, then other quantities with a limit per row, such as frames."""
Sizes = Callable[[int, int], Sequence[Size]]
"""(epoch, document) -> size of each piece, at most that of a row; empty if the document is dropped."""


class Arrangement(Protocol):
    """Assigns documents to lanes. In each epoch every document is taken once, by one lane."""

    @property
    def count(self) -> int:
        """Number of documents."""
        ...

    def document(self, lane: int, lanes: int, number: int, reshuffles: Sequence[Sequence[int]] = ()) -> tuple[int, int]:
        """(epoch, document) of the lane's document `number`.

        reshuffles: (number, branch) pairs; from this number on, the rest of the epoch is permuted by the branch.
        """
        ...

    def epoch(self, lane: int, lanes: int, number: int) -> int:
        """The epoch of the lane's document `number`; reshuffles do not change it."""
        ...


def permute_rest(
    number: int,
    share: tuple[int, int, int],
    reshuffles: Sequence[Sequence[int]],
    permute: Callable[[int, int, int], int],
) -> int:
    """The number of the document that replaces document `number` of a lane after reshuffles of the rest of its epoch.

    share: (lane, lanes, documents of an epoch). reshuffles: see `Arrangement.document`. permute: maps (place, size,
    branch) to a place.
    """
    lane, lanes, count = share
    epoch = (number * lanes + lane) // count
    end = -((lane - (epoch + 1) * count) // lanes)  # the first number of the next epoch
    for start, branch in reversed(reshuffles):
        if start <= number and (start * lanes + lane) // count == epoch:
            number = start + permute(number - start, end - start, branch)
    return number


@dataclass(frozen=True)
class PermutedArrangement:
    """Each epoch is a permutation of all documents; lane v of V takes the positions v, v + V, ..."""

    count: int
    seed: int

    def epoch(self, lane: int, lanes: int, number: int) -> int:
        """See `Arrangement`."""
        return (number * lanes + lane) // self.count

    def document(self, lane: int, lanes: int, number: int, reshuffles: Sequence[Sequence[int]] = ()) -> tuple[int, int]:
        """See `Arrangement`."""
        epoch = self.epoch(lane, lanes, number)

        def permute(place: int, size: int, branch: int) -> int:
            return feistel_permute(place, size, f"{self.seed}/{lane}/{branch}")

        number = permute_rest(number, (lane, lanes, self.count), reshuffles, permute)
        place = (number * lanes + lane) % self.count
        return epoch, feistel_permute(place, self.count, f"{self.seed}/{epoch}")


@dataclass(frozen=True)
class Packing:
    """An endless sequence of epochs of documents, and the limits of rows."""

    arrangement: Arrangement
    sizes: Sizes
    room: Size
    """Limits of a row."""
    open_rows: int
    """Rows of a lane that are filled at the same time. 0: one row per piece."""
    name: str
    """Name of the documents in error messages."""
    digest: str = ""
    """Digest of the documents and of the packing settings."""
    groups: Sequence[str] = ()
    """Names of groups, such as sources, that are counted separately."""
    group_of: Callable[[int], int] | None = None
    """The number of the group of a document."""
    find: Callable[[str], Collection[int]] | None = None
    """The documents that an entry of a deny list names; None if documents cannot be denied."""


class Lane:
    """Lane `number` of `lanes`. Its documents are numbered in the order in which it takes them."""

    def __init__(self, packing: Packing, number: int, lanes: int, state: Sequence[Any] | None = None) -> None:
        """state: from `state()`; None for a new lane."""
        self.packing, self.number, self.lanes = packing, number, lanes
        num_taken, piece, left_out, reshuffles, rows, ages = state or (0, 0, 0, (), (), ())
        self.num_taken: int = num_taken
        """Documents that are completely in rows, or were dropped."""
        self.piece: int = piece
        """Pieces of the next document that are in rows."""
        self.left_out: int = left_out
        self.reshuffles: list[Sequence[int]] = list(reshuffles)
        """(first document, number of the branch): the rest of the epoch from this document on is permuted."""
        self.rows: list[list[int]] = [list(row) for row in rows]
        """Open rows, oldest first, each a flat list of (document number, piece number) pairs."""
        self.ages: list[int] = list(ages)
        """Rows emitted since each open row was opened."""
        self.padding = 0
        """Tokens of padding in the emitted rows."""
        self.by_group = [[0, 0] for _ in packing.groups]
        """Number of dropped documents and of all documents, per group."""
        self.denied_documents: frozenset[int] = frozenset()
        """Documents to drop, and to remove from open rows when these are emitted."""
        self._room = [self._room_left(row) for row in self.rows]

    def state(self) -> list[Any]:
        """A copy of the state to resume from, as JSON values."""
        return [
            self.num_taken,
            self.piece,
            self.left_out,
            list(self.reshuffles),
            [list(row) for row in self.rows],
            list(self.ages),
        ]

    def epoch(self, number: int) -> int:
        """The epoch of the lane's document `number`."""
        return self.packing.arrangement.epoch(self.number, self.lanes, number)

    def document(self, number: int) -> tuple[int, int]:
        """(epoch, document) of the lane's document `number`."""
        return self.packing.arrangement.document(self.number, self.lanes, number, self.reshuffles)

    def reshuffle(self, branch: int) -> None:
        """Permute the rest of the epoch. Documents in open rows stay there."""
        self.reshuffles.append([self.num_taken + (self.piece > 0), branch])

    def next_row(self) -> list[int]:
        """Flat list of (epoch, document, piece) of each piece in the next row.

        Raises:
            DataError: no document fits into a row.
        """
        row = self.fill(None)
        assert row is not None, "an endless sequence of documents"
        return row

    def fill(self, end: int | None) -> list[int] | None:
        """`next_row`; None once the lane has taken `end` documents."""
        misses, packing = 0, self.packing
        while self.num_taken != end:
            is_denied = (
                not self.piece and self.denied_documents and self.document(self.num_taken)[1] in self.denied_documents
            )
            sizes = () if is_denied else self._pieces(self.num_taken)
            misses = 0 if sizes else misses + 1
            self.left_out += not sizes
            if packing.group_of and not self.piece:
                counts = self.by_group[packing.group_of(self.document(self.num_taken)[1])]
                counts[0] += not sizes
                counts[1] += 1
            if misses == packing.arrangement.count:  # other lanes can have taken the documents that fit
                epoch, misses = self.epoch(self.num_taken), 0
                every = range(packing.arrangement.count)
                if not any(
                    packing.sizes(epoch, document) for document in every if document not in self.denied_documents
                ):
                    raise DataError(
                        f"{packing.name}: none of {len(every)} documents fits into a row of {packing.room[0]} tokens. "
                        "Use a larger sequence_tokens, or, for text, too_long 'cut'."
                    )
            row = None
            while row is None and self.piece < len(sizes):
                row = self._place_piece(sizes[self.piece]) or None  # a row of denied documents is empty
            if self.piece == len(sizes):
                self.num_taken, self.piece = self.num_taken + 1, 0
            if row is not None:
                return row
        return None

    def flush(self) -> list[list[int]]:
        """Emit all open rows."""
        return [row for row in [self._emit(0) for _ in range(len(self.rows))] if row]

    def _place_piece(self, size: Size) -> list[int] | None:
        """Add the next piece to an open row, or emit a row if one must be emitted first. Returns the emitted row."""
        if self.ages and self.ages[0] >= MAX_AGE * self.packing.open_rows:
            return self._emit(0)
        fitting = next((i for i, room in enumerate(self._room) if all(map(ge, room, size))), None)
        if fitting is None:
            if self.rows and len(self.rows) == self.packing.open_rows:
                return self._emit(min(range(len(self.rows)), key=self._free_share))
            fitting = len(self.rows)
            self.rows.append([])
            self._room.append(self.packing.room)
            self.ages.append(0)
        self.rows[fitting] += self.num_taken, self.piece
        self._room[fitting] = tuple(map(sub, self._room[fitting], size))
        self.piece += 1
        return None if self._room[fitting][0] and self.packing.open_rows else self._emit(fitting)

    def _free_share(self, index: int) -> float:
        """Free share of an open row, by the quantity closest to its limit."""
        return min(free / limit for free, limit in zip(self._room[index], self.packing.room, strict=True))

    def _emit(self, index: int) -> list[int]:
        row, room, _ = self.rows.pop(index), self._room.pop(index), self.ages.pop(index)
        self.ages = [age + 1 for age in self.ages]
        pieces = [(*self.document(n), p) for n, p in zip(row[::2], row[1::2], strict=True)]
        if any(document in self.denied_documents for _, document, _ in pieces):
            sizes = [self._pieces(n)[p][0] for n, p in zip(row[::2], row[1::2], strict=True)]
            self.padding += sum(
                size for (_, document, _), size in zip(pieces, sizes, strict=True) if document in self.denied_documents
            )
        self.padding += room[0]
        return [part for piece in pieces if piece[1] not in self.denied_documents for part in piece]

    def _pieces(self, number: int) -> Sequence[Size]:
        return self.packing.sizes(*self.document(number))

    def _room_left(self, row: Sequence[int]) -> Size:
        sizes = [self._pieces(n)[p] for n, p in zip(row[::2], row[1::2], strict=True)]
        return tuple(room - sum(piece_sizes) for room, *piece_sizes in zip(self.packing.room, *sizes, strict=True))


@dataclass(frozen=True)
class LaneOrder:
    """An `orders.Order` of packed rows with one lane per sequence of a step. The cursor has the state of each lane by
    its number.

    "skip:K" drops K rows of each lane; "reshuffle" permutes the rest of each lane's epoch. Both apply after
    `Branch.from_step`: its checkpoint does not include them, later checkpoints do.
    """

    packing: Packing
    lanes: int
    branches: Sequence[Branch] = ()

    def micro_batches(self, first_step: int, share: RankShare, cursor: Cursor) -> Iterator[MicroBatch]:
        """See `orders.Order`. Counters: share of dropped documents, and share of padding tokens.

        Raises:
            RunError: the cursor has other documents or another number of lanes.
        """
        if share.per_step != self.lanes:
            raise ValueError(f"{share.per_step} sequences a step, {self.lanes} lanes")
        self._require_own(first_step, cursor)
        mine = [
            [
                Lane(self.packing, v, self.lanes, cursor.get(str(v)))
                for v in range(g * share.micro_batch, (g + 1) * share.micro_batch)
            ]
            for g in share.numbers
        ]
        every = [lane for lanes in mine for lane in lanes]
        self._deny(every, [branch for branch in self.branches if branch.from_step < first_step])
        step = first_step
        while True:
            for branch in self.branches:
                if branch.from_step == step:
                    self._deny(every, [branch])
                    for lane in every:
                        _apply(branch, lane)
            for lanes in mine:
                before = _totals(lanes)
                keys: list[Key] = [tuple(lane.next_row()) for lane in lanes]
                left_out, documents, padding, *by_group = (
                    now - then for now, then in zip(_totals(lanes), before, strict=True)
                )
                header = {HEADER: self._header()} if lanes[0].number == 0 else {}
                counters = {"left_out": (left_out, documents), "padding": (padding, len(lanes) * self.packing.room[0])}
                for name, *pair in zip(self.packing.groups, by_group[::2], by_group[1::2], strict=True):
                    counters[f"left_out/{name}"] = (pair[0], pair[1])
                yield MicroBatch(keys, {**header, **{str(lane.number): lane.state() for lane in lanes}}, counters)
            step += 1

    def describe(self, step: int, cursor: Cursor) -> Mapping[str, Any]:
        """The lowest epoch of all lanes; the number of documents in emitted rows, and of dropped documents, over all
        lanes."""
        self._require_own(step, cursor)
        lanes = [Lane(self.packing, v, self.lanes, (*cursor[str(v)][:4], (), ())) for v in range(self.lanes) if cursor]
        still_open = sum(
            len({n for row in cursor[str(lane.number)][4] for n in row[::2] if n < lane.num_taken}) for lane in lanes
        )
        return {
            "epoch": min((lane.epoch(lane.num_taken) for lane in lanes), default=0),
            "documents": sum(lane.num_taken - lane.left_out for lane in lanes) - still_open,
            "left_out": sum(lane.left_out for lane in lanes),
        }

    def _deny(self, lanes: Sequence[Lane], branches: Sequence[Branch]) -> None:
        """Drop the documents that the branches deny."""
        entries = [entry for branch in branches for entry in branch.deny_list or ()]
        if entries and self.packing.find is None:
            raise RunError(
                f"{self.packing.name}: deny list: only data streamed from tars can be denied. "
                "Undo it: python -m src.operations.interventions undo RUN."
            )
        denied_documents = frozenset(
            document for entry in entries if self.packing.find for document in self.packing.find(entry)
        )
        for lane in lanes:
            lane.denied_documents = lane.denied_documents | denied_documents

    def _header(self) -> list[Any]:
        return [self.lanes, self.packing.digest]

    def _require_own(self, step: int, cursor: Cursor) -> None:
        header = cursor.get(HEADER)
        if step and header is None:
            raise RunError(
                f"checkpoint of step {step}: it has no position in packed data, so it was trained on other data. "
                "Restore the data of the experiment, or restart with -r 1."
            )
        if header is None:
            return
        if header[0] != self.lanes:
            raise RunError(
                f"checkpoint of step {step}: saved with loop.sequences_per_step {header[0]}, now {self.lanes}. "
                f"Set loop.sequences_per_step to {header[0]}, or restart with -r 1."
            )
        if header != self._header():
            raise RunError(
                f"checkpoint of step {step}: saved with other documents or other packing settings. "
                "Restore them, or restart with -r 1."
            )


def _totals(lanes: Sequence[Lane]) -> list[int]:
    """Dropped documents, all documents taken, tokens of padding; then dropped and all documents of each group."""
    rows = (
        (lane.left_out, lane.num_taken, lane.padding, *(n for counts in lane.by_group for n in counts))
        for lane in lanes
    )
    return [sum(values) for values in zip(*rows, strict=True)]


def _apply(branch: Branch, lane: Lane) -> None:
    for _ in range(branch.skipped_steps):
        lane.next_row()
    if branch.data == "reshuffle":
        lane.reshuffle(branch.number)


def pack_epoch(packing: Packing) -> list[list[int]]:
    """Pack all pieces of one epoch into rows as `Lane.next_row` returns them. The last row can be nearly empty."""
    lane = Lane(packing, 0, 1)
    rows = list(iter(lambda: lane.fill(packing.arrangement.count), None))
    return [*rows, *lane.flush()]
