"""Plain text for a language model: documents joined by the end token and cut into sequences of one length."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypedDict

from pydantic import Field

from src.batches import TokenBatch
from src.config import Places
from src.data import jsonl
from src.errors import DataError
from src.interfaces import DatasetConfig, require_fit

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from src.data.text.packing import Packed


class Config(DatasetConfig):
    """A folder made by data_prep.tokenize, or one of rows {"text", "source"} in train.jsonl and val.jsonl, which are tokenised here."""

    corpus: str = Field(min_length=1)
    """Folder below `--data_path`."""
    sequence_tokens: int = Field(gt=1)
    """Tokens of every sequence."""
    val_sequences: int | None = Field(default=None, gt=0)
    """Sequences of the validation split that are used, the same ones whatever the seed; None for all."""

    def check(self, places: Places) -> None:
        from src.data.text import documents

        documents.check(places, self.corpus)

    def check_length(self, max_positions: int | None, new_tokens: int = 0) -> None:
        require_fit("data.sequence_tokens", self.sequence_tokens + new_tokens, max_positions)

    def batch_lengths(self) -> tuple[int, ...]:
        return (self.sequence_tokens,)

    def build(self, places: Places, tokenizer: "PreTrainedTokenizerFast", split: str, seed: int) -> "TextDataset":
        """Tokenise one split. The sequences do not depend on `seed`, which every data set is given.

        Raises:
            DataError: the data set is missing, incomplete, malformed, or too small for one sequence or for `val_sequences`.
        """
        from src.data.text import documents
        from src.data.text.packing import Packed

        found = documents.read(places, self.corpus, tokenizer, split)
        rows = Packed(found, found.eos_id, self.sequence_tokens)
        if not len(rows):
            raise DataError(f"{found.path}: fewer than {self.sequence_tokens} tokens, which is one sequence of data.sequence_tokens.")
        chosen = None
        if split == "val" and self.val_sequences is not None:
            chosen = jsonl.select_validation_rows(len(rows), self.val_sequences, found.path)
        return TextDataset(rows, found.fingerprint, chosen)


class Sample(TypedDict):
    """One sequence."""

    input_ids: list[int]
    loss_mask: list[bool]
    """True on all but the first."""


class TextDataset:
    """Sequences of one length; the same in every epoch."""

    def __init__(self, rows: "Packed", fingerprint: str, chosen: Sequence[int] | None = None) -> None:
        """chosen: which rows are the sequences; None: all."""
        self.fingerprint = fingerprint
        self._rows = rows
        self._chosen = range(len(rows)) if chosen is None else chosen

    def __len__(self) -> int:
        """Sequences in one epoch."""
        return len(self._chosen)

    def sample(self, epoch: int, index: int) -> Sample:
        """Sequence `index`, whatever the epoch."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        ids = self._rows.row(self._chosen[index]).tolist()
        return {"input_ids": ids, "loss_mask": [False] + [True] * (len(ids) - 1)}

    def collate(self, samples: Sequence[Sample]) -> TokenBatch:
        """Stack; nothing needs padding."""
        from src.data import collate

        return collate.pad_tokens([s["input_ids"] for s in samples], [s["loss_mask"] for s in samples], pad_id=0)
