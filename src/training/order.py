"""Which sample is read when: a pure function of (seed, step), the same for every world size and after every restart."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Share:
    """How the sequences of one optimizer step are cut into micro-batches, and which of them this process takes."""

    per_step: int
    micro_batch: int
    rank: int
    world_size: int


def samples(seed: int, num_samples: int, first: int) -> Iterator[tuple[int, int]]:
    """Yield (epoch, index) from position `first` on, for ever. Each epoch is a permutation of its own: every sample once."""
    epoch, offset = divmod(first, num_samples)
    while True:
        permutation = np.random.default_rng([seed, epoch]).permutation(num_samples)
        for index in permutation[offset:]:
            yield epoch, int(index)
        epoch, offset = epoch + 1, 0


def micro_batches(seed: int, num_samples: int, first_step: int, share: Share) -> Iterator[list[tuple[int, int]]]:
    """Yield the micro-batches of one process from `first_step` on, as lists of (epoch, index).

    A step reads the next `share.per_step` positions. They are cut into micro-batches; number g goes to process g % world_size.
    """
    stream = samples(seed, num_samples, first_step * share.per_step)
    while True:
        step = [next(stream) for _ in range(share.per_step)]
        for g in range(share.rank, share.per_step // share.micro_batch, share.world_size):
            yield step[g * share.micro_batch : (g + 1) * share.micro_batch]


def noise_seed(seed: int, step: int, micro_batch: int) -> int:
    """Seed of the dropout of one micro-batch (its number within the step over all processes): 63 bits."""
    return int(np.random.SeedSequence([seed, step, micro_batch]).generate_state(1, np.uint64)[0] >> 1)
