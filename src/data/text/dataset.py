"""Plain text for a language model: documents joined by the end token and cut into sequences of one length."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypedDict

from pydantic import Field

from src.batches import TokenBatch
from src.config import Config as StrictConfig
from src.config import Places
from src.data import jsonl
from src.data.positions import require_fit
from src.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from src.data.text.packing import Packed


class Config(StrictConfig):
    """A folder made by data_prep.tokenize, or one of rows {"text", "source"} in train.jsonl and val.jsonl, which are tokenised here."""

    corpus: str = Field(min_length=1)
    """Folder below `--data_path`."""
    sequence_tokens: int = Field(gt=1)
    """Tokens of every sequence."""
    val_sequences: int | None = Field(default=None, gt=0)
    """Sequences of the validation split that are used, the same ones whatever the seed; None for all."""


class Sample(TypedDict):
    """One sequence."""

    input_ids: list[int]
    loss_mask: list[bool]
    """True on all but the first."""


def check(config: Config, places: Places) -> None:
    """Refuse a data set that is missing or incomplete, without reading its rows.

    Raises:
        DataError: says what makes it.
    """
    from src.data.text import documents

    documents.check(places, config.corpus)


def fits(config: Config, max_positions: int | None, new_tokens: int = 0) -> None:
    """Raises ConfigError where a model of `max_positions` (None: unknown) cannot read the sequences, or write `new_tokens` after one."""
    require_fit("data.sequence_tokens", config.sequence_tokens + new_tokens, max_positions)


def batch_tokens(config: Config) -> tuple[int, ...]:
    """Tokens of every sequence."""
    return (config.sequence_tokens,)


def build(config: Config, places: Places, tokenizer: "PreTrainedTokenizerFast", split: str, seed: int) -> "TextDataset":
    """Tokenise one split. The sequences do not depend on `seed`, which every data set is given.

    Raises:
        DataError: the data set is missing, incomplete, malformed, or too small for one sequence or for `val_sequences`.
    """
    from src.data.text import documents
    from src.data.text.packing import Packed

    found = documents.read(places, config.corpus, tokenizer, split)
    rows = Packed(found, found.eos_id, config.sequence_tokens)
    if not len(rows):
        raise DataError(f"{found.path}: fewer than {config.sequence_tokens} tokens, which is one sequence of data.sequence_tokens.")
    chosen = None
    if split == "val" and config.val_sequences is not None:
        chosen = jsonl.first_of_permutation(len(rows), config.val_sequences, found.path)
    return TextDataset(rows, found.fingerprint, chosen)


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
