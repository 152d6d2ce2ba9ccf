"""An order says which samples make each optimizer step of a training. Samples themselves are pure functions of their keys.

Where the samples of a step follow from its number alone (a permutation of an index), an order has no state. Otherwise (packed rows,
filtered streams, rollouts) its state is a cursor: JSON values that travel with each micro-batch and are saved in every checkpoint.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from src.interfaces import Dataset
from src.runs.history.branches import Branch

if TYPE_CHECKING:
    import numpy as np

Key = tuple[Any, ...]
"""The arguments of a data set's `sample`, as JSON values: (epoch, index) where it is indexed."""
Cursor = dict[str, Any]
"""State of an order as a JSON object. Each process changes entries of its own; all of them together are the state."""


@dataclass(frozen=True)
class RankShare:
    """How the sequences of one optimizer step are cut into micro-batches, and which of them this process reads.

    Micro-batch number g of a step goes to process g % world_size, so processes may get one more or one less than others.
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


class Order(Protocol):
    """Which samples make each optimizer step: the same for every number of processes and after every restart."""

    def micro_batches(self, first_step: int, share: RankShare, cursor: Cursor) -> Iterator[tuple[list[Key], Cursor]]:
        """Yield the keys of each micro-batch of `share`, from the step after `first_step` finished ones on, endlessly.

        Beside each: the entries of the cursor that it changes. cursor: all entries behind `first_step`; {} at the start of a training.
        """
        ...

    def describe(self, step: int, cursor: Cursor) -> Mapping[str, Any]:
        """Where the step after `step` finished ones begins to read, as JSON values for people."""
        ...


@runtime_checkable
class OrderedDataset(Dataset, Protocol):
    """A data set with an order of its own: what a step reads does not follow from the step's number."""

    def order(self, seed: int, per_step: int, steps: int, branches: Sequence[Branch]) -> Order:
        """The order of a training of `steps` steps of `per_step` sequences; `branches` are the rewinds that it went through, oldest first.

        Raises:
            UserError: no such training can read the data set.
        """
        ...


def order_of(dataset: Dataset, seed: int, per_step: int, steps: int, branches: Sequence[Branch] = ()) -> Order:
    """The order of a training: the data set's own if it has one, else permutations of its indices."""
    if isinstance(dataset, OrderedDataset):
        return dataset.order(seed, per_step, steps, branches)
    return IndexedOrder(seed, len(dataset), per_step, branches)


@dataclass(frozen=True)
class IndexedOrder:
    """Each epoch is a permutation of all indices. What a step reads follows from its number, so cursors are empty.

    "skip:K" of a branch passes over the samples of K steps; "reshuffle" permutes what is left of the epoch again.
    """

    seed: int
    num_samples: int
    per_step: int
    branches: Sequence[Branch] = ()

    def micro_batches(self, first_step: int, share: RankShare, cursor: Cursor) -> Iterator[tuple[list[Key], Cursor]]:
        """See `Order`. A step reads the next `per_step` positions of `keys`."""
        jumps = {branch.from_step for branch in self.branches if branch.skipped_steps}
        step, stream = first_step, self.keys(self.position(first_step))
        while True:
            if step in jumps:
                stream = self.keys(self.position(step))
            keys = list(islice(stream, self.per_step))
            for g in share.numbers:
                yield keys[g * share.micro_batch : (g + 1) * share.micro_batch], {}
            step += 1

    def describe(self, step: int, cursor: Cursor) -> Mapping[str, Any]:
        """The epoch, and how many of its samples were read."""
        epoch, offset = divmod(self.position(step), self.num_samples)
        return {"epoch": epoch, "offset": offset}

    def keys(self, first: int = 0) -> Iterator[Key]:
        """Yield (epoch, index) from position `first` on, for ever: in each epoch every index once."""
        epoch, offset = divmod(first, self.num_samples)
        while True:
            for index in self.permutation(epoch)[offset:]:
                yield epoch, int(index)
            epoch, offset = epoch + 1, 0

    def position(self, step: int) -> int:
        """Position in `keys` where the step after `step` finished ones begins to read."""
        return (step + sum(branch.skipped_steps for branch in self.branches if branch.from_step <= step)) * self.per_step

    def permutation(self, epoch: int) -> "np.ndarray":
        """(num_samples,) int64: the indices of an epoch in their order."""
        import numpy as np

        order = np.random.default_rng([self.seed, epoch]).permutation(self.num_samples)
        for branch in self.branches:
            if branch.data == "reshuffle":
                begins, offset = divmod(self.position(branch.from_step), self.num_samples)
                if begins == epoch:  # what was read before keeps its place
                    order[offset:] = np.random.default_rng([self.seed, epoch, branch.number]).permutation(order[offset:])
        return order
