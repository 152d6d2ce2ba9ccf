"""Which sample is read when: a pure function of (seed, step, branches), the same for every world size and after every restart."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from src.interfaces import Dataset
from src.orders import Cursor, Key, Order, RankShare
from src.runs.history.branches import Branch

Reshuffles = Mapping[int, Sequence[tuple[int, int]]]
"""Epoch -> (offset, branch number): from this offset on the epoch comes in another order. In the order in which they happened."""


@runtime_checkable
class OrderedDataset(Dataset, Protocol):
    """A data set with an order of its own: what a step reads does not follow from the step's number."""

    def order(self, seed: int, per_step: int, branches: Sequence[Branch]) -> Order:
        """The order of a training of `per_step` sequences a step; `branches` are the rewinds that it went through, oldest first."""
        ...


def order_of(dataset: Dataset, seed: int, per_step: int, branches: Sequence[Branch] = ()) -> Order:
    """The order of a training: the data set's own if it has one, else permutations of its indices."""
    if isinstance(dataset, OrderedDataset):
        return dataset.order(seed, per_step, branches)
    return IndexedOrder(seed, len(dataset), per_step, branches)


@dataclass(frozen=True)
class IndexedOrder:
    """Each epoch is a permutation of all indices. What a step reads follows from its number, so cursors are empty."""

    seed: int
    num_samples: int
    per_step: int
    branches: Sequence[Branch] = ()

    def micro_batches(self, first_step: int, share: RankShare, cursor: Cursor) -> Iterator[tuple[list[Key], Cursor]]:
        """See `orders.Order`. A step reads the next `share.per_step` positions of `samples`."""
        for keys in micro_batches(self.seed, self.num_samples, first_step, share, self.branches):
            yield list(keys), {}

    def describe(self, step: int, cursor: Cursor) -> Mapping[str, Any]:
        """The epoch, and how many of its samples were read."""
        epoch, offset = divmod(position(step, self.per_step, self.branches), self.num_samples)
        return {"epoch": epoch, "offset": offset}


def samples(seed: int, num_samples: int, first: int, reshuffles: Reshuffles | None = None) -> Iterator[tuple[int, int]]:
    """Yield (epoch, index) from position `first` on, for ever. Each epoch is a permutation of its own: every sample once."""
    epoch, offset = divmod(first, num_samples)
    while True:
        for index in permutation(seed, num_samples, epoch, (reshuffles or {}).get(epoch, ()))[offset:]:
            yield epoch, int(index)
        epoch, offset = epoch + 1, 0


def permutation(seed: int, num_samples: int, epoch: int, reshuffled: Sequence[tuple[int, int]] = ()) -> NDArray[np.int64]:
    """The order of one epoch. For each offset in `reshuffled`, samples before it keep their places and the rest is permuted again."""
    order = np.random.default_rng([seed, epoch]).permutation(num_samples)
    for offset, number in reshuffled:
        order[offset:] = np.random.default_rng([seed, epoch, number]).permutation(order[offset:])
    return order


def position(step: int, per_step: int, branches: Sequence[Branch] = ()) -> int:
    """Position in the stream of `samples` where the step after `step` finished steps begins to read."""
    skipped = sum(branch.skipped_steps for branch in branches if branch.from_step <= step)
    return (step + skipped) * per_step


def reshuffles(num_samples: int, per_step: int, branches: Sequence[Branch]) -> dict[int, list[tuple[int, int]]]:
    """Reshuffles by epoch, from the branches that begin in it. A branch that begins at the start of an epoch reorders all of it."""
    found: dict[int, list[tuple[int, int]]] = {}
    for branch in branches:
        if branch.data == "reshuffle":
            epoch, offset = divmod(position(branch.from_step, per_step, branches), num_samples)
            found.setdefault(epoch, []).append((offset, branch.number))
    return found


def micro_batches(
    seed: int, num_samples: int, first_step: int, share: RankShare, branches: Sequence[Branch] = ()
) -> Iterator[list[tuple[int, int]]]:
    """Yield the micro-batches of one process from `first_step` on, as lists of (epoch, index).

    A step reads the next `share.per_step` positions. They are cut into micro-batches; number g goes to process g % world_size.
    """
    reordered = reshuffles(num_samples, share.per_step, branches)
    jumps = {branch.from_step for branch in branches if branch.skipped_steps}
    step, stream = first_step, iter(())
    while True:
        if step == first_step or step in jumps:
            stream = samples(seed, num_samples, position(step, share.per_step, branches), reordered)
        keys = [next(stream) for _ in range(share.per_step)]
        for g in share.numbers:
            yield keys[g * share.micro_batch : (g + 1) * share.micro_batch]
        step += 1
