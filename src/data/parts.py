"""Base class of data sets made of several data sets, and checks of all parts."""

import hashlib
import re
from abc import abstractmethod
from collections.abc import Callable, Hashable, Iterator, Mapping
from functools import partial
from typing import ClassVar, Protocol, Self, runtime_checkable

from pydantic import model_validator

from src.errors import ConfigError, UserError, check_all
from src.experiments.config import Places
from src.experiments.dataset_protocols import Dataset
from src.experiments.interfaces import Architecture, DatasetConfig
from src.experiments.kinds import CROSS_ATTENTION, FUSION_IN_DECODER, TokenizerSource
from src.support.call_once import call_once


@runtime_checkable
class CollatedDataset(Dataset, Protocol):
    """A data set with a `collation`. Data sets with equal collations can collate each other's samples, so that parts of
    a mixture share a batch."""

    @property
    def collation(self) -> Hashable:
        """The settings that `collate` depends on."""
        ...


@runtime_checkable
class CountedConfig(Protocol):
    """A data set config that can bound its number of samples without reading the data."""

    def most_samples(self, places: Places) -> int | None:
        """Maximum number of training samples in an epoch; None if counting is slow."""
        ...


class PartsConfig(DatasetConfig):
    """Several data sets that one model reads in one training."""

    parts_field: ClassVar[str]
    """The field that holds them."""

    @property
    @abstractmethod
    def parts_by_path(self) -> Mapping[str, DatasetConfig]:
        """The data sets by their path below this one, such as "parts.nq"."""

    @model_validator(mode="after")
    def _one_model_reads_all(self) -> Self:
        kinds = {path: part.reader for path, part in self.parts_by_path.items()}
        for path, part in self.parts_by_path.items():
            if part.reader in (CROSS_ATTENTION, FUSION_IN_DECODER):
                raise ValueError(
                    f"{path}: {part.name!r} data have contexts, so they cannot be a part. "
                    "Use them as the only data set."
                )
        if len(set(kinds.values())) > 1:
            readers = ", ".join(f"{path} {kind}" for path, kind in kinds.items())
            raise ValueError(
                f"{self.parts_field}: one model cannot read all of these data: {readers}. Use data sets of one kind."
            )
        return self

    @property
    def reader(self) -> str:
        return next(iter(self.parts_by_path.values())).reader

    @property
    def is_measured(self) -> bool:
        return all(part.is_measured for part in self.parts_by_path.values())

    def check(self, places: Places) -> None:
        self.check_parts(lambda part: call_once(part.check, places))

    def check_tokenizer(self, places: Places, source: TokenizerSource | None) -> None:
        self.check_parts(lambda part: part.check_tokenizer(places, source))

    def check_length(self, max_positions: int | None, new_tokens: int = 0) -> None:
        self.check_parts(lambda part: part.check_length(max_positions, new_tokens))

    def check_model(self, sizes: Architecture | None) -> None:
        self.check_parts(lambda part: part.check_model(sizes))

    def check_scores(self, places: Places) -> None:
        self.check_parts(lambda part: part.check_scores(places))

    def check_compiled(self) -> None:
        self.check_parts(lambda part: part.check_compiled())
        lengths = {path: part.batch_lengths() for path, part in self.parts_by_path.items()}
        if len(set(lengths.values())) > 1:
            part_lengths = ", ".join(
                f"{path} {' and '.join(map(str, tokens or ['?']))}" for path, tokens in lengths.items()
            )
            raise ConfigError(
                f"data.{self.parts_field}: loop.compile needs batches of one shape, but sequences have "
                f"different numbers of tokens: "
                f"{part_lengths}. Set the same lengths for all, or remove loop.compile."
            )

    def batch_lengths(self) -> tuple[int, ...] | None:
        lengths = {part.batch_lengths() for part in self.parts_by_path.values()}
        return lengths.pop() if len(lengths) == 1 else None

    def check_parts(self, check: Callable[[DatasetConfig], None]) -> None:
        """Run `check` on every part and raise one error with all messages, with the full paths of fields."""

        def check_part(path: str, part: DatasetConfig) -> None:
            try:
                check(part)
            except UserError as error:
                lines = [re.sub(r"^data(?=:)|(?<![\w/.-])data(?=\.\w)", path, line) for line in str(error).split("\n")]
                raise type(error)(
                    "\n".join(line if line.startswith(path) else f"{path}: {line}" for line in lines)
                ) from None

        check_all(*(partial(check_part, f"data.{path}", part) for path, part in self.parts_by_path.items()))


def part_seed(seed: int, name: str) -> int:
    """A 63-bit seed for a part, so that two parts on one corpus have different masks and orders."""
    return int.from_bytes(hashlib.sha256(f"mixture/{seed}/{name}".encode()).digest()[:8], "little") >> 1


def leaf_configs(path: str, data: DatasetConfig) -> Iterator[tuple[str, DatasetConfig]]:
    """Yield the config of the data set at `path`, or those of its parts, however nested, by path."""
    if isinstance(data, PartsConfig):
        for below, part in data.parts_by_path.items():
            yield from leaf_configs(f"{path}.{below}", part)
    else:
        yield path, data
