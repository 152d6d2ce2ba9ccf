"""Question of a release, and checks that all layouts share."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from src.data import jsonl
from src.errors import DataError

UNANSWERABLE = "UNANSWERABLE"
"""Answer of questions that their context does not answer."""


@dataclass(frozen=True)
class Passage:
    """One context of a question."""

    text: str
    title: str = ""
    useful: bool | None = None
    """Whether it supports the answer. None: unknown."""


@dataclass(frozen=True)
class Question:
    """One question with its passages and answers."""

    where: str
    """Place in the release, for error messages."""
    id: str | None
    """ID in the release; None if it has no ID."""
    text: str
    answers: tuple[str, ...]
    """Distinct accepted answers, best first; (UNANSWERABLE,) if there is no answer."""
    passages: tuple[Passage, ...]
    dataset: str
    """Name under which its scores are grouped."""
    family: str | None = None
    """All questions of a family are in the same split. None: all questions with the same useful passage are."""


@dataclass(frozen=True)
class Skipped:
    """A question that is dropped, and why."""

    reason: str


class Record(dict[str, Any]):
    """Record of a release, or an object in it. The methods check a field, and raise DataError with the place."""

    def __init__(self, fields: Mapping[str, Any], where: str) -> None:
        super().__init__(fields)
        self.where = where

    def require(self, name: str, kind: Any) -> Any:
        """A field of type `kind`, such as `str` or `list[dict]`, without unpaired surrogates."""
        if name not in self:
            raise DataError(f"{self.where}: field {name!r} is missing. Fields: {', '.join(self) or 'none'}.")
        jsonl.check_type(self[name], kind, f"{self.where}: field {name!r}")
        return self[name]

    def optional(self, name: str, kind: Any, default: Any) -> Any:
        """A field of type `kind`, or `default` if it is missing or empty."""
        return self.require(name, kind) if self.get(name) else default

    def text(self, name: str) -> str:
        """A text that is not blank, without white space around it."""
        if not (text := self.require(name, str).strip()):
            raise DataError(f"{self.where}: field {name!r}: expected text, got blank text.")
        return text

    def identifier(self, name: str) -> str:
        """A field that is a number or a text, converted to text."""
        return str(self[name]) if type(self.get(name)) is int else self.require(name, str)

    def inner(self, name: str) -> "Record":
        """A field that is an object."""
        return Record(self.require(name, dict), f"{self.where}: field {name!r}")

    def objects(self, name: str) -> "list[Record]":
        """A field that is a list of objects."""
        return [Record(each, f"{self.where}: {name}[{i}]") for i, each in enumerate(self.require(name, list[dict]))]

    def parallel(self, **kinds: Any) -> list[tuple[Any, ...]]:
        """Zip fields that are lists of equal length. kinds: {field: type}."""
        lists = [self.require(name, kind) for name, kind in kinds.items()]
        if len(set(map(len, lists))) > 1:
            lengths = " and ".join(f"{len(values)} of {name!r}" for name, values in zip(kinds, lists, strict=True))
            raise DataError(f"{self.where}: expected lists of equal length, got {lengths}.")
        return list(zip(*lists, strict=True))


def clean_answers(answers: Iterable[str], where: str) -> tuple[str, ...]:
    """Distinct answers that are not blank, with "yes" and "no" capitalized.

    Raises:
        DataError: all answers are blank.
    """
    non_empty = [answer.strip() for answer in answers if answer.strip()]
    if not non_empty:
        raise DataError(f"{where}: all answers are blank. Add one, or mark the question as unanswerable.")
    return tuple(dict.fromkeys(text.capitalize() if text.lower() in {"yes", "no"} else text for text in non_empty))


def passages(candidates: Iterable[Passage]) -> tuple[Passage, ...]:
    """Distinct passages that are not blank. A passage is useful if any of its copies is."""
    distinct_passages: dict[str, Passage] = {}
    for passage in candidates:
        if passage.text.strip() and (
            passage.text not in distinct_passages or (passage.useful and not distinct_passages[passage.text].useful)
        ):
            distinct_passages[passage.text] = passage
    return tuple(distinct_passages.values())
