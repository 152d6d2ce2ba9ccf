"""Rows of questions, answers and contexts, as they are on disk: what every data set made of them shares."""

import copy
import logging
from collections.abc import Callable, Sequence
from functools import cached_property
from random import Random
from typing import Self

from src.config import Places
from src.data import jsonl
from src.data.qa.subsets import Row, RowFilter, RowsConfig, Subset, check_sources
from src.errors import ConfigError, DataError
from src.metrics import answers

log = logging.getLogger(__name__)
FIELDS = {"context": str, "question": str, "answer": str, "dataset": str}
OPTIONAL = {
    "answers": list[str],
    "contexts_list": list[str],
    "useful_contexts": list[int],
    "titles_list": list[str],
    "kind": str,
}


def check(config: RowsConfig, places: Places) -> None:
    """Refuse a data set that is missing or incomplete, without reading its rows.

    Raises:
        DataError: says what makes it.
        ConfigError: its manifest says that it has no rows of one of the sources.
    """
    jsonl.require_splits(places, config.corpus)
    check_sources(config, places.data / config.corpus)


def read(places: Places, config: RowsConfig, split: str) -> tuple[Sequence[Row], str]:
    """The rows of one split of a prepared data set that `config` uses, and the fingerprint of the whole data set.

    Raises:
        DataError: the data set is missing, incomplete or malformed, or what is used of it smaller than `val_samples`.
        ConfigError: no row is of one of the sources.
    """
    folder = jsonl.corpus_folder(places, config.corpus)
    path = jsonl.require_file(folder, f"{split}.jsonl")
    chosen = RowFilter(config, split, _require_equal_lengths)
    rows = chosen.select(jsonl.read_rows(path, FIELDS, OPTIONAL, chosen))
    if split == "val" and config.val_samples is not None:
        rows = Subset(rows, jsonl.select_validation_rows(len(rows), config.val_samples, path))
    return rows, jsonl.fingerprint(folder)


def _require_equal_lengths(row: Row, where: str) -> None:
    """Raises DataError where a list that says something of each context has more or fewer entries."""
    for field in ("useful_contexts", "titles_list"):
        values, contexts = row.get(field), row.get("contexts_list") or []
        if values is not None and len(values) != len(contexts):
            raise DataError(f"{where}: field {field!r}: {len(values)} entries for {len(contexts)} in 'contexts_list'.")


def all_contexts(row: Row) -> list[str]:
    """At least one."""
    return answers.contexts(row)


def useful_contexts(row: Row) -> list[str]:
    """All of them where none is marked."""
    contexts = all_contexts(row)
    return [contexts[i] for i in useful_indices(row)]


def useful_indices(row: Row) -> list[int]:
    """Numbers of the contexts that are marked as useful; all where none is."""
    marked = [i for i, mark in enumerate(row.get("useful_contexts") or []) if mark]
    return marked or list(range(len(all_contexts(row))))


class TruncationCounter:
    """How many contexts lost their end, of those that this process read. Tells it at the first, the 10th, the 100th and so on."""

    def __init__(self, name: str, field: str, most: int) -> None:
        """field: of the data set's config, which allows `most` tokens."""
        self._name, self._why = name, f"data.{field} is {most}, and data.too_long 'truncate'"
        self.read = self.cut = 0
        self._next = 1

    def count(self, read: int, cut: int) -> None:
        """Add so many contexts, and those of them that lost their end."""
        self.read += read
        self.cut += cut
        if self.cut >= self._next:
            log.warning("%s: %d of %d contexts read by this process lost their end: %s.", self._name, self.cut, self.read, self._why)
            self._next = 10 ** len(str(self.cut))


class Questions:
    """Rows, and which row's contexts each question stands with: its own, or another's as a control."""

    reads_contexts = True
    """Whether the contexts are in the samples."""
    stored_bytes_per_token: int | None = None
    """On disk, of a token of a context that was encoded before; None where contexts are read as text."""

    def __init__(self, rows: Sequence[Row], seed: int, name: str, fingerprint: str) -> None:
        self.fingerprint = fingerprint
        self._rows = rows
        self._seed = seed
        self._name = name
        self._texts_of: Callable[[Row], list[str]] = all_contexts
        self._context_rows: Sequence[int] = range(len(rows))

    @property
    def num_questions(self) -> int:
        """Rows: what can be asked."""
        return len(self._rows)

    def row(self, index: int) -> Row:
        """Question `index` as it stands in the prepared data, with its own contexts."""
        return self._rows[index]

    def references(self, index: int) -> list[str]:
        """Accepted answers, at least one."""
        return answers.references(self._rows[index])

    def source(self, index: int) -> str:
        """What scores are grouped by: the dataset a row came from, with its kind of question where it has one, as "stdlib_calls"."""
        return answers.source(self._rows[index % len(self._rows)])

    @cached_property
    def sources(self) -> list[str]:
        """Every `source`, sorted."""
        return sorted({self.source(index) for index in range(len(self._rows))})

    def with_shuffled_contexts(self) -> Self:
        """The same questions, each with another sample's context, never one of the same text.

        A control: a model that reads its context does worse here. Depends on the rows and the seed alone.

        Raises:
            DataError: all rows have the same context.
        """
        by_text: dict[tuple[str, ...], int] = {}
        for index, row in enumerate(self._rows):
            by_text.setdefault(tuple(self._texts_of(row)), index)
        if len(by_text) < 2:
            raise DataError(f"{self._name}: all {len(self._rows)} rows have the same context; shuffling needs at least two.")
        order = list(by_text)
        Random(f"contexts/{self._seed}").shuffle(order)
        partner = {text: by_text[order[i - 1]] for i, text in enumerate(order)}
        shuffled = copy.copy(self)
        shuffled._context_rows = [partner[tuple(self._texts_of(row))] for row in self._rows]
        return shuffled

    def _context_row(self, index: int) -> Row:
        """The row whose contexts question `index` stands with."""
        return self._rows[self._context_rows[index]]


def require_room(field: str, given: int, needed: int) -> None:
    """Raises ConfigError where the template alone takes more tokens than are allowed."""
    if given < needed:
        raise ConfigError(f"data.{field}: {given} tokens leave no room beside the template in this vocabulary; expected at least {needed}.")
