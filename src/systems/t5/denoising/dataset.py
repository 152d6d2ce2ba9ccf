"""Data sets of inputs and targets made from rows of text by random masks.
The masks are functions of (seed, epoch, index)."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypedDict

from src.data.orders import Shuffle
from src.data.text.documents import PackedRows, TextConfig
from src.data.text.tokenizers import SafeTokenizer
from src.experiments.batches import Seq2SeqBatch
from src.experiments.kinds import ENCODER_DECODER

if TYPE_CHECKING:
    import numpy as np

    Objective = Callable[[np.ndarray, np.random.Generator], tuple[np.ndarray, np.ndarray]]
    """Makes inputs and targets from a row of text, each with an end token."""

VAL_SEED = 5_368_709
"""Seed of every validation, so that all experiments are evaluated on the same masks."""


class DenoisingConfig(TextConfig):
    """Text of which an encoder reads one part and a decoder predicts the rest. In validation the parts never change."""

    @property
    def reader(self) -> str:
        return ENCODER_DECODER


class Sample(TypedDict):
    """Input of the encoder and target of the decoder, each with an end token."""

    input_ids: "np.ndarray"
    """(S,) int32."""
    labels: "np.ndarray"
    """(T,) int32."""


class MaskRng(NamedTuple):
    """Random generators of one split."""

    seed: int
    is_fixed: bool
    """Whether the generators are the same in every epoch."""

    def generator(self, epoch: int, *index: int) -> "np.random.Generator":
        """The generator of a sample, or of anything else with an index."""
        import numpy as np

        return np.random.default_rng([self.seed, 0 if self.is_fixed else epoch, *index])


def mask_rng(split: str, seed: int) -> MaskRng:
    """Generators that change with `seed` and epoch in training, and are always the same in other splits."""
    return MaskRng(seed, is_fixed=False) if split == "train" else MaskRng(VAL_SEED, is_fixed=True)


class DenoisingDataset:
    """Inputs and targets made from text."""

    def __init__(
        self,
        draws: MaskRng,
        encoder: SafeTokenizer,
        fingerprint: str,
        shuffle: Shuffle,
        lengths: tuple[int, ...] = (0, 0),
    ) -> None:
        """lengths: minimum lengths of inputs and targets in every batch."""
        self.fingerprint, self.content, self.shuffle, self._lengths = fingerprint, fingerprint, shuffle, lengths
        self.collation = "denoising", encoder.pad_id, lengths
        self._draws, self._pad_id = draws, encoder.pad_id

    def collate(self, samples: Sequence[Sample]) -> Seq2SeqBatch:
        """Stack rows, padded on the right. The decoder starts with the padding token, like T5's."""
        from src.data import collate

        return collate.seq2seq(
            [s["input_ids"] for s in samples], [s["labels"] for s in samples], self._pad_id, self._pad_id, self._lengths
        )


class SingleObjectiveDataset(DenoisingDataset):
    """Samples made by one objective from rows of one length."""

    def __init__(
        self,
        rows: PackedRows,
        objective: "Objective",
        draws: MaskRng,
        encoder: SafeTokenizer,
        fingerprint: str,
        shuffle: Shuffle = "numpy",
    ) -> None:
        super().__init__(draws, encoder, fingerprint, shuffle)
        self._rows, self._objective = rows, objective

    def __len__(self) -> int:
        """Samples in one epoch."""
        return len(self._rows)

    def sample(self, epoch: int, index: int) -> Sample:
        """Row `index` as inputs and targets of this epoch."""
        inputs, targets = self._objective(self._rows.row(index), self._draws.generator(epoch, index))
        return {"input_ids": inputs, "labels": targets}
