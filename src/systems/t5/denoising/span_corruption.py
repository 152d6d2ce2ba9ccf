"""T5's span corruption of packed text: the decoder predicts masked runs of tokens (Raffel et al. 2020).

Documents are concatenated and split into rows that have exactly `input_tokens` once their masked runs are replaced by
sentinels, so there is no padding or truncation. Inputs and targets end with the end token.
"""

from functools import partial
from typing import TYPE_CHECKING

from pydantic import Field, model_validator

from src.data.text import documents
from src.data.text.tokenizers import SafeTokenizer
from src.errors import ConfigError
from src.experiments.config import Places
from src.experiments.interfaces import require_fit
from src.experiments.kinds import TokenizerSource
from src.systems.t5.denoising import ngrams, noise, sentinels, words
from src.systems.t5.denoising.dataset import DenoisingConfig, SingleObjectiveDataset, mask_rng

if TYPE_CHECKING:
    import numpy as np
    from transformers import PreTrainedTokenizerFast

    from src.systems.t5.denoising.dataset import Objective


class Config(DenoisingConfig):
    """Text and its masks."""

    input_tokens: int = Field(default=512, gt=2)
    """Tokens of every input, with sentinels and end token. It determines the lengths of rows of text and of targets."""
    noise_density: float = Field(default=0.15, gt=0, lt=1)
    """Share of a row's tokens to mask."""
    mean_span_tokens: float = Field(default=3.0, ge=1)
    """Mean length of masked runs in tokens."""
    ngrams: str | None = Field(default=None, min_length=1)
    """Text file below `--data_path` with one n-gram of words per line. Masked runs then consist of complete n-grams and
    words, instead of any tokens. The lengths do not change."""
    whole_words: bool = False
    """Whether masked runs consist of complete words, as with `ngrams` but without a list. The lengths do not change."""

    @model_validator(mode="after")
    def _gives_exact_lengths(self) -> "Config":
        try:
            self._lengths()
        except ConfigError as error:
            raise ValueError(str(error)) from None
        return self

    @model_validator(mode="after")
    def _nothing_is_ignored(self) -> "Config":
        if self.ngrams and self.whole_words:
            raise ValueError("whole_words: with ngrams only complete words are masked anyway. Remove it.")
        return self

    def check(self, places: Places) -> None:
        super().check(places)
        if self.ngrams:
            ngrams.require_file(places.data / self.ngrams)

    def check_tokenizer(self, places: Places, source: TokenizerSource | None) -> None:
        super().check_tokenizer(places, source)
        if source:
            sentinels.require_in_folder(source.folder, self._lengths()[1].spans, "data.input_tokens")
            if self.ngrams or self.whole_words:
                words.require_in_folder(source.folder)

    def count_samples(self, tokens: int, documents: int) -> int:
        return tokens // self._lengths()[0]

    def check_length(self, max_positions: int | None, new_tokens: int = 0) -> None:
        targets = self._lengths()[1].target_tokens
        require_fit("data.input_tokens", self.input_tokens, max_positions)
        require_fit(f"data.input_tokens: its targets have {targets} tokens", max(targets, new_tokens), max_positions)

    def batch_lengths(self) -> tuple[int, ...]:
        return self.input_tokens, self._lengths()[1].target_tokens

    def build(
        self, places: Places, tokenizer: "PreTrainedTokenizerFast", split: str, seed: int
    ) -> SingleObjectiveDataset:
        """The rows of one split.
        Masks are functions of (seed, epoch, index) in training, and of the index in other splits.

        Raises:
            DataError: the tokenizer has no sentinels, or no word boundaries for `ngrams` or `whole_words`; the n-grams
                are missing or malformed; the data set is missing, incomplete, malformed, or too small for one sequence
                or for `val_sequences`.
            ConfigError: the tokenizer has too few sentinels.
        """
        import numpy as np

        raw, counts = self._lengths()
        ids = np.array(sentinels.require(tokenizer, counts.spans, "data.input_tokens"), dtype=np.int32)
        corpus = documents.read(places, self.corpus, tokenizer, split)
        rows = documents.PackedRows(corpus, raw, self.max_samples(split))
        fingerprint, content = corpus.fingerprint, corpus.content
        shares = self.noise_density, self.mean_span_tokens
        vocabulary = ngrams.NO_NGRAMS if self.whole_words else None
        if self.ngrams:
            vocabulary = ngrams.read_vocabulary(places.data / self.ngrams)
        if vocabulary:
            fingerprint, content = (f"{digest} {vocabulary.fingerprint}" for digest in (fingerprint, content))
        objective = span_objective(tokenizer, shares, ids, corpus.eos_id, vocabulary)
        dataset = SingleObjectiveDataset(
            rows, objective, mask_rng(split, seed), SafeTokenizer(tokenizer), fingerprint, self.shuffle
        )
        dataset.content = content
        return dataset

    def _lengths(self) -> tuple[int, noise.Counts]:
        """Number of tokens of a row of text, and its counts."""
        return noise.exact_lengths(self.input_tokens, self.noise_density, self.mean_span_tokens)


def span_objective(
    tokenizer: "PreTrainedTokenizerFast",
    shares: tuple[float, float],
    sentinels: "np.ndarray",
    eos_id: int,
    vocabulary: ngrams.Vocabulary | None,
) -> "Objective":
    """Masks runs of tokens, or with a vocabulary runs of n-grams and words. shares: noise density and mean span.
    Raises DataError if the tokenizer has no word boundaries for a vocabulary."""
    if vocabulary is None:
        return partial(mask_spans, shares=shares, sentinels=sentinels, eos_id=eos_id)
    from src.systems.t5.denoising.words import Words

    return ngrams.Ngrams(Words(tokenizer), vocabulary, shares, sentinels, eos_id)


def mask_spans(
    row: "np.ndarray", rng: "np.random.Generator", shares: tuple[float, float], sentinels: "np.ndarray", eos_id: int
) -> "tuple[np.ndarray, np.ndarray]":
    """(inputs, targets) of a row with masked runs of tokens. shares: noise density and mean span."""
    mask = noise.noise_mask(len(row), *shares, rng)
    return noise.corrupt(row, mask, noise.run_starts(mask), sentinels, eos_id)
