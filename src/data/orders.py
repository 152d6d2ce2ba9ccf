"""An order maps the optimizer steps of a training to sample keys. Samples are pure functions of their keys.

An order has no state if the samples of a step depend only on its number, as in a permutation of an index. Packed rows,
filtered streams
and rollouts have a state, the cursor: JSON values that travel with each micro-batch and are saved in every checkpoint.
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
"""The arguments of a data set's `sample`, as JSON values: (epoch, index) where it is indexed."""
Cursor = dict[str, Any]
"""State of an order as a JSON object. Each process changes entries of its own; all of them together are the state."""


Shuffle = Literal["numpy", "feistel"]
_ROUNDS = 4
_WINDOW = 50
"""Steps per window in which samples are sorted by length."""


@dataclass(frozen=True)
class RankShare:
    """How the sequences of one optimizer step are cut into micro-batches, and which of them this process reads.

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
        """Forward passes of every process in a step: those with fewer micro-batches make one that counts nothing."""
        return -(-(self.per_step // self.micro_batch) // self.world_size)


class MicroBatch(NamedTuple):
    """The samples of one process for one pass."""

    keys: list[Key]
    cursor: Cursor
    """The entries of the cursor that it changes."""
    counters: Mapping[str, tuple[float, float]] = {}
    """Sum and count of each mean "data/NAME" in the next score row; the same names in all micro-batches of a step."""


class Order(Protocol):
    """Which samples make each optimizer step: the same for every number of processes and after every restart."""

    def micro_batches(self, first_step: int, share: RankShare, cursor: Cursor) -> Iterator[MicroBatch]:
        """Yield each micro-batch of `share`, from the step after `first_step` finished ones on, endlessly.

        cursor: all entries after `first_step`; {} at the start of a training.
        """
        ...

    def describe(self, step: int, cursor: Cursor) -> Mapping[str, Any]:
        """Where the step after `step` finished ones starts to read, as JSON values for people."""
        ...


@runtime_checkable
class WholeSkips(Order, Protocol):
    """An order of which not any number of steps can be passed over."""

    def whole_skip(self, step: int, least: int) -> int:
        """The smallest number of steps from `least` on that a branch from `step` can pass over."""
        ...

    def begin_before(self, step: int) -> int:
        """Finished steps at the start of the previous iteration, seen from step number `step`; 0 in the first."""
        ...


@runtime_checkable
class OrderedDataset(Dataset, Protocol):
    """A data set with its own order: the samples of a step do not depend only on the step's number."""

    def order(self, seed: int, per_step: int, steps: int, branches: Sequence[Branch]) -> Order:
        """The order of a training of `steps` steps of `per_step` sequences;
        `branches` are the rewinds that it went through, oldest first.

        Raises:
            UserError: no such training can read the data set.
        """
        ...


class ReadAhead(Protocol):
    """Fetches files before a training reads them."""

    def advance(self, cursor: Cursor) -> None:
        """Take note that everything before this cursor was read."""
        ...

    def close(self) -> None:
        """Stop fetching."""
        ...


@runtime_checkable
class ReadAheadDataset(Dataset, Protocol):
    """A data set with files that can be fetched before they are read."""

    def read_ahead(self, order: Order, share: RankShare) -> ReadAhead | None:
        """The fetcher for this process's share; None if all files are local."""
        ...


class ShuffledConfig(DatasetConfig):
    """Data with permutations of an index as training epochs."""

    shuffle: Shuffle = "numpy"
    """How an epoch is permuted. numpy: each process holds the complete permutation, 8 bytes per sample. feistel: each
    place is computed on access, in microseconds and without memory."""


@runtime_checkable
class ShuffledDataset(Dataset, Protocol):
    """A data set made by a `ShuffledConfig`."""

    shuffle: Shuffle
    """That of the config."""


def require_own_order(config: DatasetConfig, field: str) -> None:
    """Raises ValueError where the data in `field`, which are read in the order of another data set, ask for one."""
    if isinstance(config, ShuffledConfig) and config.shuffle != "numpy":
        raise ValueError(
            f"{field}.shuffle: would be ignored, as these data are not read in an order of their own. Leave it out."
        )


def order_of(
    dataset: Dataset, seed: int, per_step: int, steps: int, branches: Sequence[Branch] = (), group: int | None = None
) -> Order:
    """The order of a training: the data set's own if it has one, else permutations of its indices.

    group: samples of like lengths that stay together; None: lengths do not matter.
    """
    if isinstance(dataset, OrderedDataset):
        return dataset.order(seed, per_step, steps, branches)
    if any(branch.denied for branch in branches):
        raise RunError("a deny list is for data that are streamed from tars, and these are not. Undo it.")
    shuffle = dataset.shuffle if isinstance(dataset, ShuffledDataset) else "numpy"
    order = IndexedOrder(seed, len(dataset), per_step, branches, shuffle)
    return order if group is None else GroupedOrder(order, cast(MeasuredDataset, dataset).length, group)


@dataclass(frozen=True)
class IndexedOrder:
    """Each epoch is a permutation of all indices.
    The samples of a step depend only on its number, so cursors are empty.

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
        """Yield (epoch, index) from position `first` on, for ever: in each epoch every index once."""
        return map(self._key_reader(), count(first))

    def position(self, step: int) -> int:
        """Position in `keys` where the step after `step` finished ones starts to read."""
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
        """(num_samples,) int64: the indices of an epoch in their order."""
        import numpy as np

        order = np.random.default_rng([self.seed, epoch]).permutation(self.num_samples)
        for first, number in self._reshuffles(epoch):
            order[first:] = np.random.default_rng([self.seed, epoch, number]).permutation(order[first:])
        return order

    def _reshuffles(self, epoch: int) -> list[tuple[int, int]]:
        """(place from which the epoch is permuted again, number of the branch); earlier places do not change."""
        begins = [(divmod(self.position(branch.from_step), self.num_samples), branch) for branch in self.branches]
        return [
            (place, branch.number) for (start, place), branch in begins if start == epoch and branch.data == "reshuffle"
        ]


@dataclass(frozen=True)
class GroupedOrder:
    """An order that sorts samples by length in windows of `_WINDOW` steps and cuts them into groups that stay together.

    The groups of a window are dealt to its steps at random, so a step reads short and long samples. Within a step they
    are sorted by length, so that processes have samples of similar length at a time. The first step reads the longest
    samples of its window, so that samples that do not fit in memory fail at once. Near the end of an epoch a window has
    samples of the next one.
    """

    order: IndexedOrder
    length: Callable[[int, int], int]
    """Tokens of the sample of a key."""
    group: int
    """Samples of a group; a divisor of the samples of a step."""

    def __post_init__(self) -> None:
        if any(branch.data == "reshuffle" for branch in self.order.branches):
            raise RunError(
                "data that are grouped by length cannot be permuted again (reshuffle). Pass over steps instead: skip:K."
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
        """As without groups: how much was read."""
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
    """Image of `position` under a permutation of 0..size-1 that depends on `key`, computed in constant memory.

    A Feistel network over the next power of 4, walked until it is back below `size` (Black and Rogaway 2002, "Ciphers
    with arbitrary finite domains").
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
