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
from src.systems.assistants.conversations.entries import Entry, Message, check_row, read_entry
from src.systems.assistants.conversations.rendering import Renderer
from src.systems.assistants.conversations.rows import (
    ANSWERED_ROW,
    PROMPT_ROW,
    RANKED_ROW,
    SCORED_ROW,
    ConversationRows,
    add_location,
    kind_of,
)
from src.systems.assistants.rewards.interface import row_entry

log = logging.getLogger(__name__)


class Prompt(NamedTuple):
    """A prompt for a policy."""

    ids: list[int]
    messages: Sequence[Message]
    row: Mapping[str, Any]
    """The prompt's row of the prepared data."""


PROMPT_KINDS = (ANSWERED_ROW, RANKED_ROW, SCORED_ROW, PROMPT_ROW)
"""Kinds of rows that have a prompt."""
_NUM_CHECKED_ROWS = 1000
"""Number of rows at the start of a file that a check parses."""


def check_beginning(path: Path, keys: Sequence[str]) -> None:
    """Raises DataError, with FILE:LINE, if a prompt in the first thousand rows has no value for one of `keys`."""
    with open(path, "rb") as file:
        for number, line in enumerate(itertools.islice(file, _NUM_CHECKED_ROWS if keys else 0), 1):
            where = f"{path}:{number}"
            row = jsonl.parse(line, where)
            check_row(row, where)
            for key in keys if kind_of(row) in PROMPT_KINDS else ():
                row_entry(row, key, where)


def check_lengths(path: Path, renderer: Renderer, writing: Writing, tokens: int) -> None:
    """Raises DataError, with FILE:LINE, if a prompt in the first thousand rows has more than `tokens` tokens."""
    with open(path, "rb") as file:
        for number, line in enumerate(itertools.islice(file, _NUM_CHECKED_ROWS), 1):
            where = f"{path}:{number}"
            row = jsonl.parse(line, where)
            if kind_of(row) in PROMPT_KINDS:
                entry = read_entry(row, where)
                with add_location(where):
                    ids, _ = _render(entry, renderer, writing)
                _require_length(len(ids), tokens, where)


def _require_length(length: int, tokens: int, where: str) -> None:
    if length > tokens:
        raise DataError(
            f"{where}: the prompt has {length} tokens, but data.prompts.sequence_tokens is {tokens}. Raise it, or set "
            "data.long_prompts: leave_out."
        )


def _render(entry: Entry, renderer: Renderer, writing: Writing) -> tuple[list[int], Sequence[Message]]:
    """The ids and messages of the prompt in a row."""
    has_answer = not entry.is_prompt and not entry.replies
    messages, answer = (entry.messages[:-1], entry.messages[-1]) if has_answer else (entry.messages, None)
    return render_prompt(renderer, writing, messages, answer), messages


class Prompts:
    """The prompts of a split: conversations up to their last answer or ranked replies, and rows with only a prompt."""

    def __init__(self, rows: ConversationRows, renderer: Renderer, writing: Writing, name: str) -> None:
        """name: the data's name in messages."""
        self._rows, self.renderer, self._writing, self._name = rows, renderer, writing, name
        self._row_indices: Sequence[int] = rows.numbers_of(*PROMPT_KINDS)

    def limit(self, tokens: int, long: Literal["refuse", "leave_out"]) -> None:
        """Skip prompts that have more than `tokens` tokens, or raise an error for them.

        Raises:
            DataError: a prompt is too long and `long` is "refuse", or all prompts are too long.
        """
        lengths = [len(self[index].ids) for index in range(len(self))]
        fit = [row for row, length in zip(self._row_indices, lengths, strict=True) if length <= tokens]
        longer = next((index for index, length in enumerate(lengths) if length > tokens), None)
        if longer is not None and (long == "refuse" or not fit):
            _require_length(lengths[longer], tokens, self._rows.location(self._row_indices[longer]))
        if not fit:
            raise DataError(f"{self._name}: no conversation has a prompt.")
        if longer is not None:
            left_out = len(lengths) - len(fit)
            log.info(
                "%s: %d of %d prompts have more than %d tokens and are skipped.",
                self._name,
                left_out,
                len(lengths),
                tokens,
            )
        self._row_indices = fit

    def require(self, keys: Sequence[str]) -> None:
        """Raises DataError, with FILE:LINE, if a prompt's row has no value for one of `keys`."""
        for number, key in itertools.product(self._row_indices if keys else (), keys):
            row_entry(self._rows[number], key, self._rows.location(number))

    def __len__(self) -> int:
        return len(self._row_indices)

    def __getitem__(self, index: int) -> Prompt:
        number = self._row_indices[index]
        entry = self._rows.entry(number)
        with self._rows.add_location(number):
            ids, messages = _render(entry, self.renderer, self._writing)
        return Prompt(ids, messages, self._rows[number])

    def collate(self, prompts: Sequence[Prompt]) -> TokenBatch:
        """Pad on the left, for `generate`."""
        from src.data.collate import pad_tokens

        ids = [prompt.ids for prompt in prompts]
        return pad_tokens(ids, [[False] * len(row) for row in ids], self.renderer.safe.pad_id, pad_left=True)
