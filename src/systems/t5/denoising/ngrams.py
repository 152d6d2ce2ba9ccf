"""Mask n-grams of a vocabulary and single words (PMI-masking, Levine et al. 2021, arXiv 2010.01825).

A row is split into units: the n-grams of the vocabulary that occur in it (the longest of overlapping ones, ties at
random), and single words. The numbers of masked runs and tokens are those of span corruption, so inputs and targets
have the same lengths. Each run starts at a unit drawn uniformly and grows by the units that follow, in random turns,
until enough tokens are masked. Runs can be adjacent; each has its own sentinel.

If the drawn units have too many tokens, some are exchanged at random for shorter ones. A unit is split only if complete
units cannot give the exact number of tokens.
"""

import hashlib
import re
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from src.errors import DataError
from src.files import reading
from src.systems.t5.denoising import noise

if TYPE_CHECKING:
    import numpy as np

    from src.systems.t5.denoising.words import Words

_WORD = re.compile(r"\w+|[^\w\s]")


class Vocabulary(NamedTuple):
    """N-grams in lower case, with the spaces between words as in text."""

    ngrams: frozenset[str]
    beginnings: frozenset[str]
    """All prefixes of n-grams that end with a word."""
    fingerprint: str
    """sha256 of the file."""


NO_NGRAMS = Vocabulary(frozenset(), frozenset(), "whole words")
"""Every word is a unit: whole-word masking."""


def require_file(path: Path) -> None:
    """Raises DataError if the file is missing."""
    if not path.is_file():
        raise DataError(
            f"{path}: no such file. data.ngrams must be a text file below --data_path with one n-gram per line."
        )


def read_vocabulary(path: Path) -> Vocabulary:
    """Read a text file with one n-gram per line.

    Raises:
        DataError: the file is missing, empty or not UTF-8, or a line has fewer than two words.
    """
    require_file(path)
    with reading(path, DataError):
        content = path.read_bytes()
    ngrams, beginnings = set(), set()
    for number, line in enumerate(content.splitlines(), 1):
        try:
            text = " ".join(line.decode().lower().split())
        except UnicodeDecodeError as error:
            raise DataError(f"{path}:{number}: not UTF-8 ({error.reason}). Save it as UTF-8.") from None
        ends = [word.end() for word in _WORD.finditer(text)]
        if len(ends) < 2:
            raise DataError(f"{path}:{number}: expected an n-gram of two or more words, got {text!r}.")
        ngrams.add(text)
        beginnings.update(text[:end] for end in ends)
    if not ngrams:
        raise DataError(f"{path}: empty. Expected one n-gram of words per line.")
    return Vocabulary(frozenset(ngrams), frozenset(beginnings), hashlib.sha256(content).hexdigest())


class Ngrams:
    """Masks units of a row. The lengths of rows, inputs and targets are those of span corruption."""

    def __init__(
        self, words: "Words", vocabulary: Vocabulary, shares: tuple[float, float], sentinels: "np.ndarray", eos_id: int
    ) -> None:
        """shares: noise density and mean span."""
        self._words, self._vocabulary, self._shares = words, vocabulary, shares
        self._sentinels, self._eos_id = sentinels, eos_id

    def __call__(self, row: "np.ndarray", rng: "np.random.Generator") -> "tuple[np.ndarray, np.ndarray]":
        """(inputs, targets) of a row."""
        mask, starts = self.draw_mask(row, rng)
        return noise.corrupt(row, mask, starts, self._sentinels, self._eos_id)

    def draw_mask(self, row: "np.ndarray", rng: "np.random.Generator") -> "tuple[np.ndarray, np.ndarray]":
        """(mask, starts), each (length,) bool: True on masked tokens, and on the first token of each masked run."""
        import numpy as np

        counts = noise.counts(len(row), *self._shares)
        first, sizes = self.units(row, rng)
        if sizes.sum() < counts.noise:  # almost only control tokens
            first, sizes = np.arange(len(row)), np.ones(len(row), dtype=np.int64)
        first, sizes = split_longest(counts.spans, first, sizes)
        begin = draw_first_units(sizes, counts, rng)
        sizes[begin] = shorten(sizes[begin], counts.noise)
        is_masked, heads = extend_runs(first, sizes, begin, counts.noise, rng)
        starts = np.zeros(len(row), dtype=bool)
        starts[first[heads]] = True
        first, sizes = first[is_masked], sizes[is_masked]
        within = np.arange(sizes.sum()) - (sizes.cumsum() - sizes).repeat(sizes)
        mask = np.zeros(len(row), dtype=bool)
        mask[first.repeat(sizes) + within] = True
        grow(mask, starts, self._words.control[row], counts.noise - len(within))
        return mask, starts

    def units(self, row: "np.ndarray", rng: "np.random.Generator") -> "tuple[np.ndarray, np.ndarray]":
        """(first token, number of tokens) of each unit of a row in order, each (units,) int64.
        Control tokens are not part of units, and end n-grams."""
        import numpy as np

        bounds = np.append(self._words.starts(row).nonzero()[0], len(row))
        words = self._words.word_texts(row, bounds)
        is_joined = np.zeros(len(words), dtype=bool)  # with the previous word
        is_in_ngram = np.zeros(len(words), dtype=bool)  # already part of an n-gram
        for first, last in self._find_ngrams(words, rng):
            if not is_in_ngram[first:last].any():
                is_in_ngram[first:last] = True
                is_joined[first + 1 : last] = True
        begins = bounds[:-1][~is_joined]
        sizes = np.diff(np.append(begins, len(row)))
        real = ~self._words.control[row[begins]]
        return begins[real], sizes[real]

    def _find_ngrams(self, words: list[str], rng: "np.random.Generator") -> list[tuple[int, int]]:
        """(first word, last word + 1) of all n-grams in the row, longest first, and in random order if equally long."""
        matches, (ngrams, beginnings, _) = [], self._vocabulary
        likely = [first for first, word in enumerate(words) if word.lstrip() in beginnings]
        for first in likely:
            text = words[first].lstrip()
            for last in range(first + 1, len(words)):
                if not words[last]:
                    break
                text += words[last]
                if text not in beginnings:
                    break
                if text in ngrams:
                    matches.append((first, last + 1))
        order = rng.permutation(len(matches)).tolist()
        return sorted((matches[i] for i in order), key=lambda place: place[0] - place[1])


def split_longest(spans: int, first: "np.ndarray", sizes: "np.ndarray") -> "tuple[np.ndarray, np.ndarray]":
    """Halve the longest unit until there are at least `spans`."""
    import numpy as np

    while len(sizes) < spans:
        longest = int(sizes.argmax())
        half = int(sizes[longest]) // 2
        first = np.insert(first, longest + 1, first[longest] + sizes[longest] - half)
        sizes = np.insert(sizes, longest + 1, half)
        sizes[longest] -= half
    return first, sizes


def draw_first_units(sizes: "np.ndarray", counts: noise.Counts, rng: "np.random.Generator") -> "np.ndarray":
    """Draw the units that start runs, (spans,) int64, in random order.
    If possible, exchanges units until they have at most `counts.noise` tokens."""
    import numpy as np

    order = rng.permutation(len(sizes))
    excess = int(sizes[order[: counts.spans]].sum()) - counts.noise
    has_changed = True
    while excess > 0 and has_changed:
        has_changed = False
        for place in range(counts.spans):
            shorter = np.flatnonzero(sizes[order[counts.spans :]] < sizes[order[place]])
            if excess > 0 and len(shorter):
                other = counts.spans + shorter[rng.integers(len(shorter))]
                excess -= int(sizes[order[place]] - sizes[order[other]])
                order[[place, other]] = order[[other, place]]
                has_changed = True
    return order[: counts.spans]


def extend_runs(
    first: "np.ndarray", sizes: "np.ndarray", begin: "np.ndarray", tokens: int, rng: "np.random.Generator"
) -> "tuple[np.ndarray, list[int]]":
    """Extend the runs that start with these units, first to the right, then to the left, up to `tokens` tokens.

    Returns (units,) bool, True on all units of runs, and the first unit of each run.
    """
    import numpy as np

    adjacent = (first[1:] == first[:-1] + sizes[:-1]).tolist()  # unit i and unit i + 1
    lengths, is_taken = sizes.tolist(), [False] * len(sizes)
    for unit in begin.tolist():
        is_taken[unit] = True
    remaining = tokens - int(sizes[begin].sum())

    def free(unit: int, step: int) -> bool:
        """Whether the neighbouring unit is free and short enough."""
        neighbor = unit + step
        return (
            0 <= neighbor < len(is_taken)
            and adjacent[min(unit, neighbor)]
            and not is_taken[neighbor]
            and lengths[neighbor] <= remaining
        )

    def walk(step: int) -> list[int]:
        """Extend runs in one direction; returns the last unit of each."""
        nonlocal remaining
        active, done = begin.tolist(), []
        draws = rng.random(remaining + len(active)).tolist()  # each takes a unit or ends a run
        while active and remaining:
            place = int(draws.pop() * len(active))
            if free(active[place], step):
                active[place] += step
                is_taken[active[place]] = True
                remaining -= lengths[active[place]]
            else:
                done.append(active[place])
                active[place] = active[-1]
                active.pop()
        return done + active

    walk(1)
    heads = walk(-1)
    return np.array(is_taken), heads


def shorten(sizes: "np.ndarray", tokens: int) -> "np.ndarray":
    """Shrink the largest of `sizes`, one token at a time, until they sum to at most `tokens`."""
    for _ in range(int(sizes.sum()) - tokens):
        sizes[sizes.argmax()] -= 1
    return sizes


def grow(mask: "np.ndarray", starts: "np.ndarray", control: "np.ndarray", tokens: int) -> None:
    """Mask `tokens` more tokens: each time the token after a masked one, preferably not a control token, or if there is
    no such token the one before."""
    import numpy as np

    for _ in range(tokens):
        after = np.flatnonzero(mask[:-1] & ~mask[1:]) + 1
        if len(after):
            mask[after[control[after].argmin()]] = True
        else:
            begin = int(mask.argmax())  # all tokens from here are masked
            mask[begin - 1] = starts[begin - 1] = True
            starts[begin] = False
