"""Several data sets mixed by rate, each part in its share, evenly spread over the indices of an epoch.

An epoch has as many samples as its parts have together, or `samples_per_epoch`. Each part has a fixed share of them, rounded to whole
samples. A part reads its own data in its own order and continues in the next epoch where it stopped, so that all of its samples are
read before one is repeated; each pass over a part is an epoch of that part, with its own order and masks. The validation split has
every sample of every part once, part by part.
"""

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic import Field, field_validator, model_validator

from src.config import Places
from src.data.mixture.interleaving import Interleaving, rates, shares
from src.errors import ConfigError, DataError, UserError, check_all
from src.interfaces import Architecture, Dataset, DatasetConfig, DatasetField, call_once
from src.kinds import CROSS_ATTENTION, FUSION_IN_DECODER
from src.orders import Shuffle, ShuffledConfig, feistel_permute, require_own_order

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerFast


class Config(ShuffledConfig):
    """Parts by name, and how much is read of each."""

    parts: dict[str, DatasetField] = Field(min_length=1)
    """Data sets whose samples make batches of the same kind. The loss of each is logged under its name."""
    rates: dict[str, float] | None = None
    """Share of each part in what is read; they need not sum to 1. None: in proportion to the examples of each: those that T5's mixtures
    count of a task, where the data set says so, else its samples."""
    cap: int | None = Field(default=None, gt=0)
    """Without rates: examples beyond so many do not count (T5's K)."""
    temperature: float = Field(default=1.0, ge=1)
    """Without rates: the root that is taken of the proportions (T5's T); 1 leaves them, a large one makes parts equal."""
    samples_per_epoch: int | None = Field(default=None, gt=0)
    """None: as many as the parts have together."""

    @field_validator("rates")
    @classmethod
    def _rates_are_positive(cls, given: dict[str, float] | None) -> dict[str, float] | None:
        wrong = [f"{name}: {rate}" for name, rate in (given or {}).items() if rate <= 0]
        if wrong:
            raise ValueError(f"expected numbers above 0, got {', '.join(wrong)}. Leave a part out that is not to be read.")
        return given

    @model_validator(mode="after")
    def _nothing_is_ignored(self) -> "Config":
        if self.rates is not None:
            if self.rates.keys() != self.parts.keys():
                named, known = ", ".join(sorted(self.rates)), ", ".join(sorted(self.parts))
                raise ValueError(f"rates: expected a rate for each part ({known}), got {named or 'none'}.")
            if self.cap is not None or self.temperature != 1:
                raise ValueError("rates: with them, cap and temperature would be ignored. Leave them out, or leave rates out.")
        return self

    @model_validator(mode="after")
    def _one_model_reads_all(self) -> "Config":
        for name, part in self.parts.items():
            if part.reader in (CROSS_ATTENTION, FUSION_IN_DECODER):
                raise ValueError(f"parts.{name}: {part.name!r} data have contexts, which are read by recipes for one data set alone.")
            if part.has_order:
                raise ValueError(f"parts.{name}: {part.name!r} data come in an order of their own, which no mixture can keep.")
            require_own_order(part, f"parts.{name}")
        kinds = {name: part.reader for name, part in self.parts.items()}
        if len(set(kinds.values())) > 1:
            told = ", ".join(f"{name!r} {kind}" for name, kind in sorted(kinds.items()))
            raise ValueError(f"parts: one model cannot read all of them: {told}.")
        return self

    @property
    def reader(self) -> str:
        return next(iter(self.parts.values())).reader

    def check(self, places: Places) -> None:
        self._check_parts(lambda part: call_once(part.check, places))

    def check_tokenizer(self, folder: Path | None) -> None:
        self._check_parts(lambda part: part.check_tokenizer(folder))

    def check_length(self, max_positions: int | None, new_tokens: int = 0) -> None:
        self._check_parts(lambda part: part.check_length(max_positions, new_tokens))

    def check_model(self, sizes: Architecture | None) -> None:
        self._check_parts(lambda part: part.check_model(sizes))

    def check_compiled(self) -> None:
        self._check_parts(lambda part: part.check_compiled())
        lengths = {name: part.batch_lengths() for name, part in sorted(self.parts.items())}
        if len(set(lengths.values())) > 1:
            listed = ", ".join(f"{name!r} {' and '.join(map(str, tokens or ['?']))}" for name, tokens in lengths.items())
            raise ConfigError(
                f"data.parts: loop.compile needs batches of one shape, but their sequences have different numbers of tokens: {listed}. "
                "Write the same lengths for all parts, or leave loop.compile out."
            )

    def batch_lengths(self) -> tuple[int, ...] | None:
        lengths = {part.batch_lengths() for part in self.parts.values()}
        return lengths.pop() if len(lengths) == 1 else None

    def _check_parts(self, check: Callable[[DatasetConfig], None]) -> None:
        """Raises one ConfigError with what `check` finds wrong in any part. Fields in its messages are named by their whole path."""

        def check_part(name: str, part: DatasetConfig) -> None:
            try:
                check(part)
            except UserError as error:
                path = f"data.parts.{name}"
                lines = [re.sub(r"(?<![\w/.-])data\.", f"{path}.", line) for line in str(error).split("\n")]
                raise type(error)("\n".join(line if line.startswith(path) else f"{path}: {line}" for line in lines)) from None

        check_all(*(partial(check_part, name, part) for name, part in sorted(self.parts.items())))

    def build(self, places: Places, tokenizer: "PreTrainedTokenizerFast", split: str, seed: int) -> "MixtureDataset":
        """The parts of one split, each with a seed of its own.

        Raises:
            DataError: a part is missing or malformed, makes other batches than the rest, or would never be read.
        """
        parts = {name: self.parts[name].build(places, tokenizer, split, _part_seed(seed, name)) for name in sorted(self.parts)}
        pad = tokenizer.pad_token_id
        if split == "val":
            counts, order = [len(part) for part in parts.values()], None
        else:
            examples = {name: self.parts[name].weight(places) or len(part) for name, part in parts.items()}
            counts, order = self._counts(examples, sum(map(len, parts.values()))), seed
        made = MixtureDataset(parts, counts, order, pad if isinstance(pad, int) else int(tokenizer.eos_token_id), self.shuffle)  # pyright: ignore[reportArgumentType]
        made.require_same_tensors()
        return made

    def _counts(self, examples: Mapping[str, float], samples: int) -> list[int]:
        """Samples of each part in an epoch. samples: of all parts."""
        total = self.samples_per_epoch or samples
        given = self.rates
        wanted = [given[name] for name in examples] if given else rates(list(examples.values()), self.cap, self.temperature)
        counts = shares(wanted, total)
        for name, count in zip(examples, counts, strict=True):
            if not count:
                raise DataError(f"data.parts.{name}: its share of {total} samples is less than one. Make data.samples_per_epoch larger.")
        return counts


def _part_seed(seed: int, name: str) -> int:
    """63 bits. Two parts on one corpus get different masks."""
    return int.from_bytes(hashlib.sha256(f"mixture/{seed}/{name}".encode()).digest()[:8], "little") >> 1


class Sample(NamedTuple):
    """A sample of a part."""

    part: int
    sample: Any


class MixtureDataset:
    """Samples of several data sets, `parts` by name."""

    def __init__(
        self, parts: Mapping[str, Dataset], counts: Sequence[int], seed: int | None, pad_id: int, shuffle: Shuffle = "numpy"
    ) -> None:
        """counts: samples of each part in an epoch. seed: of the orders in which they are read; None: in their own, part by part."""
        self.parts, self.shuffle = parts, shuffle
        self.fingerprint = hashlib.sha256(json.dumps({name: part.fingerprint for name, part in parts.items()}).encode()).hexdigest()
        self.sources = list(parts)
        """Names under which the losses are logged."""
        self._counts = counts
        self._sizes = [len(part) for part in parts.values()]
        self._seed = seed
        self._pad_id = pad_id
        self._order = Interleaving(counts)

    def __len__(self) -> int:
        """Samples in one epoch."""
        return len(self._order)

    def sample_source(self, epoch: int, index: int) -> str:
        """The part of a sample, the same in every epoch."""
        return self.sources[self._place(index)[0]]

    def locate(self, epoch: int, index: int) -> tuple[str, int, int]:
        """The part of a sample, and its epoch and index in that part."""
        part, number = self._place(index)
        name, size = self.sources[part], self._sizes[part]
        own_epoch, position = divmod(epoch * self._counts[part] + number, size)
        if self._seed is not None:
            position = feistel_permute(position, size, f"{self._seed}/{name}/{own_epoch}")
        return name, own_epoch, position

    def sample(self, epoch: int, index: int) -> Sample:
        """Sample `index` of an epoch."""
        name, own_epoch, position = self.locate(epoch, index)
        return Sample(self.sources.index(name), self.parts[name].sample(own_epoch, position))

    def collate(self, samples: Sequence[Sample]) -> "Mapping[str, Tensor]":
        """The batch that each part makes of its samples, joined in the order of `samples`, padded to the longest of them."""
        groups = [[i for i, sample in enumerate(samples) if sample.part == part] for part in range(len(self.sources))]
        batches = [
            (self.parts[name].collate([samples[i].sample for i in group]), group)
            for name, group in zip(self.sources, groups, strict=True)
            if group
        ]
        return batches[0][0] if len(batches) == 1 else join_batches(batches, self._pad_id)

    def require_same_tensors(self) -> None:
        """Raises DataError where parts make batches with other tensors than the first."""
        kinds = {name: _tensor_kinds(part.collate([part.sample(0, 0)])) for name, part in self.parts.items()}
        first, kind = next(iter(kinds.items()))
        for name, other in kinds.items():
            if other != kind:
                told = ", ".join(sorted({f"{key} {shape}" for key, shape in other.items() ^ kind.items()}))
                raise DataError(f"data.parts.{name}: its batches are not of the kind of those of {first!r}: they differ in {told}.")

    def _place(self, index: int) -> tuple[int, int]:
        if self._seed is not None:
            return self._order.place(index)
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        part = 0
        while index >= self._counts[part]:
            index, part = index - self._counts[part], part + 1
        return part, index


def _tensor_kinds(batch: "Mapping[str, Tensor]") -> dict[str, str]:
    """Type and number of axes of each tensor."""
    return {key: f"({str(tensor.dtype).removeprefix('torch.')}, {tensor.dim()} axes)" for key, tensor in batch.items()}


def join_batches(batches: "Sequence[tuple[Mapping[str, Tensor], Sequence[int]]]", pad_id: int) -> "Mapping[str, Tensor]":
    """One batch of several, each given with its row numbers in the result.

    Shorter sequences are padded on the right: ids with `pad_id`, labels with `NOT_LEARNED`, masks with False.
    """
    import torch

    from src.data.collate import NOT_LEARNED

    count = sum(len(rows) for _, rows in batches)
    made = {}
    for key, like in batches[0][0].items():
        sizes = [max(lengths) for lengths in zip(*(batch[key].shape[1:] for batch, _ in batches), strict=True)]
        fill = NOT_LEARNED if key == "labels" else pad_id if like.dtype == torch.int64 and key != "position_ids" else 0
        made[key] = torch.full((count, *sizes), fill, dtype=like.dtype)
        for batch, rows in batches:
            tensor = batch[key]
            made[key][(torch.tensor(rows), *(slice(size) for size in tensor.shape[1:]))] = tensor
    return made
