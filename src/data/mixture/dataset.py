"""Several data sets mixed by rate or by count. Samples of each part are spread evenly over an epoch.

An epoch has as many samples as its parts together, or `samples_per_epoch`, or the numbers that `draw` sets. Each part
has a fixed, rounded share of them. A part reads its data in its own order and continues in the next epoch where it
stopped, so that all of its samples are read before one is repeated. Each pass over a part is an epoch of that part,
with its own order and masks. The validation split has every sample of every part once, part by part.
"""

import hashlib
import json
from collections.abc import Hashable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, cast

from pydantic import Field, field_validator, model_validator

from src.data.mixture.interleaving import Interleaving, rates, shares
from src.data.orders import Shuffle, ShuffledConfig, feistel_permute, require_own_order
from src.data.parts import CollatedDataset, CountedConfig, PartsConfig, part_seed
from src.errors import DataError
from src.experiments.config import Config as StrictConfig
from src.experiments.config import Places, unknown_text
from src.experiments.dataset_protocols import Dataset, MeasuredDataset, content_of
from src.experiments.interfaces import DatasetConfig, DatasetField

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerFast


class Draw(StrictConfig):
    """Number of samples of a part in an epoch. With both fields, the smaller number."""

    fraction: float | None = Field(default=None, gt=0)
    """Share of the part's samples, rounded; above 1 some samples are read several times in an epoch."""
    size: int | None = Field(default=None, gt=0)
    """A number of samples."""

    @model_validator(mode="after")
    def _says_how_many(self) -> "Draw":
        if self.fraction is None and self.size is None:
            raise ValueError("set fraction, size, or both; neither is set.")
        return self

    def count(self, samples: int, field: str) -> int:
        """Samples in an epoch of a part that has `samples`.

        Raises:
            DataError: the fraction is less than one sample, or `size` without `fraction` is above `samples`. The
                message starts with `field`.
        """
        if self.fraction is None:
            if self.size is not None and self.size > samples:
                raise DataError(
                    f"{field}.size: {self.size}, but the part has only {samples} samples. "
                    "To repeat samples within an epoch, use a fraction above 1."
                )
            return self.size or samples
        count = round(self.fraction * samples)
        if not count:
            raise DataError(
                f"{field}.fraction: {self.fraction:g} of {samples} samples is less than one sample. "
                "Use a larger fraction, or only size."
            )
        return min(count, self.size or count)


class Config(PartsConfig, ShuffledConfig):
    """The parts of a mixture by name, and their shares."""

    parts_field: ClassVar[str] = "parts"

    parts: dict[str, DatasetField] = Field(min_length=1)
    """Data sets with batches of the same kind. The loss of each part is logged under its name."""
    rates: dict[str, float] | None = None
    """Share of each part; need not sum to 1. None: in proportion to the examples of each part, which are T5's example
    counts for tasks and the number of samples for other data sets."""
    cap: int | None = Field(default=None, gt=0)
    """Without rates: maximum number of examples counted per part (T5's K)."""
    temperature: float = Field(default=1.0, ge=1)
    """Without rates: proportions are raised to 1 / temperature (T5's T). 1: proportional; a large value equalizes
    parts."""
    samples_per_epoch: int | None = Field(default=None, gt=0)
    """None: the number of samples of all parts together."""
    draw: dict[str, Draw] | None = Field(default=None, min_length=1)
    """Samples of each part in an epoch, instead of rates; all samples of a part without an entry. The next epoch
    continues where a part stopped."""

    @field_validator("rates")
    @classmethod
    def _rates_are_positive(cls, values: dict[str, float] | None) -> dict[str, float] | None:
        wrong = [f"{name}: {rate}" for name, rate in (values or {}).items() if rate <= 0]
        if wrong:
            raise ValueError(f"expected numbers above 0, got {', '.join(wrong)}. To exclude a part, remove it.")
        return values

    @model_validator(mode="after")
    def _nothing_is_ignored(self) -> "Config":
        if self.rates is not None:
            if self.rates.keys() != self.parts.keys():
                rate_names, part_names = ", ".join(sorted(self.rates)), ", ".join(sorted(self.parts))
                raise ValueError(f"rates: expected a rate for each part ({part_names}), got {rate_names or 'none'}.")
            if self.cap is not None or self.temperature != 1:
                raise ValueError("rates: cap and temperature are ignored with rates. Remove them, or remove rates.")
        if self.draw is not None:
            for name in sorted(self.draw.keys() - self.parts.keys()):
                raise ValueError(f"draw: {unknown_text('part', name, self.parts)}")
            if self.rates or self.cap or self.temperature != 1 or self.samples_per_epoch:
                raise ValueError(
                    "draw: rates, cap, temperature and samples_per_epoch are ignored with draw. "
                    "Remove them, or remove draw."
                )
        return self

    @model_validator(mode="after")
    def _parts_have_no_order(self) -> "Config":
        for path, part in self.parts_by_path.items():
            if part.has_order:
                raise ValueError(
                    f"{path}: {part.name!r} data have a fixed order, which a mixture cannot follow. Remove the part."
                )
            require_own_order(part, path)
        return self

    @property
    def parts_by_path(self) -> Mapping[str, DatasetConfig]:
        return {f"parts.{name}": part for name, part in sorted(self.parts.items())}

    def check(self, places: Places) -> None:
        """See `PartsConfig`; also check that each part has a sample in an epoch, and no `draw` exceeds its part."""
        super().check(places)
        if self.rates and self.samples_per_epoch:
            self._counts(dict.fromkeys(sorted(self.parts), 0), places)
        for name, draw in (self.draw or {}).items():
            part = self.parts[name]
            most = part.most_samples(places) if isinstance(part, CountedConfig) else None
            if most is not None:
                draw.count(most, f"data.draw.{name}")

    def build(self, places: Places, tokenizer: "PreTrainedTokenizerFast", split: str, seed: int) -> "MixtureDataset":
        """Build the parts of one split, each with its own seed.

        Raises:
            DataError: a part is missing or malformed, has batches of another kind, or would never be read.
        """
        parts = {
            name: self.parts[name].build(places, tokenizer, split, part_seed(seed, name)) for name in sorted(self.parts)
        }
        pad = tokenizer.pad_token_id
        sizes = {name: len(part) for name, part in parts.items()}
        counts, order = (list(sizes.values()), None) if split == "val" else (self._counts(sizes, places), seed)
        mixture = MixtureDataset(
            parts,
            counts,
            order,
            pad if isinstance(pad, int) else int(tokenizer.eos_token_id),  # pyright: ignore[reportArgumentType]
            self.shuffle,
        )
        mixture.require_same_tensors()
        return mixture

    def _counts(self, sizes: Mapping[str, int], places: Places) -> list[int]:
        """Samples of each part in an epoch. sizes: all samples of each."""
        draw, part_rates, total = self.draw, self.rates, self.samples_per_epoch or sum(sizes.values())
        if draw:
            return [
                draw[name].count(size, f"data.draw.{name}") if name in draw else size for name, size in sizes.items()
            ]
        examples = [self.parts[name].weight(places) or size for name, size in sizes.items()]
        counts = shares(
            [part_rates[name] for name in sizes] if part_rates else rates(examples, self.cap, self.temperature), total
        )
        for name, count in zip(sizes, counts, strict=True):
            if not count:
                raise DataError(
                    f"data.parts.{name}: its rate gives less than one of the {total} samples of an epoch. "
                    "Use a larger data.samples_per_epoch or rate."
                )
        return counts


class Sample(NamedTuple):
    """A sample of a part."""

    part: int
    sample: Any


class MixtureDataset:
    """Samples of several data sets, `parts` by name."""

    def __init__(
        self,
        parts: Mapping[str, Dataset],
        counts: Sequence[int],
        seed: int | None,
        pad_id: int,
        shuffle: Shuffle = "numpy",
    ) -> None:
        """counts: samples of each part in an epoch.
        seed: seed of the order of each part; None: unshuffled, part by part."""
        self.parts, self.shuffle = parts, shuffle
        self.fingerprint, self.content = (
            hashlib.sha256(json.dumps({name: digest(part) for name, part in parts.items()}).encode()).hexdigest()
            for digest in (attrgetter("fingerprint"), content_of)
        )
        self.sources = list(parts)
        """Names under which the losses are logged."""
        self._counts = counts
        self._sizes = [len(part) for part in parts.values()]
        self._seed = seed
        self._pad_id = pad_id
        self._collations = [
            part.collation if isinstance(part, CollatedDataset) else number
            for number, part in enumerate(parts.values())
        ]
        self._order = Interleaving(counts)

    def __len__(self) -> int:
        """Samples in one epoch."""
        return len(self._order)

    @property
    def epoch_counts(self) -> Mapping[str, int]:
        """Samples of each part in an epoch."""
        return dict(zip(self.parts, self._counts, strict=True))

    def sample_source(self, epoch: int, index: int) -> str:
        """Name of the part of a sample; the same in every epoch."""
        return self.sources[self._place(index)[0]]

    def locate(self, epoch: int, index: int) -> tuple[str, int, int]:
        """The part of a sample, and its epoch and index in that part."""
        part, number = self._place(index)
        name, size = self.sources[part], self._sizes[part]
        own_epoch, position = divmod(epoch * self._counts[part] + number, size)
        if self._seed is not None:
            position = feistel_permute(position, size, f"{self._seed}/{name}/{own_epoch}")
        return name, own_epoch, position

    def length(self, epoch: int, index: int) -> int:
        """Tokens of sample `index` of an epoch, if the parts know their lengths."""
        name, own_epoch, position = self.locate(epoch, index)
        return cast(MeasuredDataset, self.parts[name]).length(own_epoch, position)

    def sample(self, epoch: int, index: int) -> Sample:
        """Sample `index` of an epoch."""
        name, own_epoch, position = self.locate(epoch, index)
        return Sample(self.sources.index(name), self.parts[name].sample(own_epoch, position))

    def collate(self, samples: Sequence[Sample]) -> "Mapping[str, Tensor]":
        """Collate samples by equal `collation`, and join the batches in the order of `samples`, padded to the
        longest."""
        groups: dict[Hashable, list[int]] = {}
        for i, sample in enumerate(samples):
            groups.setdefault(self._collations[sample.part], []).append(i)
        batches = [
            (self.parts[self.sources[samples[group[0]].part]].collate([samples[i].sample for i in group]), group)
            for group in groups.values()
        ]
        return batches[0][0] if len(batches) == 1 else join_batches(batches, self._pad_id)

    def require_same_tensors(self) -> None:
        """Raise DataError if a part's batches have other tensors than the first part's, or cannot be joined."""
        kinds = {name: _tensor_kinds(part.collate([part.sample(0, 0)])) for name, part in self.parts.items()}
        first, kind = next(iter(kinds.items()))
        for name, other in kinds.items():
            if other != kind:
                differences = ", ".join(sorted({f"{key} {shape}" for key, shape in other.items() ^ kind.items()}))
                raise DataError(
                    f"data.parts.{name}: its batches differ from those of {first!r} in the tensors {differences}. "
                    "Mix only data sets with the same tensors."
                )
        if "sample_of_row" in kind and len(set(self._collations)) > 1:
            raise DataError(
                "data.parts: samples have several rows (sample_of_row), and the parts collate them differently, "
                "so their batches cannot be joined. "
                "Give the data sets an equal `collation`, or train on one part."
            )

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


def join_batches(
    batches: "Sequence[tuple[Mapping[str, Tensor], Sequence[int]]]", pad_id: int
) -> "Mapping[str, Tensor]":
    """Join batches, each given with its row numbers in the result.

    Shorter sequences are padded on the right: ids with `pad_id`, labels with `NOT_LEARNED`, masks with False.
    """
    import torch

    from src.data.collate import NOT_LEARNED

    count = sum(len(rows) for _, rows in batches)
    joined_batch = {}
    for key, like in batches[0][0].items():
        sizes = [max(lengths) for lengths in zip(*(batch[key].shape[1:] for batch, _ in batches), strict=True)]
        fill = NOT_LEARNED if key == "labels" else pad_id if like.dtype == torch.int64 and key != "position_ids" else 0
        joined_batch[key] = torch.full((count, *sizes), fill, dtype=like.dtype)
        for batch, rows in batches:
            tensor = batch[key]
            joined_batch[key][(torch.tensor(rows), *(slice(size) for size in tensor.shape[1:]))] = tensor
    return joined_batch


def leaves(name: str, data: Dataset) -> Iterator[tuple[str, Dataset]]:
    """Yield the data set as `name`, or the parts of a mixture, however nested, by name."""
    if isinstance(data, MixtureDataset):
        for part_name, part in data.parts.items():
            yield from leaves(part_name, part)
    else:
        yield name, data
