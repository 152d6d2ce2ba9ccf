"""Plain text for a language model: documents joined by the end token and cut into sequences of one length."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypedDict

from pydantic import Field

from src.batches import TokenBatch
from src.config import Places
from src.data.text import documents
from src.interfaces import require_fit
from src.orders import Shuffle

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


class Config(documents.TextConfig):
    """Which text, and how it is cut."""

    sequence_tokens: int = Field(gt=1)
    """Tokens of every sequence."""

    def check_length(self, max_positions: int | None, new_tokens: int = 0) -> None:
        require_fit("data.sequence_tokens", self.sequence_tokens + new_tokens, max_positions)

    def batch_lengths(self) -> tuple[int, ...]:
        return (self.sequence_tokens,)

    def build(self, places: Places, tokenizer: "PreTrainedTokenizerFast", split: str, seed: int) -> "TextDataset":
        """Tokenise one split. The sequences do not depend on `seed`, which every data set is given.

        Raises:
            DataError: the data set is missing, incomplete, malformed, or too small for one sequence or for `val_sequences`.
        """
        found = documents.read(places, self.corpus, tokenizer, split)
        return TextDataset(documents.PackedRows(found, self.sequence_tokens, self.max_samples(split)), found.fingerprint, self.shuffle)


class Sample(TypedDict):
    """One sequence."""

    input_ids: list[int]
    loss_mask: list[bool]
    """True on all but the first."""


class TextDataset:
    """Sequences of one length; the same in every epoch."""

    def __init__(self, rows: documents.PackedRows, fingerprint: str, shuffle: Shuffle) -> None:
        self.fingerprint, self.shuffle = fingerprint, shuffle
        self._rows = rows

    def __len__(self) -> int:
        """Sequences in one epoch."""
        return len(self._rows)

    def sample(self, epoch: int, index: int) -> Sample:
        """Sequence `index`, whatever the epoch."""
        ids = self._rows.row(index).tolist()
        return {"input_ids": ids, "loss_mask": [False] + [True] * (len(ids) - 1)}

    def collate(self, samples: Sequence[Sample]) -> TokenBatch:
        """Stack; nothing needs padding."""
        from src.data import collate

        return collate.pad_tokens([s["input_ids"] for s in samples], [s["loss_mask"] for s in samples], pad_id=0)
