"""Prefix language modelling of packed text: the encoder reads the first part of a row, the decoder predicts the rest
(Raffel et al. 2020)."""

from functools import partial
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field, model_validator

from src.data.text import documents
from src.data.text.tokenizers import SafeTokenizer
from src.experiments.config import Places
from src.experiments.interfaces import require_fit
from src.systems.t5.denoising.dataset import DenoisingConfig, SingleObjectiveDataset, mask_rng

if TYPE_CHECKING:
    import numpy as np
    from transformers import PreTrainedTokenizerFast


class Config(DenoisingConfig):
    """Text, and the split of its rows into prefix and target."""

    same_length_advice: ClassVar[str] = "Set data.prefix_tokens to a number, or remove loop.compile."
    sequence_tokens: int = Field(gt=1)
    """Tokens of a row of text: prefix and target, without end tokens."""
    prefix_tokens: int | None = Field(default=None, gt=0)
    """Tokens of the prefix; None for a uniformly random number from 1 to sequence_tokens - 1."""

    @model_validator(mode="after")
    def _something_is_written(self) -> "Config":
        if self.prefix_tokens is not None and self.prefix_tokens >= self.sequence_tokens:
            raise ValueError(
                f"prefix_tokens: expected less than sequence_tokens = {self.sequence_tokens}, got {self.prefix_tokens}."
            )
        return self

    def count_samples(self, tokens: int, documents: int) -> int:
        return tokens // self.sequence_tokens

    def check_length(self, max_positions: int | None, new_tokens: int = 0) -> None:
        prefix = self.prefix_tokens or self.sequence_tokens - 1
        rest = self.sequence_tokens - (self.prefix_tokens or 1)
        require_fit("data.sequence_tokens", max(prefix, rest, new_tokens - 1) + 1, max_positions)

    def batch_lengths(self) -> tuple[int, ...] | None:
        return (
            None
            if self.prefix_tokens is None
            else (self.prefix_tokens + 1, self.sequence_tokens - self.prefix_tokens + 1)
        )

    def build(
        self, places: Places, tokenizer: "PreTrainedTokenizerFast", split: str, seed: int
    ) -> SingleObjectiveDataset:
        """The rows of one split.
        Random prefixes are functions of (seed, epoch, index) in training, and of the index in other splits.

        Raises:
            DataError: the data set is missing, incomplete, malformed, or too small for one sequence or for
                `val_sequences`.
        """
        corpus = documents.read(places, self.corpus, tokenizer, split)
        rows = documents.PackedRows(corpus, self.sequence_tokens, self.max_samples(split))
        objective = partial(cut_row, eos_id=corpus.eos_id, prefix_tokens=self.prefix_tokens)
        dataset = SingleObjectiveDataset(
            rows, objective, mask_rng(split, seed), SafeTokenizer(tokenizer), corpus.fingerprint, self.shuffle
        )
        dataset.content = corpus.content
        return dataset


def cut_row(
    row: "np.ndarray", rng: "np.random.Generator", eos_id: int, prefix_tokens: int | None = None
) -> "tuple[np.ndarray, np.ndarray]":
    """(inputs, targets) of a row of at least 2 tokens, each with the end token `eos_id`.
    prefix_tokens: number of tokens of the inputs; None for a random number."""
    import numpy as np

    cut = int(rng.integers(1, len(row))) if prefix_tokens is None else prefix_tokens
    end = np.array([eos_id], dtype=row.dtype)
    return np.concatenate([row[:cut], end]), np.concatenate([row[cut:], end])
