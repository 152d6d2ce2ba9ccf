"""The order of samples in a mixture, computed on access without memory per sample."""

from bisect import bisect_right
from collections.abc import Sequence

_SLOT = 32
"""Samples sorted at once; at least the number of parts."""


def rates(examples: Sequence[float], cap: int | None, temperature: float) -> list[float]:
    """Shares of parts by their examples: r_m = min(e_m, K)^(1/T) over the sum (arXiv 1910.10683, section 3.5.2)."""
    weights = [min(count, cap or count) ** (1 / temperature) for count in examples]
    return [weight / sum(weights) for weight in weights]


def shares(weights: Sequence[float], total: int) -> list[int]:
    """Divide `total` samples in proportion to `weights`, by largest remainders."""
    quotas = [total * weight / sum(weights) for weight in weights]
    counts = [int(quota) for quota in quotas]
    by_remainder = sorted(range(len(quotas)), key=lambda part: (counts[part] - quotas[part], part))
    for part in by_remainder[: total - sum(counts)]:
        counts[part] += 1
    return counts


class Interleaving:
    """The order of an epoch with `counts[p]` samples of part p: sample k of part p is at time (k + 1/2) / counts[p] of
    0..1.

    Among any n consecutive samples each part has its share of n, to within one sample. Samples with equal times are in
    the order of the parts.
    """

    def __init__(self, counts: Sequence[int]) -> None:
        self.counts = counts
        self._total = sum(counts)
        self._slot = max(_SLOT, len(counts))
        self._slots = max(1, self._total // self._slot)
        self._recent: tuple[int, list[tuple[float, int, int]]] = (0, [])
        """The last sorted slot, cached because neighbors are read together."""

    def __len__(self) -> int:
        return self._total

    def place(self, index: int) -> tuple[int, int]:
        """The part of the sample at `index`, and its number among that part's samples of the epoch."""
        if not 0 <= index < self._total:
            raise IndexError(f"sample {index} of {self._total}")
        start, samples = self._recent
        if not start <= index < start + len(samples):
            start, samples = self._recent = self._sort_around(index)
        _, part, k = samples[index - start]
        return part, k

    def _sort_around(self, index: int) -> tuple[int, list[tuple[float, int, int]]]:
        """The slot of a sample: the index of its first sample, and (time, part, number) of each in order."""
        # A slot starts within parts / 2 samples.
        near, room = (
            index * self._slots // self._total,
            len(self.counts) // self._slot + 2,
        )
        slot = (
            bisect_right(range(self._slots), index, max(0, near - room), min(self._slots, near + room), key=self._start)
            - 1
        )
        first, last = self._before(slot), self._before(slot + 1)
        samples = [
            ((2 * k + 1) / (2 * count), part, k)
            for part, count in enumerate(self.counts)
            for k in range(first[part], last[part])
        ]  # fmt: skip
        samples.sort()
        return sum(first), samples

    def _start(self, slot: int) -> int:
        return sum(self._before(slot))

    def _before(self, slot: int) -> list[int]:
        """For each part, the number of samples k with (2k + 1) / (2 count) < slot / slots."""
        return [-((self._slots - 2 * count * slot) // (2 * self._slots)) for count in self.counts]
