"""Distinct encoder inputs of a prepared corpus, in batches of similar length."""

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from src import files
from src.data import jsonl
from src.errors import DataError
from src.evaluation.metrics import answers
from src.systems.crossattn.data import encoded_store, subsets
from src.systems.crossattn.data.encoder_inputs import EncoderInputs

_MANY = 64
"""Inputs per batch assumed for the size of a window if the batch size is unlimited."""
_WINDOW = 64
"""Batches per window; inputs are sorted by length within a window."""


@dataclass
class Counts:
    """Counts of inputs."""

    rows: int = 0
    inputs: int = 0
    """Distinct inputs."""
    too_long: int = 0
    """Distinct contexts that exceed the length limit."""
    num_reused: int = 0
    """Inputs that were already encoded."""
    encoded: int = 0
    keys: set[bytes] = field(default_factory=set, repr=False)
    texts: set[bytes] = field(default_factory=set, repr=False)


def missing(source: Path, inputs: EncoderInputs, known_keys: set[bytes], counts: Counts) -> Iterator[list[int]]:
    """Yield each distinct encoder input that is missing in `known_keys`. Updates `counts`."""
    for name in row_files(source):
        rows = jsonl.read_rows(source / name, subsets.FIELDS, subsets.OPTIONAL, subsets.require_equal_lengths)
        for number, row in enumerate(rows, 1):
            counts.rows += 1
            question = row["question"] if inputs.rules.questions_on_contexts else ""
            text = hashlib.sha256(json.dumps([answers.contexts(row), question]).encode()).digest()
            if text in counts.texts:
                continue
            counts.texts.add(text)
            try:
                chunks, too_long = inputs.chunks_and_cuts(row, row["question"])
            except DataError as error:
                raise DataError(f"{source / name}:{number}: {error}") from None
            counts.too_long += too_long
            for ids in chunks:
                key = encoded_store.context_key(ids)
                if key not in counts.keys:
                    counts.keys.add(key)
                    if key not in known_keys:
                        yield ids


def row_files(source: Path) -> list[str]:
    return sorted(
        name for name in files.read_manifest(source, DataError)["files"] if re.fullmatch(r"[^/]+\.jsonl", name)
    )


def batches(inputs: Iterator[list[int]], size: int | None, tokens: int | None = None) -> Iterator[list[list[int]]]:
    """Yield batches of similar length, of 1 to `size` inputs and at most `tokens` padded tokens.
    A longer input is a batch of its own. Inputs are sorted within a window of the stream."""
    window: list[list[int]] = []
    for ids in inputs:
        window.append(ids)
        if len(window) == (size or _MANY) * _WINDOW:
            yield from _sorted_batches(window, size, tokens)
            window = []
    yield from _sorted_batches(window, size, tokens)


def _sorted_batches(window: list[list[int]], size: int | None, tokens: int | None) -> Iterator[list[list[int]]]:
    longest_first, first = sorted(window, key=len, reverse=True), 0
    while first < len(longest_first):
        fits = [most for most in (size, tokens and tokens // len(longest_first[first])) if most is not None]
        count = max(1, min(fits, default=len(longest_first)))
        yield longest_first[first : first + count]
        first += count
