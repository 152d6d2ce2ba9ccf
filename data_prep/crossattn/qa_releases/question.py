"""A question of a release, and the checks that all layouts share."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from src.data import jsonl
from src.errors import DataError

UNANSWERABLE = "UNANSWERABLE"
"""The answer to a question that its context does not answer."""


@dataclass(frozen=True)
class Passage:
    """One context of a question."""

    text: str
    title: str = ""
    useful: bool | None = None
    """Whether it supports the answer. None: not known."""


@dataclass(frozen=True)
class Question:
    """One question with its passages and answers."""

    where: str
    """The place in the release, for messages."""
    id: str | None
    """The release's own; None if it has none."""
    text: str
    answers: tuple[str, ...]
    """Distinct accepted answers, the best first; (UNANSWERABLE,) if there is none."""
    passages: tuple[Passage, ...]
    dataset: str
    """The group of its scores."""
    family: str | None = None
    """Questions of one family belong in one split; None: those of one useful passage do."""


@dataclass(frozen=True)
class Skipped:
    """A question that cannot be asked."""

    reason: str


def field(record: Mapping[str, Any], name: str, kind: Any, where: str) -> Any:
    """A required field of a record of type `kind`, such as `str` or `list[dict]`.

    Raises:
        DataError: it is missing or of another type, or holds half a surrogate pair.
    """
    if name not in record:
        raise DataError(f"{where}: field {name!r} is missing. Fields: {', '.join(record) or 'none'}.")
    jsonl.check_type(record[name], kind, f"{where}: field {name!r}")
    return record[name]


def identifier(record: Mapping[str, Any], name: str, where: str) -> str:
    """A field that is a number or a text, as text.

    Raises:
        DataError: it is missing or neither.
    """
    if type(record.get(name)) is int:
        return str(record[name])
    return field(record, name, str, where)


def text(value: str, what: str, where: str) -> str:
    """`value` without white space around it.

    Raises:
        DataError: nothing is left.
    """
    if not (stripped := value.strip()):
        raise DataError(f"{where}: the {what} is empty.")
    return stripped


def clean_answers(answers: Iterable[str], where: str) -> tuple[str, ...]:
    """The answers that are not blank, each once, "yes" and "no" as Yes and No.

    Raises:
        DataError: none is left.
    """
    kept = tuple(dict.fromkeys(_capitalize_yes_no(answer.strip()) for answer in answers if answer.strip()))
    if not kept:
        raise DataError(f"{where}: every answer is empty. A question without an answer must be marked as one.")
    return kept


def passages(found: Iterable[Passage]) -> tuple[Passage, ...]:
    """The passages that are not blank, each text once; useful if any copy is."""
    kept: dict[str, Passage] = {}
    for passage in found:
        if passage.text.strip() and (passage.text not in kept or (passage.useful and not kept[passage.text].useful)):
            kept[passage.text] = passage
    return tuple(kept.values())


def _capitalize_yes_no(answer: str) -> str:
    return answer.capitalize() if answer.lower() in {"yes", "no"} else answer
