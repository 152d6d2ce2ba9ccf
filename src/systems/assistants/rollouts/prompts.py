"""Prompts for a policy: conversations up to an answer."""

import itertools
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from src.data import jsonl
from src.errors import DataError
from src.experiments.batches import TokenBatch
from src.systems.assistants.conversations.dataset import Writing, render_prompt
from src.systems.assistants.conversations.entries import Message, check_row, read_entry
from src.systems.assistants.conversations.rendering import Renderer
from src.systems.assistants.conversations.rows import (
    ANSWERED_ROW,
    PROMPT_ROW,
    RANKED_ROW,
    SCORED_ROW,
    ConversationRows,
    kind_of,
)
from src.systems.assistants.rewards.interface import row_entry

log = logging.getLogger(__name__)


class Prompt(NamedTuple):
    """A prompt for a policy."""

    ids: list[int]
    messages: Sequence[Message]
    row: Mapping[str, Any]
    """Its row of the prepared data."""


_KINDS = (ANSWERED_ROW, RANKED_ROW, SCORED_ROW, PROMPT_ROW)
"""Of rows that ask something."""
_LOOKED_AT = 1000
"""Rows at the start of a file that a check parses."""


def check_beginning(path: Path, keys: Sequence[str]) -> None:
    """Raises DataError if a prompt in the first thousand rows of a file has no value for one of
    `keys`; names the row."""
    with open(path, "rb") as file:
        for number, line in enumerate(itertools.islice(file, _LOOKED_AT if keys else 0), 1):
            where = f"{path}:{number}"
            row = jsonl.parse(line, where)
            check_row(row, where)
            for key in keys if kind_of(row) in _KINDS else ():
                row_entry(row, key, where)


class Prompts:
    """The prompts of a split: conversations up to their last answer or ranked replies, and rows with only a prompt."""

    def __init__(self, rows: ConversationRows, renderer: Renderer, writing: Writing, name: str) -> None:
        """name: of the data, in messages."""
        self._rows, self.renderer, self._writing, self._name = rows, renderer, writing, name
        self._row_indices: Sequence[int] = rows.numbers_of(*_KINDS)

    def limit(self, tokens: int, long: Literal["refuse", "leave_out"]) -> None:
        """Leave out prompts of more tokens, or refuse them.

        Raises:
            DataError: there is a longer one that is refused, or no other; names its row.
        """
        lengths = [len(self[index].ids) for index in range(len(self))]
        fit = [row for row, length in zip(self._row_indices, lengths, strict=True) if length <= tokens]
        longer = next((index for index, length in enumerate(lengths) if length > tokens), None)
        if longer is not None and (long == "refuse" or not fit):
            raise DataError(
                f"{self._rows.location(self._row_indices[longer])}: its prompt has {lengths[longer]} tokens, more "
                f"than the {tokens} of data.prompts.sequence_tokens. Make room, or write data.long_prompts: leave_out."
            )
        if not fit:
            raise DataError(f"{self._name}: no conversation has something to answer.")
        if longer is not None:
            left_out = len(lengths) - len(fit)
            log.info(
                "%s: %d of %d prompts have more than %d tokens, and are left out.",
                self._name,
                left_out,
                len(lengths),
                tokens,
            )
        self._row_indices = fit

    def require(self, keys: Sequence[str]) -> None:
        """Raises DataError where a prompt's row has nothing under one of `keys`, which rewards read; names the row."""
        for number, key in itertools.product(self._row_indices if keys else (), keys):
            row_entry(self._rows[number], key, self._rows.location(number))

    def __len__(self) -> int:
        return len(self._row_indices)

    def __getitem__(self, index: int) -> Prompt:
        number = self._row_indices[index]
        row = self._rows[number]
        entry = read_entry(row, self._rows.location(number))
        has_answer = not entry.is_prompt and not entry.replies
        messages, answer = (entry.messages[:-1], entry.messages[-1]) if has_answer else (entry.messages, None)
        try:
            return Prompt(render_prompt(self.renderer, self._writing, messages, answer), messages, row)
        except DataError as error:
            raise DataError(f"{self._rows.location(number)}: {error}") from None

    def collate(self, prompts: Sequence[Prompt]) -> TokenBatch:
        """Padded on the left, for `generate`."""
        from src.data.collate import pad_tokens

        ids = [prompt.ids for prompt in prompts]
        return pad_tokens(ids, [[False] * len(row) for row in ids], self.renderer.safe.pad_id, left=True)
