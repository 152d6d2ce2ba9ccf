"""Data sets whose samples are inputs and targets that are drawn from rows of text. Draws are functions of (seed, epoch, index)."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypedDict

from src.batches import Seq2SeqBatch
from src.data import jsonl
from src.data.text.tokenizers import SafeTokenizer
from src.errors import DataError

if TYPE_CHECKING:
    import numpy as np

    from src.data.text.documents import Documents

    Objective = Callable[[np.ndarray, np.random.Generator], tuple[np.ndarray, np.ndarray]]
    """Makes inputs and targets of a row of text, each ended by the end token."""

VAL_SEED = 5_368_709
"""Of the draws of every validation, so that all experiments are scored on the same masks."""


class Sample(TypedDict):
    """What the encoder reads and the decoder learns to write, each ended by the end token."""

    input_ids: "np.ndarray"
    """(S,) int32."""
    labels: "np.ndarray"
    """(T,) int32."""


class MaskRng(NamedTuple):
    """From what the draws of one split are made."""

    seed: int
    fixed: bool
    """The same in every epoch."""

    def generator(self, epoch: int, *index: int) -> "np.random.Generator":
        """That of one sample, or of whatever else has such an index."""
        import numpy as np

        return np.random.default_rng([self.seed, 0 if self.fixed else epoch, *index])


def mask_rng(split: str, seed: int) -> MaskRng:
    """Training's differ from epoch to epoch and by `seed`; those of other splits are always the same."""
    return MaskRng(seed, fixed=False) if split == "train" else MaskRng(VAL_SEED, fixed=True)


class DenoisingDataset:
    """Samples of rows of text, one of each."""

    def __init__(self, draws: MaskRng, encoder: SafeTokenizer, fingerprint: str) -> None:
        self.fingerprint = fingerprint
        self._draws, self._pad_id = draws, encoder.pad_id

    def collate(self, samples: Sequence[Sample]) -> Seq2SeqBatch:
        """Stack; where lengths differ, pad on the right. The decoder starts with the padding token, as T5's."""
        from src.data import collate

        return collate.seq2seq([s["input_ids"] for s in samples], [s["labels"] for s in samples], self._pad_id, self._pad_id)


class SingleObjectiveDataset(DenoisingDataset):
    """Samples of rows of one length, all made in one way."""

    def __init__(self, rows: "Rows", objective: "Objective", draws: MaskRng, encoder: SafeTokenizer, fingerprint: str) -> None:
        super().__init__(draws, encoder, fingerprint)
        self._rows, self._objective = rows, objective

    def __len__(self) -> int:
        """Samples in one epoch."""
        return len(self._rows)

    def sample(self, epoch: int, index: int) -> Sample:
        """Row `index` as inputs and targets of this epoch."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        inputs, targets = self._objective(self._rows.row(index), self._draws.generator(epoch, index))
        return {"input_ids": inputs, "labels": targets}


class Rows:
    """Rows of one length, all of a split or those that stand for it."""

    def __init__(self, documents: "Documents", length: int, most: int | None) -> None:
        """most: how many rows are used, the same ones for every experiment; None for all.

        Raises:
            DataError: there is less text than one row, or than `most` rows.
        """
        from src.data.text.packing import Packed

        self._packed = Packed(documents, documents.eos_id, length)
        if not len(self._packed):
            raise DataError(f"{documents.path}: fewer than {length} tokens, which is the text of one sequence.")
        total = len(self._packed)
        self._chosen = range(total) if most is None else jsonl.select_validation_rows(total, most, documents.path)

    def __len__(self) -> int:
        return len(self._chosen)

    def row(self, index: int) -> "np.ndarray":
        """(length,) int32."""
        return self._packed.row(self._chosen[index])
