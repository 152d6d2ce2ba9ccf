"""Samples of several denoisers in fixed shares. Each denoiser has its own length of rows of text."""

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from src.data import jsonl
from src.data.mixture.interleaving import shares
from src.data.orders import ShuffledConfig
from src.data.text.tokenizers import SafeTokenizer
from src.errors import DataError
from src.systems.t5.denoising.dataset import DenoisingDataset, MaskRng, Sample

if TYPE_CHECKING:
    import numpy as np

    from src.data.text.documents import Documents
    from src.systems.t5.denoising.dataset import Objective

BLOCK = 400
"""Number of samples in a block. The shares are exact in each block."""


class DenoiserSpec(NamedTuple):
    """A denoiser."""

    rate: float
    """Share of the samples, relative to the other rates."""
    raw: int
    """Number of tokens in its rows of text."""
    mode: "np.ndarray"
    """(tokens,) int32: prefix of its inputs; can be empty."""
    objective: "Objective"


class DenoiserMixture(DenoisingDataset):
    """Splits the text into blocks of equal size, and each block into a fixed number of rows per denoiser, in a random
    order by (seed, epoch, block). So a sample depends only on its block, and each epoch reads every token once, except
    a remainder at the end.
    """

    def __init__(
        self,
        documents: "Documents",
        kinds: Sequence[DenoiserSpec],
        draws: MaskRng,
        encoder: SafeTokenizer,
        most: int | None,
        config: ShuffledConfig,
    ) -> None:
        """most: number of samples to use, the same for every experiment; None for all.
        config: for its shuffle and batch lengths; its denoisers and whole words are part of the fingerprint.

        Raises:
            DataError: there is less text than one sample, or than `most` samples.
        """
        self._documents, self._kinds = documents, kinds
        self._block = shares([kind.rate for kind in kinds], BLOCK)
        self._block_tokens = self._tokens(self._block)
        blocks, remaining_tokens = divmod(documents.num_tokens, self._block_tokens)
        self._last = self._largest_block(remaining_tokens)
        total = blocks * BLOCK + sum(self._last)
        if not total:
            raise DataError(
                f"{documents.path}: {remaining_tokens} tokens are too few for a row of the most frequent denoiser. "
                "Add text, or lower data.input_tokens."
            )
        self._sample_indices = (
            range(total) if most is None else jsonl.select_validation_rows(total, most, documents.path)
        )
        self._full_blocks = blocks
        masks = hashlib.sha256(config.model_dump_json(include={"denoisers", "whole_words"}).encode()).hexdigest()
        fingerprint = f"{documents.fingerprint} {masks}"
        super().__init__(draws, encoder, fingerprint, config.shuffle, config.batch_lengths() or (0, 0))
        self.content = f"{documents.content} {masks}"

    def __len__(self) -> int:
        """Samples in one epoch."""
        return len(self._sample_indices)

    def sample(self, epoch: int, index: int) -> Sample:
        """Sample `index` of this epoch."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        number, first = self.locate(epoch, index)
        kind = self._kinds[number]
        row = self._documents.slice_tokens(first, first + kind.raw)
        inputs, targets = kind.objective(row, self._draws.generator(epoch, index))
        if len(kind.mode):
            import numpy as np

            inputs = np.concatenate([kind.mode, inputs])
        return {"input_ids": inputs, "labels": targets}

    def locate(self, epoch: int, index: int) -> tuple[int, int]:
        """(number of the denoiser of sample `index` of this epoch, index of the first token of its row)."""
        import numpy as np

        block, place = divmod(self._sample_indices[index], BLOCK)
        numbers = np.repeat(np.arange(len(self._kinds)), self._block if block < self._full_blocks else self._last)
        self._draws.generator(epoch, block, 1).shuffle(numbers)
        before = np.bincount(numbers[:place], minlength=len(self._kinds))
        return int(numbers[place]), block * self._block_tokens + self._tokens(before.tolist())

    def _tokens(self, numbers: Sequence[int]) -> int:
        return sum(number * kind.raw for number, kind in zip(numbers, self._kinds, strict=True))

    def _largest_block(self, tokens: int) -> list[int]:
        """Number of samples of each denoiser in a block of at most `tokens`."""
        rates = [kind.rate for kind in self._kinds]
        least, more = 0, BLOCK
        while more - least > 1:
            middle = (least + more) // 2
            least, more = (middle, more) if self._tokens(shares(rates, middle)) <= tokens else (least, middle)
        return shares(rates, least)
