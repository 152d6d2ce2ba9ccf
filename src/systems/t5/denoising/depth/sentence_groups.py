"""Group sentences of documents so that each group fits a sample for every mask, without truncation."""

import hashlib
from collections.abc import Iterable, Iterator
from itertools import count
from typing import TYPE_CHECKING

from src.data.text.tokenizers import SafeTokenizer
from src.errors import ConfigError
from src.systems.t5.denoising import noise
from src.systems.t5.denoising.depth import sentences

if TYPE_CHECKING:
    import numpy as np
    from transformers import PreTrainedTokenizerFast

_BATCH = 1024


class Room:
    """Computes how many tokens of text fit in a sample.
    Each sentence adds <eosen> and its name, each sample a last <eosen> and the end token."""

    def __init__(
        self, input_tokens: int, target_tokens: int, density: float, mean_span: float, num_sentinels: int
    ) -> None:
        """Raises ConfigError if less than two tokens of a sentence fit, or no mask has this density and mean span."""
        self._limits = input_tokens, target_tokens, num_sentinels
        self._density, self._mean_span = density, mean_span
        self._most: dict[int, int] = {}
        if self.max_tokens(1) < 2:
            raise ConfigError(
                f"input_tokens {input_tokens} and target_tokens {target_tokens}, "
                f"with at most {num_sentinels} sentinels, leave no room for text. Raise them."
            )

    def max_tokens(self, num_sentences: int) -> int:
        """Maximum tokens of text in `num_sentences` sentences; 0 if nothing fits."""
        if num_sentences not in self._most:
            self._most[num_sentences] = next(n for n in count() if not self._fits(n + 1, num_sentences))
        return self._most[num_sentences]

    def _fits(self, tokens: int, num_sentences: int) -> bool:
        input_tokens, target_tokens, num_sentinels = self._limits
        counts = noise.counts(tokens, self._density, self._mean_span)
        # Rotating the mask adds at most one run, and so does each end of a sentence.
        runs = min(counts.noise, counts.spans + num_sentences)
        marks = 2 * num_sentences + 2
        return (
            counts.keep + runs + marks <= input_tokens
            and counts.noise + runs + marks <= target_tokens
            and runs <= num_sentinels
        )


class Groups:
    """Groups of as many consecutive sentences of one document as fit a sample.
    A sentence that is too long is split."""

    def __init__(
        self,
        texts: Iterable[str],
        tokenizer: "PreTrainedTokenizerFast",
        room: Room,
        num_sentences: int,
        fingerprint: str,
    ) -> None:
        """fingerprint: fingerprint of the data set."""
        import numpy as np

        self._room, self._num_sentences = room, num_sentences
        pieces: list[np.ndarray] = []
        firsts: list[int] = []
        for document in _tokenise(texts, SafeTokenizer(tokenizer)):
            cut = [
                ids[place : place + room.max_tokens(1)]
                for ids in document
                for place in range(0, len(ids), room.max_tokens(1))
            ]
            firsts += (len(pieces) + first for first in self._firsts([len(ids) for ids in cut]))
            pieces += cut
        self._ids = np.concatenate([np.empty(0, np.int32), *pieces])
        self._bounds = np.cumsum([0, *map(len, pieces)])
        self._firsts_of_groups = np.array([*firsts, len(pieces)])
        digest = hashlib.sha256(self._ids.tobytes())  # also depends on tokenizer and segmenter
        digest.update(self._bounds.tobytes())
        self.content = digest.hexdigest()
        self.fingerprint = hashlib.sha256(f"{fingerprint} {self.content}".encode()).hexdigest()

    def __len__(self) -> int:
        return len(self._firsts_of_groups) - 1

    def sentences(self, index: int) -> "tuple[np.ndarray, np.ndarray]":
        """Ids (N,) int32 of the K sentences of a group, and their boundaries (K + 1,)."""
        first, last = self._firsts_of_groups[index : index + 2]
        bounds = self._bounds[first : last + 1]
        return self._ids[bounds[0] : bounds[-1]], bounds - bounds[0]

    def _firsts(self, lengths: list[int]) -> Iterator[int]:
        """The first sentence of each group of a document."""
        tokens = num_sentences = 0
        for number, length in enumerate(lengths):
            if (
                not num_sentences
                or num_sentences == self._num_sentences
                or tokens + length > self._room.max_tokens(num_sentences + 1)
            ):
                yield number
                tokens = num_sentences = 0
            tokens, num_sentences = tokens + length, num_sentences + 1


def _tokenise(texts: Iterable[str], encoder: SafeTokenizer) -> "Iterator[list[np.ndarray]]":
    """The ids of the non-empty sentences of each document."""
    import numpy as np

    waiting: list[list[str]] = []

    def encode_waiting() -> "Iterator[list[np.ndarray]]":
        ids = encoder.encode_all([sentence for document in waiting for sentence in document])
        for document in waiting:
            encoded = [np.array(next(ids), np.int32) for _ in document]
            yield [sentence for sentence in encoded if len(sentence)]
        waiting.clear()

    for text in texts:
        waiting.append(sentences.split(text))
        if len(waiting) == _BATCH:
            yield from encode_waiting()
    yield from encode_waiting()
