"""A question as a release asks it, and the checks that every layout shares."""

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
    """The answer rests on it. None: the release does not say."""


@dataclass(frozen=True)
class Question:
    """One question with all that the release gives to answer it from."""

    where: str
    """The place in the release, for messages."""
    id: str | None
    """The release's own; None where it has none."""
    text: str
    answers: tuple[str, ...]
    """All that are accepted, the best first, none twice; (UNANSWERABLE,) where there is none."""
    passages: tuple[Passage, ...]
    dataset: str
    """What scores are grouped by."""
    family: str | None = None
    """Questions of one family belong in one split; None: those of one useful passage do."""


@dataclass(frozen=True)
class Skipped:
    """A question that cannot be asked."""

    reason: str


def field(record: Mapping[str, Any], name: str, kind: Any, where: str) -> Any:
    """A field of a record that must be there and be of `kind`, as `str` or `list[dict]`.

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
    """Those that are not blank, each text once; one that is useful anywhere is useful."""
    kept: dict[str, Passage] = {}
    for passage in found:
        if passage.text.strip() and (passage.text not in kept or (passage.useful and not kept[passage.text].useful)):
            kept[passage.text] = passage
    return tuple(kept.values())


def _capitalize_yes_no(answer: str) -> str:
    return answer.capitalize() if answer.lower() in {"yes", "no"} else answer
