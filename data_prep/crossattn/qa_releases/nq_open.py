"""NQ-open: questions with answers and no context, to filter Natural Questions or to train without contexts."""

from collections.abc import Iterator
from typing import Any

from data_prep.crossattn.qa_releases.question import Question, Record, clean_answers

DESCRIPTION = 'NQ-open: lines {"question", "answer": [text]}; it has no contexts'


def fits(record: dict[str, Any]) -> bool:
    """True for a question with a list of answers and no context."""
    return "question" in record and isinstance(record.get("answer"), list)


def questions(record: Record) -> Iterator[Question]:
    """Yield one question without passages.

    Raises:
        DataError: a field is missing or malformed.
    """
    yield Question(
        where=record.where,
        id=None,
        text=record.text("question"),
        answers=clean_answers(record.require("answer", list[str]), record.where),
        passages=(),
        dataset="nq_open",
    )
