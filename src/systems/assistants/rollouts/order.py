"""The order of rollouts: each iteration fills a buffer, and steps read it in one random permutation per pass."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import count
from typing import TYPE_CHECKING, Any

from src.data.orders import Cursor, IndexedOrder, MicroBatch, RankShare
from src.errors import RunError
from src.runs.history.branches import Branch

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True)
class RolloutOrder:
    """Maps steps to keys (iteration, row of its buffer).

    Prompts, rows and permutations are functions of the step number. All other state, such as the KL weight, is in the
    cursor: `roll_out` gets its entries and returns the changed ones, the same on every process.
    """

    seed: int
    rows: int
    """Number of rollouts per iteration: a multiple of `per_step`."""
    per_step: int
    passes: int
    """Number of times that each rollout is read."""
    roll_out: Callable[[int, int, Cursor], Cursor]
    """(finished steps, iteration, cursor) -> changed entries of the cursor. Fills the buffer. Collective."""
    is_filled: Callable[[int], bool]
    """Whether the buffer has the rollouts of an iteration."""
    branches: Sequence[Branch] = ()

    def __post_init__(self) -> None:
        for branch in self.branches:
            if branch.data == "reshuffle":
                raise RunError("reshuffle: rollouts come from the policy, so they cannot be reshuffled. Use skip:K.")
            ends = self.position(branch.from_step)
            if branch.skips and ends % self.steps:
                more = self.steps - ends % self.steps
                raise RunError(
                    f"skip:{branch.skipped_steps} from step {branch.from_step} "
                    f"ends in the middle of an iteration of {self.steps} steps, and its rollouts are not saved. "
                    f"Undo the rewind, and skip {branch.skipped_steps + more} steps."
                )

    @property
    def steps(self) -> int:
        """Number of steps per iteration."""
        return self.passes * self.rows // self.per_step

    def position(self, step: int) -> int:
        """Position in the data after `step` finished steps, counted in steps and including skipped ones."""
        return step + sum(branch.skipped_steps for branch in self.branches if branch.from_step <= step)

    def micro_batches(self, first_step: int, share: RankShare, cursor: Cursor) -> Iterator[MicroBatch]:
        """See `orders.Order`. Calls `roll_out` at the start of each iteration.

        Raises:
            RunError: the first step is in the middle of an iteration that is not in the buffer.
        """
        state = dict(cursor)
        for step in count(first_step):
            iteration, place = divmod(self.position(step), self.steps)
            if place == 0:
                state |= self.roll_out(step, iteration, dict(state))
            elif not self.is_filled(iteration):
                raise RunError(
                    f"step {step + 1} needs rollouts of iteration {iteration + 1}, missing from the checkpoint of step "
                    f"{step}. Rewind to step {max(0, step - place)}, the start of the iteration, or start over with "
                    "-r 1."
                )
            rows = self.permutation(iteration, place * self.per_step // self.rows)
            first = place * self.per_step % self.rows
            for g in share.numbers:
                batch_rows = rows[first + g * share.micro_batch : first + (g + 1) * share.micro_batch]
                yield MicroBatch([(iteration, int(row)) for row in batch_rows], dict(state))

    def permutation(self, iteration: int, number: int) -> "np.ndarray":
        """(rows,) int64: the rows of a buffer in the order of pass `number`."""
        return _permutation(self.seed, iteration, number, self.rows)

    def describe(self, step: int, cursor: Cursor) -> Mapping[str, Any]:
        """The iteration, the number of its finished steps, and the cursor."""
        iteration, place = divmod(self.position(step), self.steps)
        return {"iteration": iteration, "steps_of_iteration": place, **cursor}

    def begin_before(self, step: int) -> int:
        """See `orders.WholeSkips`."""
        return max(0, step - 1 - self.position(step - 1) % self.steps - self.steps)

    def whole_skip(self, step: int, least: int) -> int:
        """The smallest number of steps, at least `least`, that a branch from `step` can skip."""
        ends = self.position(step) + least
        return least + -ends % self.steps


@lru_cache(maxsize=4)
def _permutation(seed: int, iteration: int, number: int, rows: int) -> "np.ndarray":
    import numpy as np

    return np.random.default_rng([seed, iteration, number, 2]).permutation(rows)


def prompt_numbers(seed: int, prompts: int, iteration: int, per_iteration: int) -> list[int]:
    """The prompts of an iteration. Every epoch of prompts has its own random order and contains each prompt once."""
    keys = IndexedOrder(seed, prompts, per_iteration).keys(iteration * per_iteration)
    return [next(keys)[1] for _ in range(per_iteration)]
