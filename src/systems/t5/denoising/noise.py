"""Noise masks, sentinels and lengths of T5's span corruption (Raffel et al. 2020, arXiv 1910.10683, section 3.1.4).

Counts, and random draws and their order, equal Google's text-to-text-transfer-transformer (t5/data/preprocessors.py).
"""

from typing import TYPE_CHECKING, NamedTuple

from src.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np

    Random = np.random.Generator | np.random.RandomState


class Counts(NamedTuple):
    """Numbers of masked tokens, masked runs and unmasked tokens of a row, as functions of its length."""

    noise: int
    spans: int
    keep: int

    @property
    def input_tokens(self) -> int:
        """Unmasked tokens, a sentinel for each run, and the end token."""
        return self.keep + self.spans + 1

    @property
    def target_tokens(self) -> int:
        """Masked tokens, a sentinel before each run, and the end token."""
        return self.noise + self.spans + 1


def counts(length: int, density: float, mean_span: float) -> Counts:
    """Counts of a row of `length` tokens, rounded half to even.
    Density 0 masks nothing; any other masks at least one token.

    Raises:
        ConfigError: there are too few unmasked tokens to separate the runs, or a value is out of range.
    """
    if not 0 <= density < 1 or mean_span < 1:
        raise ConfigError(f"expected 0 <= noise density < 1 and a mean span >= 1; got {density} and {mean_span}.")
    length = max(length, 2)
    if density == 0:
        return Counts(0, 0, length)
    noise = min(max(round(length * density), 1), length - 1)
    spans, keep = max(round(noise / mean_span), 1), length - noise
    if spans > keep:
        raise ConfigError(
            f"masking {noise} of {length} tokens in {spans} runs leaves {keep} tokens, too few to separate the runs. "
            "Use a smaller noise density or a longer mean span."
        )
    return Counts(noise, spans, keep)


def lengths(inputs: int, density: float, mean_span: float) -> tuple[int, int]:
    """(raw tokens of a row, tokens of its targets) of the longest row with corrupted inputs of at most `inputs` tokens.

    Includes end tokens. Follows `random_spans_helper` in Google's file, which starts at inputs - 1. Implementations
    that start at `inputs` give one token too many for spans of one token.
    """

    def lengths(raw: int) -> tuple[int, int]:
        noise = round(raw * density)
        spans = round(noise / mean_span)
        return raw - noise + spans + 1, noise + spans + 1

    raw = inputs - 1
    while lengths(raw + 1)[0] <= inputs:
        raw += 1
    targets = lengths(raw)[1]
    if density == 0.5 and targets > inputs:
        raw, targets = raw - 1, targets - 1
    return raw, targets


def longest_row(inputs: int, density: float, mean_span: float) -> tuple[int, Counts]:
    """(tokens, counts) of the longest row with corrupted inputs of at most `inputs` tokens.

    Follows `lengths`, so at density 0.5 the row can be one token shorter than the maximum. If `lengths` masks no token,
    the row is shortened, as at least one token is always masked.

    Raises:
        ConfigError: there is no such row.
    """
    raw, _ = lengths(inputs, density, mean_span)
    while raw >= 2:
        row_counts = counts(raw, density, mean_span)
        if row_counts.input_tokens <= inputs:
            return raw, row_counts
        raw -= 1
    raise ConfigError(f"{inputs} input tokens are too few for a row with a masked token. Use more.")


def exact_lengths(inputs: int, density: float, mean_span: float) -> tuple[int, Counts]:
    """(tokens, counts) of the row of `lengths`, which must have corrupted inputs of exactly `inputs` tokens.

    Raises:
        ConfigError: there is no such row.
    """
    raw, targets = lengths(inputs, density, mean_span)
    row_counts = counts(raw, density, mean_span)
    if raw < 2 or (row_counts.input_tokens, row_counts.target_tokens) != (inputs, targets):
        raise ConfigError(
            f"no row of tokens gives exactly {inputs} input tokens at "
            f"noise density {density} and mean span {mean_span}. Use more input tokens or a higher density."
        )
    return raw, row_counts


def composition(items: int, parts: int, rng: "Random") -> "np.ndarray":
    """(parts,) int64: sizes of at least 1 that sum to `items`, drawn uniformly."""
    import numpy as np

    gaps = np.zeros(items - 1, dtype=bool)
    gaps[: parts - 1] = True
    rng.shuffle(gaps)
    bounds = np.empty(parts + 1, dtype=np.int64)
    bounds[0], bounds[-1] = 0, items
    bounds[1:-1] = gaps.nonzero()[0] + 1
    return bounds[1:] - bounds[:-1]


def noise_mask(length: int, density: float, mean_span: float, rng: "Random", roll: bool = False) -> "np.ndarray":
    """(length,) bool, True on tokens to mask.
    Drawn uniformly from the masks that start with an unmasked token and end with a masked one.

    roll: rotate the mask by a random number of positions, so that it can start and end with either.

    Raises:
        ConfigError: see `counts`.
    """
    import numpy as np

    row_counts = counts(length, density, mean_span)
    if not row_counts.noise:
        return np.zeros(length, dtype=bool)
    runs = np.empty(2 * row_counts.spans, dtype=np.int64)
    runs[1::2] = composition(
        row_counts.noise, row_counts.spans, rng
    )  # before the unmasked runs: the order affects seeded draws
    runs[::2] = composition(row_counts.keep, row_counts.spans, rng)
    alternating = np.zeros(2 * row_counts.spans, dtype=bool)
    alternating[1::2] = True
    mask = alternating.repeat(runs)[:length]
    return np.roll(mask, int(rng.uniform(0, length))) if roll else mask


def run_starts(mask: "np.ndarray") -> "np.ndarray":
    """(length,) bool, True on the first token of each run of `mask`."""
    starts = mask.copy()
    starts[1:] &= ~mask[:-1]
    return starts


def corrupt(
    ids: "np.ndarray", mask: "np.ndarray", starts: "np.ndarray", sentinels: "np.ndarray", eos_id: int
) -> "tuple[np.ndarray, np.ndarray]":
    """(inputs, targets) of a row, each with the end token `eos_id`.

    Inputs are the row with each masked run replaced by a sentinel. Targets are the masked runs, each after its
    sentinel. Sentinels are used in order. For masks that start with an unmasked token this equals Google's code, where
    targets are the row with each unmasked run replaced by a sentinel.

    ids: (length,). mask: (length,) bool, True on masked tokens. starts: (length,) bool, True on the first token of each
    masked run; runs can be adjacent. sentinels: at least one per run.
    """
    import numpy as np

    row = ids.copy()
    first = starts[mask]
    place = first.cumsum()
    spans = int(place[-1]) if len(place) else 0
    row[starts] = sentinels[:spans]
    kept_ids = row[starts | ~mask]
    inputs = np.empty(len(kept_ids) + 1, dtype=ids.dtype)
    inputs[:-1], inputs[-1] = kept_ids, eos_id
    place += np.arange(len(first))
    targets = np.empty(len(first) + spans + 1, dtype=ids.dtype)
    targets[place] = ids[mask]
    targets[place[first] - 1] = sentinels[:spans]
    targets[-1] = eos_id
    return inputs, targets
