"""Plain text for a language model: documents joined by the end token and cut into sequences of one length."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypedDict

from pydantic import Field

from src.batches import TokenBatch
from src.config import Config as StrictConfig
from src.config import Places
from src.data import jsonl
from src.data.positions import require_fit
from src.data.tokenizers import Encoder
from src.errors import DataError

if TYPE_CHECKING:
    import numpy as np
    from transformers import PreTrainedTokenizerFast


class Config(StrictConfig):
    """A prepared folder of rows {"text", "source"} in train.jsonl and val.jsonl."""

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
    jsonl.require_splits(places, config.corpus)


def fits(config: Config, max_positions: int | None, new_tokens: int = 0) -> None:
    """Raises ConfigError where a model of `max_positions` (None: unknown) cannot read the sequences, or write `new_tokens` after one."""
    require_fit("data.sequence_tokens", config.sequence_tokens + new_tokens, max_positions)


def build(config: Config, places: Places, tokenizer: "PreTrainedTokenizerFast", split: str, seed: int) -> "TextDataset":
    """Tokenise one split. The sequences do not depend on `seed`, which every data set is given.

    Raises:
        DataError: the data set is missing, incomplete, malformed, or too small for one sequence or for `val_sequences`.
    """
    folder = jsonl.corpus(places, config.corpus)
    path = jsonl.require_file(folder, f"{split}.jsonl")
    texts = [row["text"] for row in jsonl.read_rows(path, {"text": str})]
    sequences = pack(texts, Encoder(tokenizer), config.sequence_tokens)
    if not len(sequences):
        raise DataError(f"{path}: fewer than {config.sequence_tokens} tokens, which is one sequence of data.sequence_tokens.")
    if split == "val" and config.val_sequences is not None:
        sequences = sequences[jsonl.first_of_permutation(len(sequences), config.val_sequences, path)]
    return TextDataset(sequences, jsonl.fingerprint(folder))


def pack(texts: Sequence[str], encoder: Encoder, sequence_tokens: int) -> "np.ndarray":
    """Ids of all texts, each ended by the end token, as (N, sequence_tokens) int32; the remainder is dropped."""
    import numpy as np

    pieces = [np.array([*ids, encoder.eos_id], dtype=np.int32) for ids in encoder.texts(texts)]
    ids = np.concatenate(pieces) if pieces else np.empty(0, dtype=np.int32)
    count = len(ids) // sequence_tokens
    return ids[: count * sequence_tokens].reshape(count, sequence_tokens)


class TextDataset:
    """Sequences of one length; the same in every epoch."""

    def __init__(self, sequences: "np.ndarray", fingerprint: str) -> None:
        self.fingerprint = fingerprint
        self._sequences = sequences

    def __len__(self) -> int:
        """Sequences in one epoch."""
        return len(self._sequences)

    def sample(self, epoch: int, index: int) -> Sample:
        """Sequence `index`, whatever the epoch."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        ids = self._sequences[index].tolist()
        return {"input_ids": ids, "loss_mask": [False] + [True] * (len(ids) - 1)}

    def collate(self, samples: Sequence[Sample]) -> TokenBatch:
        """Stack; nothing needs padding."""
        from src.data import collate

        return collate.pad_tokens([s["input_ids"] for s in samples], [s["loss_mask"] for s in samples], pad_id=0)
