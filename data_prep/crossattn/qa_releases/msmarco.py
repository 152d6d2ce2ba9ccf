"""MS MARCO question answering, v1.1 (lines) and v2.1 (columns): ten passages per query, some selected by annotators."""

from collections.abc import Iterator
from typing import Any

from data_prep.crossattn.qa_releases.question import (
    UNANSWERABLE,
    Passage,
    Question,
    Record,
    Skipped,
    clean_answers,
    passages,
)

DESCRIPTION = (
    'MS MARCO: {"query_id", "query", "passages": [{"is_selected", "passage_text", "url"}], "answers"}, '
    "in lines or in columns"
)
COLUMNS = ("query_id", "query", "passages", "answers")
NO_ANSWER = "no answer present."


def fits(record: dict[str, Any]) -> bool:
    """True for a query with passages."""
    return {"query", "passages"} <= record.keys()


def questions(record: Record) -> Iterator[Question | Skipped]:
    """Yield one query. "No Answer Present." is UNANSWERABLE; `wellFormedAnswers`, which are sentences, are ignored.

    Raises:
        DataError: a field is missing or malformed.
    """
    answers = [answer for answer in record.require("answers", list[str]) if answer.strip()]
    if not answers:
        yield Skipped("no answer is given")
        return
    fields: dict[str, Any] = {"passage_text": str, "is_selected": int}
    if isinstance(record["passages"], dict):  # two lists, as in rows of the hub
        marked_texts = record.inner("passages").parallel(**{name: list[kind] for name, kind in fields.items()})
    else:
        marked_texts = [
            tuple(each.require(name, kind) for name, kind in fields.items()) for each in record.objects("passages")
        ]
    contexts = passages(Passage(text, useful=bool(mark)) for text, mark in marked_texts)
    if not contexts:
        yield Skipped("no passage has any text")
        return
    real = [answer for answer in answers if answer.strip().lower() != NO_ANSWER]
    yield Question(
        where=record.where,
        id=record.identifier("query_id"),
        text=record.text("query"),
        answers=clean_answers(real, record.where) if real else (UNANSWERABLE,),
        passages=contexts,
        dataset="msmarco",
    )
