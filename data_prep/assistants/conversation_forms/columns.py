"""Fill columns of rows into templates for the question, the answer, and properties of the answer.

"{title}. {answers.text.0}" has the column `title` and the first item of `text` in the column `answers`. "{aliases|any}"
is one item of a list; the same row always gives the same item. `FILTERS` lists the other filters like `any`.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from pydantic import Field, field_validator

from data_prep.assistants.conversation_forms.rows import Form, Row, missing_column, pick, text_of, texts_of
from src.errors import DataError
from src.experiments.config import describe_value, unknown_text

_PLACE = re.compile(r"\{([^{}|]+)((?:\|\w+)*)\}")
_REFERENCES = re.compile(r"\s*\[(?:\d+(?:,\s*\d+)*|[a-zA-Z]|citation needed)\]")
_CHOICE = re.compile(r"\s*answer :.*", re.DOTALL)
_BLANK_LINES = re.compile(r"\n{2,}")
MAX_WORDS = 512


def remove_references(text: str) -> str:
    """Remove references such as [1], [1, 2], [a] and [citation needed]."""
    return _REFERENCES.sub("", text)


FILTERS: dict[str, Callable[[str], str]] = {
    "strip": str.strip,
    "unreferenced": remove_references,
    "before_answer": lambda text: _CHOICE.sub("", text),
    "words": lambda text: " ".join(_BLANK_LINES.sub("\n", text).split(" ")[:MAX_WORDS]),
}
"""Filters of a column value. words: the first 512 words, without blank lines.
`any` selects one item of a list; without it the items are joined."""


class Columns(Form):
    """Templates filled with the columns of a row. Rows without a question or an answer are skipped."""

    user: str | Sequence[str]
    """Template of the question; if there are several, one is chosen for each row."""
    assistant: str | Sequence[str]
    """Template of the answer; if there are several, one is chosen for each row."""
    system: str | None = None
    context: str | None = None
    """Template of the source of the answer."""
    lang: str | None = None
    """Template of the language of question and answer."""
    otherwise: str | None = Field(default=None, min_length=1)
    """Answer to use if the columns of the answer are empty."""

    @field_validator("user", "assistant", "system", "context", "lang")
    @classmethod
    def _check_filters(cls, value: str | Sequence[str] | None) -> str | Sequence[str] | None:
        for text in (value,) if isinstance(value, str) else value or ():
            for name in (name for _, names in _PLACE.findall(text) for name in names.split("|")[1:]):
                if name not in (*FILTERS, "any"):
                    raise ValueError(unknown_text("filter", name, [*FILTERS, "any"]))
        return value

    def read(self, row: Row, where: str) -> Iterator[Row]:
        """See `Form.read`."""
        question, answer = self._choose(self.user, row, where), self._choose(self.assistant, row, where)
        answer = answer if answer.strip() else self.otherwise or ""
        if not question.strip() or not answer.strip():
            return
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        if self.system and (system := fill(self.system, row, where)).strip():
            messages.insert(0, {"role": "system", "content": system})
        if self.context and (context := fill(self.context, row, where)).strip():
            messages[-1]["context"] = context
        if self.lang:
            for message in messages[-2:]:
                message["lang"] = fill(self.lang, row, where)
        yield {"messages": messages}

    def _choose(self, texts: str | Sequence[str], row: Row, where: str) -> str:
        return fill(texts if isinstance(texts, str) else pick(texts, row), row, where).strip(" ")


class Programs(Columns):
    """`Columns` with tests for the program in the answer, saved as "tests". Reward `python` runs them."""

    tests: str
    """Column with a list of tests."""
    setup: str | None = None
    """Column with setup code that every test needs."""

    def read(self, row: Row, where: str) -> Iterator[Row]:
        """See `Form.read`."""
        setup = text_of(row, self.setup, where) if self.setup else ""
        tests = [f"{setup}\n{test}" if setup.strip() else test for test in texts_of(row, self.tests, where)]
        yield from ({**each, "tests": tests} for each in super().read(row, where))


def fill(text: str, row: Row, where: str) -> str:
    """Fill the columns of a row into a template; null becomes an empty text.

    Raises:
        DataError: a column is missing, or its value is not text.
    """

    def value_of(place: re.Match[str]) -> str:
        value, names = look_up(row, place[1], where), place[2].split("|")[1:]
        items = [each for each in value if each is not None] if isinstance(value, list) else [value]
        items = [pick(items, row, place[1])] if "any" in names and items else items
        text = " ".join(_text_of(each, place[1], where) for each in items)
        for name in names:
            text = FILTERS.get(name, str)(text)
        return text

    return _PLACE.sub(value_of, text)


def _text_of(value: Any, path: str, where: str) -> str:
    """A text or number of a row as text; null and NaN, which stands for null in tables, become an empty text."""
    if isinstance(value, dict | list):
        keys = [*value] if isinstance(value, dict) else [0]
        raise DataError(
            f"{where}: column {path!r}: expected text, got {describe_value(value)}. "
            f"Name a part of it, such as {path}.{next(iter(keys), 'text')}."
        )
    return "" if value is None or value != value else str(value)  # noqa: PLR0124  NaN


def is_there(row: Row, path: str) -> bool:
    """Whether a row has the column of a dotted path."""
    return path in row or path.partition(".")[0] in row


def look_up(row: Row, path: str, where: str) -> Any:
    """Value at a dotted path of a row, such as "answers.text.0"; None if a list is shorter or a parent is null.

    A column with the path as its name takes precedence: --columns creates such names.

    Raises:
        DataError: there is no such column.
    """
    value: Any = row
    names = [path] if path in row else path.split(".")
    for depth, name in enumerate(names):
        if isinstance(value, list):
            value = value[int(name)] if name.isdecimal() and int(name) < len(value) else None
        elif isinstance(value, dict) and name in value:
            value = value[name]
        elif value is not None:
            if depth and isinstance(value, dict):
                raise missing_column(value, name, f"{where}: {'.'.join(names[:depth])}")
            raise missing_column(row, path, where)
    return value
