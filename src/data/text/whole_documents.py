"""Documents for a language model, one per sample: padded to the longest of a batch, or packed into rows by `packed`."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pydantic import Field

from src.data import jsonl
from src.data.orders import Shuffle
from src.data.text import documents
from src.data.text.dataset import Sample
from src.errors import ConfigError
from src.experiments.batches import TokenBatch
from src.experiments.config import Places
from src.experiments.interfaces import require_fit

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


class Config(documents.TextConfig):
    """The corpus, and the maximum length of documents."""

    sequence_tokens: int | None = Field(default=None, gt=1)
    """Maximum number of tokens of a document; longer documents are truncated. None: no limit."""

    @property
    def is_measured(self) -> bool:
        return True

    def count_samples(self, tokens: int, documents: int) -> int:
        return documents

    def check_length(self, max_positions: int | None, new_tokens: int = 0) -> None:
        if self.sequence_tokens is None and max_positions is not None:
            raise ConfigError(
                "data.sequence_tokens: missing. "
                f"Documents can be longer than the {max_positions} positions of the model. Set it."
            )
        require_fit("data.sequence_tokens", self.sequence_tokens or 0, max_positions, new_tokens)

    def build(self, places: Places, tokenizer: "PreTrainedTokenizerFast", split: str, seed: int) -> "WholeDocuments":
        """Read the documents of one split. They do not depend on `seed`.

        Raises:
            DataError: the data set is missing, incomplete or malformed, or too small for `val_sequences`.
        """
        text, most = documents.read(places, self.corpus, tokenizer, split), self.max_samples(split)
        indices = range(len(text)) if most is None else jsonl.select_validation_rows(len(text), most, text.path)
        return WholeDocuments(text, indices, self.sequence_tokens, self.shuffle)


class WholeDocuments:
    """Documents with their end tokens; the same in every epoch."""

    collation = "documents"

    def __init__(self, text: documents.Documents, indices: Sequence[int], most: int | None, shuffle: Shuffle) -> None:
        """indices: numbers of the documents in `text`. most: maximum number of tokens of a document."""
        self.fingerprint, self.content, self.shuffle = text.fingerprint, text.content, shuffle
        self._documents, self._indices, self._most = text, indices, most

    def __len__(self) -> int:
        """Number of documents."""
        return len(self._indices)

    def length(self, epoch: int, index: int) -> int:
        """Tokens of document `index`, whatever the epoch."""
        length = self._documents.length(self._indices[index])
        return min(length, self._most or length)

    def sample(self, epoch: int, index: int) -> Sample:
        """Document `index`, whatever the epoch."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        ids = [*self._documents[self._indices[index]].tolist(), self._documents.eos_id][: self._most]
        return {"input_ids": ids, "loss_mask": [False] + [True] * (len(ids) - 1)}

    def collate(self, samples: Sequence[Sample]) -> TokenBatch:
        """Pad on the right. Padding is masked, so its id does not matter."""
        from src.data import collate

        return collate.pad_tokens([s["input_ids"] for s in samples], [s["loss_mask"] for s in samples], pad_id=0)
