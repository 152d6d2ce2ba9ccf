"""An order maps the optimizer steps of a training to sample keys. Samples are pure functions of their keys.

An order has no state if the samples of a step depend only on its number, as in a permutation of an index. Packed rows,
filtered streams and rollouts have a state, the cursor: JSON values that are passed along with each micro-batch and
saved in every checkpoint.
"""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import count, islice
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, cast, runtime_checkable

from src.errors import RunError
from src.experiments.dataset_protocols import Dataset, MeasuredDataset
from src.experiments.interfaces import DatasetConfig
from src.runs.history.branches import Branch

if TYPE_CHECKING:
    import numpy as np

Key = tuple[Any, ...]
"""The arguments of a data set's `sample`, as JSON values; (epoch, index) for an indexed data set."""
Cursor = dict[str, Any]
"""State of an order as a JSON object. Each process changes its own entries; the union of all entries is the state."""


Shuffle = Literal["numpy", "feistel"]
_ROUNDS = 4
_WINDOW = 50
"""Steps per window in which samples are sorted by length."""


@dataclass(frozen=True)
class RankShare:
    """How the sequences of one optimizer step are split into micro-batches, and which of them this process reads.

    Micro-batch number g of a step goes to process g % world_size, so the numbers of micro-batches per process can
    differ by one.
    """

    per_step: int
    """Sequences of one optimizer step, over all processes."""
    micro_batch: int
    rank: int
    world_size: int

    @property
    def numbers(self) -> range:
        """Numbers, within the step, of the micro-batches of this process."""
        return range(self.rank, self.per_step // self.micro_batch, self.world_size)

    @property
    def passes(self) -> int:
        """Forward passes of every process in a step. Processes with fewer micro-batches add a zero-weight pass."""
        return -(-(self.per_step // self.micro_batch) // self.world_size)


class MicroBatch(NamedTuple):
    """The samples of one process for one pass."""

    keys: list[Key]
    cursor: Cursor
    """Changed entries of the cursor."""
    counters: Mapping[str, tuple[float, float]] = {}
    """Sum and count of each mean "data/NAME" in the next score row, with the same names in all micro-batches of a
    step."""


class Order(Protocol):
    """Maps optimizer steps to samples, independent of the number of processes and of restarts."""

    def micro_batches(self, first_step: int, share: RankShare, cursor: Cursor) -> Iterator[MicroBatch]:
        """Yield the micro-batches of `share`, starting with the step after `first_step` finished steps, endlessly.

        cursor: complete cursor after `first_step` steps; {} at the start of a training.
        """
        ...

    def describe(self, step: int, cursor: Cursor) -> Mapping[str, Any]:
        """Describe the position after `step` finished steps, as JSON values for people."""
        ...


@runtime_checkable
class WholeSkips(Order, Protocol):
    """An order that can skip only certain numbers of steps."""

    def whole_skip(self, step: int, least: int) -> int:
        """The smallest number of steps, at least `least`, that a branch from `step` can skip."""
        ...

    def begin_before(self, step: int) -> int:
        """Finished steps at the start of the iteration before that of step number `step`; 0 in the first iteration."""
        ...


@runtime_checkable
class OrderedDataset(Dataset, Protocol):
    """A data set with its own order: the samples of a step do not depend only on the step's number."""

    def order(self, seed: int, per_step: int, steps: int, branches: Sequence[Branch]) -> Order:
        """The order of a training of `steps` steps of `per_step` sequences. branches: its rewinds, oldest first.

        Raises:
            UserError: the data set does not support such a training.
        """
        ...


class ReadAhead(Protocol):
    """Fetches files before a training reads them."""

    def advance(self, cursor: Cursor) -> None:
        """Mark everything before this cursor as read."""
        ...

    def close(self) -> None:
        """Stop fetching."""
        ...


@runtime_checkable
class ReadAheadDataset(Dataset, Protocol):
    """A data set with files that can be fetched before they are read."""

    def read_ahead(self, order: Order, share: RankShare) -> ReadAhead | None:
        """Start to fetch this process's share; None if all files are local."""
        ...


class ShuffledConfig(DatasetConfig):
    """Data with permutations of an index as training epochs."""

    shuffle: Shuffle = "numpy"
    """How an epoch is permuted. numpy: each process has the complete permutation in memory, 8 bytes per sample.
    feistel: each position is computed on access, in microseconds and without memory."""


@runtime_checkable
class ShuffledDataset(Dataset, Protocol):
    """A data set made by a `ShuffledConfig`."""

    shuffle: Shuffle
    """See `ShuffledConfig.shuffle`."""


def require_own_order(config: DatasetConfig, field: str) -> None:
    """Raise ValueError if the data in `field` set `shuffle` although another data set determines their order."""
    if isinstance(config, ShuffledConfig) and config.shuffle != "numpy":
        raise ValueError(
            f"{field}.shuffle: ignored, as another data set determines the order of these data. Remove it."
        )


def order_of(
    dataset: Dataset, seed: int, per_step: int, steps: int, branches: Sequence[Branch] = (), group: int | None = None
) -> Order:
    """The order of a training: the data set's own order if it has one, else permutations of its indices.

    group: number of samples of similar length per group; None: no grouping by length.
    """
    if isinstance(dataset, OrderedDataset):
        return dataset.order(seed, per_step, steps, branches)
    if any(branch.deny_list for branch in branches):
        raise RunError(
            "deny list: only data streamed from tars can be denied. "
            "Undo it: python -m src.operations.interventions undo RUN."
        )
    shuffle = dataset.shuffle if isinstance(dataset, ShuffledDataset) else "numpy"
    order = IndexedOrder(seed, len(dataset), per_step, branches, shuffle)
    return order if group is None else GroupedOrder(order, cast(MeasuredDataset, dataset).length, group)


@dataclass(frozen=True)
class IndexedOrder:
    """Each epoch is a permutation of all indices. The samples of a step depend only on its number, so cursors are
    empty.

    "skip:K" of a branch skips the samples of K steps; "reshuffle" permutes the rest of the epoch again.
    """

    seed: int
    num_samples: int
    per_step: int
    branches: Sequence[Branch] = ()
    shuffle: Shuffle = "numpy"

    def micro_batches(self, first_step: int, share: RankShare, cursor: Cursor) -> Iterator[MicroBatch]:
        """See `Order`. A step reads the next `per_step` positions of `keys`."""
        read = self._key_reader()
        for step in count(first_step):
            for g in share.numbers:
                first = self.position(step) + g * share.micro_batch
                yield MicroBatch([read(position) for position in range(first, first + share.micro_batch)], {})

    def describe(self, step: int, cursor: Cursor) -> Mapping[str, Any]:
        """The epoch, and how many of its samples were read."""
        epoch, offset = divmod(self.position(step), self.num_samples)
        return {"epoch": epoch, "offset": offset}

    def keys(self, first: int = 0) -> Iterator[Key]:
        """Yield (epoch, index) from position `first` on, endlessly, with every index once per epoch."""
        return map(self._key_reader(), count(first))

    def position(self, step: int) -> int:
        """Position in `keys` after `step` finished steps."""
        return (
            step + sum(branch.skipped_steps for branch in self.branches if branch.from_step <= step)
        ) * self.per_step

    def _key_reader(self) -> Callable[[int], Key]:
        """A function from a position to its key."""
        if self.shuffle == "feistel":
            return self._feistel_key
        orders: dict[int, np.ndarray] = {}

        def read(position: int) -> Key:
            epoch, place = divmod(position, self.num_samples)
            if epoch not in orders:
                orders.clear()
                orders[epoch] = self._permutation(epoch)
            return epoch, int(orders[epoch][place])

        return read

    def _feistel_key(self, position: int) -> Key:
        epoch, place = divmod(position, self.num_samples)
        for first, number in reversed(self._reshuffles(epoch)):
            if place >= first:
                place = first + feistel_permute(
                    place - first, self.num_samples - first, f"{self.seed}/{epoch}/{number}"
                )
        return epoch, feistel_permute(place, self.num_samples, f"{self.seed}/{epoch}")

    def _permutation(self, epoch: int) -> "np.ndarray":
        """(num_samples,) int64: the indices of an epoch in reading order."""
        import numpy as np

        order = np.random.default_rng([self.seed, epoch]).permutation(self.num_samples)
        for first, number in self._reshuffles(epoch):
            order[first:] = np.random.default_rng([self.seed, epoch, number]).permutation(order[first:])
        return order

    def _reshuffles(self, epoch: int) -> list[tuple[int, int]]:
        """(position from which the epoch is permuted again, number of the branch); earlier positions do not change."""
        begins = [(divmod(self.position(branch.from_step), self.num_samples), branch) for branch in self.branches]
        return [
            (place, branch.number) for (start, place), branch in begins if start == epoch and branch.data == "reshuffle"
        ]


@dataclass(frozen=True)
class GroupedOrder:
    """An order that sorts samples by length in windows of `_WINDOW` steps and splits them into groups of similar
    length.

    The groups of a window are assigned to its steps at random, so a step reads short and long samples. Within a step
    they are sorted by length, so that all processes read samples of similar length at a time. The first step reads the
    longest samples of its window, so that an out-of-memory error happens at once. A window at the end of an epoch also
    has
    samples of the next epoch.
    """

    order: IndexedOrder
    length: Callable[[int, int], int]
    """Tokens of the sample of a key."""
    group: int
    """Samples per group; a divisor of the samples per step."""

    def __post_init__(self) -> None:
        if any(branch.data == "reshuffle" for branch in self.order.branches):
            raise RunError(
                "--data reshuffle: data grouped by length (loop.group_by_length) cannot be reshuffled. "
                "Skip steps instead: --data skip:K."
            )

    def micro_batches(self, first_step: int, share: RankShare, cursor: Cursor) -> Iterator[MicroBatch]:
        """See `Order`."""
        window, steps = -1, list[list[Key]]()
        for step in count(first_step):
            number, place = divmod(self.order.position(step) // self.order.per_step, _WINDOW)
            if number != window:
                window, steps = number, self._deal(number)
            for g in share.numbers:
                yield MicroBatch(steps[place][g * share.micro_batch : (g + 1) * share.micro_batch], {})

    def describe(self, step: int, cursor: Cursor) -> Mapping[str, Any]:
        """See `IndexedOrder.describe`."""
        return self.order.describe(step, cursor)

    def _deal(self, window: int) -> list[list[Key]]:
        """The keys of each step of a window."""
        size = _WINDOW * self.order.per_step
        keys = list(islice(self.order.keys(window * size), size))
        keys.sort(key=lambda key: -self.length(*key))  # stable
        groups = [range(first, first + self.group) for first in range(0, size, self.group)]
        random.Random(f"{self.order.seed}/{window}").shuffle(groups)
        if window == 0:
            longest = groups.index(range(self.group))
            groups[0], groups[longest] = groups[longest], groups[0]
        each = self.order.per_step // self.group
        steps = [
            sorted(groups[first : first + each], key=lambda places: places.start)
            for first in range(0, len(groups), each)
        ]
        return [[keys[place] for places in step for place in places] for step in steps]


def feistel_permute(position: int, size: int, key: str) -> int:
    """Map `position` by a permutation of 0..size-1 that depends on `key`, in constant memory.

    A Feistel network over the next power of 4, iterated until the result is below `size` (Black and Rogaway 2002,
    "Ciphers with arbitrary finite domains").
    """
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    while True:
        high, low = position >> half, position & mask
        for number in range(_ROUNDS):
            digest = blake2b(f"{key}/{number}/{low}".encode(), digest_size=8).digest()
            high, low = low, high ^ (int.from_bytes(digest, "little") & mask)
        position = high << half | low
        if position < size:
            return position
