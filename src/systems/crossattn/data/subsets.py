"""Select rows of a prepared data set: by source, or a sample of the validation split."""

from abc import abstractmethod
from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, overload

from pydantic import Field, field_validator

from src.data import jsonl
from src.data.orders import ShuffledConfig
from src.errors import DataError
from src.experiments.config import Places, unknown
from src.experiments.dataset_protocols import ContextDataset
from src.files import read_manifest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Row = dict[str, Any]


class RowsConfig(ShuffledConfig):
    """A folder of rows {"context", "question", "answer", "dataset"} in train.jsonl and val.jsonl, and their selection.

    All rows of other splits are used.
    """

    has_questions: ClassVar[bool] = True

    corpus: str = Field(min_length=1)
    """Folder below `--data_path`."""
    train_datasets: list[str] | None = Field(default=None, min_length=1)
    """Sources of the training rows, named as in "em/<source>"; None for all."""
    val_datasets: list[str] | None = Field(default=None, min_length=1)
    """Sources of the validation rows, named as in "em/<source>"; None for all."""
    val_samples: int | None = Field(default=None, gt=0)
    """Number of validation rows of `val_datasets` to use, the same rows for every seed; None for all."""

    @field_validator("train_datasets", "val_datasets")
    @classmethod
    def _each_once(cls, names: list[str] | None) -> list[str] | None:
        duplicates = [name for name, times in Counter(names or ()).items() if times > 1]
        if duplicates:
            raise ValueError(f"duplicate sources: {', '.join(duplicates)}. List each source once.")
        return names

    @property
    def reads_contexts(self) -> bool:
        return getattr(self, "contexts", None) != "none"

    def check(self, places: Places) -> None:
        """Check the files, and the sources against the manifest's {"counts": {split: {"rows": {source: number}}}}.

        If the manifest has no counts, `build` checks the sources against the rows.
        """
        jsonl.require_splits(places, self.corpus)
        counts: Any = read_manifest(places.data / self.corpus, DataError).get("counts")
        for split in jsonl.SPLITS:
            of_split = counts.get(split) if isinstance(counts, Mapping) else None
            rows = of_split.get("rows") if isinstance(of_split, Mapping) else None
            if isinstance(rows, Mapping):
                _require_known(self, split, rows)

    @abstractmethod
    def build(self, places: Places, tokenizer: "PreTrainedTokenizerFast", split: str, seed: int) -> ContextDataset:
        """The rows of one split, tokenised on access."""

    def datasets(self, split: str) -> list[str] | None:
        """The sources to use in a split; None for all."""
        return {"train": self.train_datasets, "val": self.val_datasets}.get(split)


def _require_known(config: RowsConfig, split: str, known_sources: Iterable[str]) -> None:
    for name in config.datasets(split) or ():
        if name not in known_sources:
            raise unknown("source", name, known_sources, f"data.{split}_datasets: {config.corpus}/{split}.jsonl")


def select_sources(config: RowsConfig, split: str, rows: jsonl.Rows) -> Sequence[Row]:
    """The rows of a split that belong to the selected sources.

    Raises:
        ConfigError: a source has no rows.
    """
    sources, index = config.datasets(split), rows.row_index
    if sources is None:
        return rows
    _require_known(config, split, index.names)
    selected_groups = {index.names.index(name) for name in sources}
    return Subset(rows, array("Q", (number for number, group in enumerate(index.groups) if group in selected_groups)))


def sources_of(rows: Sequence[Row]) -> list[str]:
    """The sources of rows, sorted. Does not parse the rows."""
    numbers: Iterable[int] = range(len(rows))
    while isinstance(rows, Subset):
        numbers, rows = map(rows.numbers.__getitem__, numbers), rows.rows
    assert isinstance(rows, jsonl.Rows)
    return sorted(rows.row_index.names[group] for group in set(map(rows.row_index.groups.__getitem__, numbers)))


class Subset(Sequence[Row]):
    """A subset of `rows`, read on access."""

    def __init__(self, rows: Sequence[Row], numbers: Sequence[int]) -> None:
        self.rows = rows
        self.numbers = numbers
        """Indices in `rows`, from 0."""

    def __len__(self) -> int:
        return len(self.numbers)

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        if isinstance(index, slice):
            return [self.rows[number] for number in self.numbers[index]]
        return self.rows[self.numbers[index]]


def row_number(rows: Sequence[Row], index: int) -> int:
    """Index in the file, from 0, of row `index` of `rows`."""
    while isinstance(rows, Subset):
        rows, index = rows.rows, rows.numbers[index]
    return index
