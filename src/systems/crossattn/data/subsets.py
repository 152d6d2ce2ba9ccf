"""Select rows of a prepared data set: by source, or a sample of the validation split."""

from abc import abstractmethod
from array import array
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, overload

from pydantic import Field, field_validator

from src.data import jsonl, row_counts
from src.data.orders import ShuffledConfig
from src.errors import ConfigError, DataError
from src.evaluation.metrics import answers
from src.experiments.config import Places, unknown
from src.experiments.dataset_protocols import NUM_CHECKED_QUESTIONS, ContextDataset, Prediction
from src.experiments.interfaces import ModelConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Row = dict[str, Any]
FIELDS = {"context": str, "question": str, "answer": str, "dataset": str}
TEMPLATE_TOKENS = 64
"""More tokens than the templates of questions and contexts have."""
OPTIONAL = {
    "answers": list[str],
    "contexts_list": list[str],
    "useful_contexts": list[int],
    "titles_list": list[str],
    "kind": str,
}


def require_equal_lengths(row: Row, where: str) -> None:
    """Raises DataError if a list with one entry per context has a different length."""
    for field in ("useful_contexts", "titles_list"):
        values, contexts = row.get(field), row.get("contexts_list") or []
        if values is not None and len(values) != len(contexts):
            raise DataError(
                f"{where}: field {field!r}: expected {len(contexts)} entries, as in 'contexts_list', got {len(values)}."
            )


class RowsConfig(ShuffledConfig):
    """A folder of rows {"context", "question", "answer", "dataset"} in train.jsonl and val.jsonl, and their selection.

    All rows of other splits are used.
    """

    has_questions: ClassVar[bool] = True
    has_contexts: ClassVar[bool] = True

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
        """Check the files, the sources, and the number of validation rows."""
        jsonl.require_splits(places, self.corpus)
        for split in jsonl.SPLITS:
            require_sources(self, places, split, f"data.{split}_datasets", self.datasets(split))
        if self.val_samples is not None:
            row_counts.require("data.val_samples", self.val_samples, self.count_rows(places, "val", self.val_samples))

    def check_room(self, model: ModelConfig, places: Places) -> None:
        """Raise a UserError if a token limit is too small for the template. Loads the model's tokenizer if a limit is
        below `TEMPLATE_TOKENS`."""
        from src.data.text import tokenizers

        limits = [getattr(self, field, None) for field in ("sequence_tokens", "context_tokens", "passage_tokens")]
        if min(limit for limit in limits if limit) >= TEMPLATE_TOKENS:
            return
        if source := model.find_tokenizer(places):
            self.open([], tokenizers.load(source.folder, source.new_tokens), 0, "", "val")

    @abstractmethod
    def open(
        self, rows: Sequence[Row], tokenizer: "PreTrainedTokenizerFast", seed: int, fingerprint: str, split: str
    ) -> ContextDataset:
        """The data set of `rows`."""

    def check_shuffling(self, places: Places) -> None:
        """Raise ConfigError if the validation rows have contexts, but no two different ones to swap."""
        rows = self._rows(places, "val")
        first = next(rows, None) if self.reads_contexts else None
        if first is None:
            return
        if self.val_samples == 1 or all(answers.contexts(row) == answers.contexts(first) for row in rows):
            field = "data.val_samples: 1" if self.val_samples == 1 else f"data.corpus: {self.corpus}/val.jsonl"
            raise ConfigError(f"{field}: all rows have the same context. Shuffling needs two or more.")

    def _rows(self, places: Places, split: str, sources: Collection[str] | None = None) -> Iterator[Row]:
        """The selected rows of a split, without `val_samples`, that have one of `sources`. None: all."""
        allowed = [set(names) for names in (self.datasets(split), sources) if names is not None]
        for row in _iterate(places, self.corpus, split):
            if all(answers.source(row) in names for names in allowed):
                yield row

    def count_rows(self, places: Places, split: str, most: int, sources: Collection[str] | None = None) -> int:
        """Number of selected rows of a split, at most `most`, that have one of `sources`; without `val_samples`."""
        if sources is None and self.datasets(split) is None:
            return row_counts.count_lines(_path(places, self.corpus, split), most)
        return sum(1 for _ in islice(self._rows(places, split, sources), most))

    def count_questions(self, places: Places, most: int) -> int:
        return min(self.count_rows(places, "val", most), self.val_samples or most)

    def first_questions(self, places: Places) -> list[Prediction]:
        rows = islice(self._rows(places, "val"), NUM_CHECKED_QUESTIONS)
        return [answers.make_prediction(row, answers.references(row)[0]) for row in rows]

    @abstractmethod
    def build(self, places: Places, tokenizer: "PreTrainedTokenizerFast", split: str, seed: int) -> ContextDataset:
        """The rows of one split, tokenised on access."""

    def datasets(self, split: str) -> list[str] | None:
        """The sources to use in a split; None for all."""
        return {"train": self.train_datasets, "val": self.val_datasets}.get(split)


def _path(places: Places, corpus: str, split: str) -> Path:
    return jsonl.require_file(jsonl.corpus_folder(places, corpus), f"{split}.jsonl")


def _iterate(places: Places, corpus: str, split: str) -> Iterator[Row]:
    return row_counts.iterate(_path(places, corpus, split), FIELDS, OPTIONAL, require_equal_lengths)


def require_sources(
    config: RowsConfig, places: Places, split: str, field: str, sources: Collection[str] | None
) -> None:
    """Raise ConfigError if a split has no row of one of `sources`. Reads the manifest's {"counts": {split: {"rows":
    {source: number}}}}, or rows until all sources occurred."""
    counts: Any = jsonl.manifest_of(places.data / config.corpus).get("counts")
    of_split = counts.get(split) if isinstance(counts, Mapping) else None
    known_sources = of_split.get("rows") if isinstance(of_split, Mapping) else None
    if not isinstance(known_sources, Mapping):
        known_sources = set[str]()
        for row in _iterate(places, config.corpus, split):
            if known_sources >= {*(sources or ())}:
                break
            known_sources.add(answers.source(row))
    _require_known(sources or (), known_sources, f"{field}: {config.corpus}/{split}.jsonl")


def _require_known(sources: Iterable[str], known_sources: Iterable[str], where: str) -> None:
    for name in sources:
        if name not in known_sources:
            raise unknown("source", name, known_sources, where)


def select_sources(config: RowsConfig, split: str, rows: jsonl.Rows) -> Sequence[Row]:
    """The rows of a split that belong to the selected sources.

    Raises:
        ConfigError: a source has no rows.
    """
    sources, index = config.datasets(split), rows.row_index
    if sources is None:
        return rows
    _require_known(sources, index.names, f"data.{split}_datasets: {config.corpus}/{split}.jsonl")
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
