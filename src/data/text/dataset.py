"""Plain text for a language model: documents joined by end tokens and cut into sequences of one length."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NotRequired, TypedDict

from pydantic import Field

from src.data.orders import Shuffle
from src.data.packing.dataset import require_tested_model
from src.data.text import documents
from src.experiments.batches import TokenBatch
from src.experiments.config import Places
from src.experiments.interfaces import Architecture, require_fit

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


class Config(documents.TextConfig):
    """The corpus, and the length of sequences."""

    sequence_tokens: int = Field(gt=1)
    """Tokens of every sequence."""
    separate_documents: bool = False
    """Whether the documents of a sequence do not attend to each other, as in `packed`. A sequence can still start and
    end inside a document."""

    def count_samples(self, tokens: int, documents: int) -> int:
        return tokens // self.sequence_tokens

    def check_length(self, max_positions: int | None, new_tokens: int = 0) -> None:
        require_fit("data.sequence_tokens", self.sequence_tokens, max_positions, new_tokens)

    def check_model(self, sizes: Architecture | None) -> None:
        if self.separate_documents:
            require_tested_model(sizes)

    def batch_lengths(self) -> tuple[int, ...]:
        return (self.sequence_tokens,)

    def build(self, places: Places, tokenizer: "PreTrainedTokenizerFast", split: str, seed: int) -> "TextDataset":
        """Tokenize one split. Sequences do not depend on `seed`.

        Raises:
            DataError: the data set is missing, incomplete, malformed, or too small for one sequence or for
                `val_sequences`.
        """
        text = documents.read(places, self.corpus, tokenizer, split)
        rows = documents.PackedRows(text, self.sequence_tokens, self.max_samples(split))
        return TextDataset(rows, text, self.shuffle, separate=self.separate_documents)


class Sample(TypedDict):
    """One sequence."""

    input_ids: list[int]
    loss_mask: list[bool]
    """True except on the first token of the sequence, or of each document if `separate_documents`."""
    lengths: NotRequired[list[int]]
    """Tokens of each document, if `separate_documents`."""


class TextDataset:
    """Sequences of one length; the same in every epoch."""

    def __init__(self, rows: documents.PackedRows, text: documents.Documents, shuffle: Shuffle, separate: bool) -> None:
        """separate: whether documents do not attend to each other."""
        self.fingerprint, self.content, self.shuffle = text.fingerprint, text.content, shuffle
        self._rows, self._eos_id = rows, text.eos_id if separate else None

    def __len__(self) -> int:
        """Sequences in one epoch."""
        return len(self._rows)

    def sample(self, epoch: int, index: int) -> Sample:
        """Sequence `index`, whatever the epoch."""
        ids = self._rows.row(index).tolist()
        if self._eos_id is None:
            return {"input_ids": ids, "loss_mask": [False] + [True] * (len(ids) - 1)}
        ends = [place for place, token in enumerate(ids, 1) if token == self._eos_id or place == len(ids)]
        lengths = [end - begin for begin, end in zip([0, *ends], ends, strict=False)]
        return {
            "input_ids": ids,
            "loss_mask": [place > 0 for length in lengths for place in range(length)],
            "lengths": lengths,
        }

    def collate(self, samples: Sequence[Sample]) -> TokenBatch:
        """Stack the sequences, which have equal lengths."""
        from src.data import collate

        ids, masks = [s["input_ids"] for s in samples], [s["loss_mask"] for s in samples]
        if self._eos_id is None:
            return collate.pad_tokens(ids, masks, pad_id=0)
        return collate.pack_tokens(
            ids, masks, [s["lengths"] for s in samples if "lengths" in s], pad_id=0, length=len(ids[0])
        )
