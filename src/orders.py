"""An order says which samples make each optimizer step of a training. Samples themselves are pure functions of their keys.

Where the samples of a step follow from its number alone (a permutation of an index), an order has no state. Otherwise (packed rows,
filtered streams, rollouts) its state is a cursor: JSON values that travel with each micro-batch and are saved in every checkpoint.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

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
