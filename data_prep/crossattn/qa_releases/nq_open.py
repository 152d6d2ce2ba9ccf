"""NQ-open: questions with accepted answers and no context, to filter Natural Questions or to read without contexts."""

from collections.abc import Iterator
from typing import Any

from data_prep.crossattn.qa_releases.question import Question, clean_answers, field, text

DESCRIPTION = 'NQ-open: lines {"question", "answer": [text]}; it has no contexts'


def fits(record: dict[str, Any]) -> bool:
    """True for a question with a list of answers and no context."""
    return "question" in record and isinstance(record.get("answer"), list)


def questions(record: dict[str, Any], where: str) -> Iterator[Question]:
    """One question without passages.

    Raises:
        DataError: a field is missing or malformed.
    """
    yield Question(
        where=where,
        id=None,
        text=text(field(record, "question", str, where), "question", where),
        answers=clean_answers(field(record, "answer", list[str], where), where),
        passages=(),
        dataset="nq_open",
    )
