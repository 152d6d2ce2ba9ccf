"""Data sets made of several data sets: common properties of their parts, and checks of all parts."""

import hashlib
import re
from abc import abstractmethod
from collections.abc import Callable, Hashable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import ClassVar, Protocol, Self, runtime_checkable

from pydantic import model_validator

from src.errors import ConfigError, UserError, check_all
from src.experiments.config import Places
from src.experiments.dataset_protocols import Dataset
from src.experiments.interfaces import Architecture, DatasetConfig
from src.experiments.kinds import CROSS_ATTENTION, FUSION_IN_DECODER
from src.support.call_once import call_once


@runtime_checkable
class CollatedDataset(Dataset, Protocol):
    """A data set with a `collation`.
    Data sets with equal ones can collate each other's samples, so parts of a mixture share a batch."""

    @property
    def collation(self) -> Hashable:
        """The settings that `collate` depends on."""
        ...


@runtime_checkable
class CountedConfig(Protocol):
    """A data set that can know its maximum number of samples before it is read."""

    def most_samples(self, places: Places) -> int | None:
        """Maximum number of training samples in an epoch; None if counting them takes long."""
        ...


class PartsConfig(DatasetConfig):
    """Several data sets that one model reads in one training."""

    parts_field: ClassVar[str]
    """The field that holds them."""

    @property
    @abstractmethod
    def parts_by_path(self) -> Mapping[str, DatasetConfig]:
        """The data sets by their paths below this one, such as "parts.nq"."""

    @model_validator(mode="after")
    def _one_model_reads_all(self) -> Self:
        kinds = {path: part.reader for path, part in self.parts_by_path.items()}
        for path, part in self.parts_by_path.items():
            if part.reader in (CROSS_ATTENTION, FUSION_IN_DECODER):
                raise ValueError(
                    f"{path}: {part.name!r} data have contexts, which need a recipe for a single data set."
                )
        if len(set(kinds.values())) > 1:
            readers = ", ".join(f"{path} {kind}" for path, kind in kinds.items())
            raise ValueError(f"{self.parts_field}: one model cannot read all of them: {readers}.")
        return self

    @property
    def reader(self) -> str:
        return next(iter(self.parts_by_path.values())).reader

    @property
    def is_measured(self) -> bool:
        return all(part.is_measured for part in self.parts_by_path.values())

    def check(self, places: Places) -> None:
        self.check_parts(lambda part: call_once(part.check, places))

    def check_tokenizer(self, folder: Path | None) -> None:
        self.check_parts(lambda part: part.check_tokenizer(folder))

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
                f"data.{self.parts_field}: loop.compile needs batches of one shape, but their sequences have "
                f"different numbers of tokens: "
                f"{part_lengths}. Write the same lengths for all, or leave loop.compile out."
            )

    def batch_lengths(self) -> tuple[int, ...] | None:
        lengths = {part.batch_lengths() for part in self.parts_by_path.values()}
        return lengths.pop() if len(lengths) == 1 else None

    def check_parts(self, check: Callable[[DatasetConfig], None]) -> None:
        """Raises one ConfigError with what `check` finds wrong in any part.
        Its messages name fields by their full path."""

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
    """63 bits. Two parts on one corpus get different masks and orders."""
    return int.from_bytes(hashlib.sha256(f"mixture/{seed}/{name}".encode()).digest()[:8], "little") >> 1


def leaf_configs(path: str, data: DatasetConfig) -> Iterator[tuple[str, DatasetConfig]]:
    """The config of a data set, or those of its parts, of any depth, by path. path: of the data set."""
    if isinstance(data, PartsConfig):
        for below, part in data.parts_by_path.items():
            yield from leaf_configs(f"{path}.{below}", part)
    else:
        yield path, data
