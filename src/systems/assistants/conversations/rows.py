"""Rows of a file of conversations, and their kinds, which are read from the file's index without parsing rows."""

import contextlib
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from src.data import jsonl
from src.errors import DataError
from src.systems.assistants.conversations.entries import Entry, check_row, read_entry

ANSWERED_ROW, RANKED_ROW, SCORED_ROW = "answered", "ranked", "scored"
PROMPT_ROW, OTHER_ROW, EMPTY_ROW = "prompt", "other", "empty"
"""Kinds of rows. answered: the last message is the assistant's. ranked: replies of different ranks. scored: ranked, and
every reply has a score. prompt: no answer. empty: all answers are empty. other: the rest."""
_RULES = "conversations 5"


def kind_of(row: dict[str, Any]) -> str:
    """The kind of a valid row."""
    if "prompt" in row:
        return PROMPT_ROW
    replies = row.get("replies") or ()
    if len({reply["rank"] for reply in replies}) > 1:
        return RANKED_ROW if any(reply.get("score") is None for reply in replies) else SCORED_ROW
    messages = [*row.get("messages", ()), *({"role": "assistant", **reply} for reply in replies)]
    if messages and not any(
        (each.get("content") or "").strip() or each.get("tool_calls")
        for each in messages
        if each["role"] == "assistant"
    ):
        return EMPTY_ROW
    return (
        ANSWERED_ROW
        if row.get("replies") is None and "messages" in row and row["messages"][-1]["role"] == "assistant"
        else OTHER_ROW
    )


def read_rows(path: Path) -> jsonl.Rows:
    """Read and check the rows of a file, grouped by kind.

    Raises:
        DataError: the folder or the file is missing or incomplete, or a line is invalid; reports FILE:LINE.
    """
    return jsonl.read_rows(path, {}, check=check_row, group=kind_of, rules=_RULES)


@contextlib.contextmanager
def add_location(where: str) -> Iterator[None]:
    """Prepend `where` to a DataError of the block."""
    try:
        yield
    except DataError as error:
        raise DataError(f"{where}: {error}") from None


class ConversationRows(Sequence[dict[str, Any]]):
    """All or some rows of a file, parsed on access."""

    def __init__(self, rows: jsonl.Rows, row_indices: Sequence[int] | None = None) -> None:
        """row_indices: indices in the file, in order; None for all rows."""
        self._rows, self._row_indices = rows, row_indices if row_indices is not None else range(len(rows))

    def __len__(self) -> int:
        return len(self._row_indices)

    def __getitem__(self, index: Any) -> Any:
        return (
            [self[i] for i in range(*index.indices(len(self)))]
            if isinstance(index, slice)
            else self._rows[self._row_indices[index]]
        )

    def location(self, index: int) -> str:
        """FILE:LINE of a row."""
        return f"{self._rows.path}:{self._row_indices[index] + 1}"

    def entry(self, index: int) -> Entry:
        """A row, parsed."""
        return read_entry(self[index], self.location(index))

    def add_location(self, index: int) -> contextlib.AbstractContextManager[None]:
        """Prepend the location of a row to a DataError of the block."""
        return add_location(self.location(index))

    def numbers_of(self, *kinds: str, invert: bool = False) -> Sequence[int]:
        """Indices of the rows of these kinds, or with `invert` of all other kinds: an array of four bytes each, or a
        range if all rows match."""
        import numpy as np

        index = self._rows.row_index
        codes = [index.names.index(kind) for kind in kinds if kind in index.names]
        if not codes:
            return range(len(self)) if invert else ()
        groups = np.asarray(index.groups, dtype=np.uint32)
        if len(self) != len(groups) or not isinstance(self._row_indices, range):
            groups = groups[np.fromiter(self._row_indices, dtype=np.int64, count=len(self))]
        matches = np.isin(groups, codes) != invert
        return range(len(self)) if matches.all() else array("I", np.flatnonzero(matches).astype(np.uint32).tobytes())
