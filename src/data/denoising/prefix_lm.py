"""Prefix language modelling of packed text: the encoder reads the beginning of a row, the decoder writes the rest (Raffel et al. 2020)."""

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field, model_validator

from src.config import Places
from src.data.text.tokenizers import SafeTokenizer
from src.interfaces import DatasetConfig, require_fit
from src.kinds import ENCODER_DECODER

if TYPE_CHECKING:
    import numpy as np
    from transformers import PreTrainedTokenizerFast

    from src.data.denoising.dataset import SingleObjectiveDataset


class Config(DatasetConfig):
    """Documents made by data_prep.tokenize, or rows {"text"} in train.jsonl and val.jsonl; and where they are cut."""

    same_length_advice: ClassVar[str] = "Write a number as data.prefix_tokens, or leave loop.compile out."
    corpus: str = Field(min_length=1)
    """Folder below `--data_path`."""
    sequence_tokens: int = Field(gt=1)
    """Tokens of a row of text: those that are read and those that are written, without the end tokens."""
    prefix_tokens: int | None = Field(default=None, gt=0)
    """How many are read. None: a random number, from 1 to all but one, each as likely."""
    val_sequences: int | None = Field(default=None, gt=0)
    """Sequences of the validation split that are used, the same ones cut alike whatever the seed; None for all."""

    @model_validator(mode="after")
    def _something_is_written(self) -> "Config":
        if self.prefix_tokens is not None and self.prefix_tokens >= self.sequence_tokens:
            raise ValueError(f"prefix_tokens: {self.prefix_tokens} leave nothing to write of {self.sequence_tokens} sequence_tokens.")
        return self

    @property
    def reader(self) -> str:
        return ENCODER_DECODER

    def check(self, places: Places) -> None:
        from src.data.text import documents

        documents.check(places, self.corpus)

    def check_length(self, max_positions: int | None, new_tokens: int = 0) -> None:
        prefix = self.prefix_tokens or self.sequence_tokens - 1
        rest = self.sequence_tokens - (self.prefix_tokens or 1)
        require_fit("data.sequence_tokens", max(prefix, rest, new_tokens - 1) + 1, max_positions)

    def batch_lengths(self) -> tuple[int, ...] | None:
        return None if self.prefix_tokens is None else (self.prefix_tokens + 1, self.sequence_tokens - self.prefix_tokens + 1)

    def build(self, places: Places, tokenizer: "PreTrainedTokenizerFast", split: str, seed: int) -> "SingleObjectiveDataset":
        """The rows of one split. Training's cuts are functions of (seed, epoch, index), those of other splits of the index alone.

        Raises:
            DataError: the data set is missing, incomplete, malformed, or too small for one sequence or for `val_sequences`.
        """
        from src.data.denoising.dataset import Rows, SingleObjectiveDataset, mask_rng
        from src.data.text import documents

        found = documents.read(places, self.corpus, tokenizer, split)
        rows = Rows(found, self.sequence_tokens, self.val_sequences if split == "val" else None)
        return SingleObjectiveDataset(
            rows, Prefix(found.eos_id, self.prefix_tokens), mask_rng(split, seed), SafeTokenizer(tokenizer), found.fingerprint
        )


class Prefix:
    """Cuts a row in two."""

    def __init__(self, eos_id: int, prefix_tokens: int | None = None) -> None:
        """prefix_tokens: of the first part. None: random."""
        self._eos_id, self._prefix_tokens = eos_id, prefix_tokens

    def __call__(self, row: "np.ndarray", rng: "np.random.Generator") -> "tuple[np.ndarray, np.ndarray]":
        """(inputs, targets) of a row of at least 2 tokens, each ended by the end token."""
        import numpy as np

        cut = int(rng.integers(1, len(row))) if self._prefix_tokens is None else self._prefix_tokens
        end = np.array([self._eos_id], dtype=row.dtype)
        return np.concatenate([row[:cut], end]), np.concatenate([row[cut:], end])
