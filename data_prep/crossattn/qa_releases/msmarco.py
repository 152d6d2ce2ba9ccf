"""MS MARCO question answering, v1.1 (lines) and v2.1 (columns): ten passages a query, some selected by annotators."""

from collections.abc import Iterator
from typing import Any

from data_prep.crossattn.qa_releases.question import (
    UNANSWERABLE,
    Passage,
    Question,
    Skipped,
    clean_answers,
    field,
    identifier,
    passages,
    text,
)
from src.errors import DataError

DESCRIPTION = (
    'MS MARCO: {"query_id", "query", "passages": [{"is_selected", "passage_text", "url"}], "answers"}, '
    "in lines or in columns"
)
COLUMNS = ("query_id", "query", "passages", "answers")
NO_ANSWER = "no answer present."


def fits(record: dict[str, Any]) -> bool:
    """True for a query with passages."""
    return {"query", "passages"} <= record.keys()


def questions(record: dict[str, Any], where: str) -> Iterator[Question | Skipped]:
    """One query. "No Answer Present." is UNANSWERABLE; `wellFormedAnswers`, whole sentences, are ignored.

    Raises:
        DataError: a field is missing or malformed.
    """
    answers = [answer for answer in field(record, "answers", list[str], where) if answer.strip()]
    if not answers:
        yield Skipped("no answer is given")
        return
    kept = passages(_passages(record, where))
    if not kept:
        yield Skipped("no passage has any text")
        return
    real = [answer for answer in answers if answer.strip().lower() != NO_ANSWER]
    yield Question(
        where=where,
        id=identifier(record, "query_id", where),
        text=text(field(record, "query", str, where), "query", where),
        answers=clean_answers(real, where) if real else (UNANSWERABLE,),
        passages=kept,
        dataset="msmarco",
    )


def _passages(record: dict[str, Any], where: str) -> Iterator[Passage]:
    value = record["passages"]
    place = f"{where}: field 'passages'"
    if isinstance(value, dict):  # two lists, as in rows of the hub
        texts, marks = field(value, "passage_text", list[str], place), field(value, "is_selected", list[int], place)
        if len(texts) != len(marks):
            raise DataError(f"{place}: {len(texts)} texts for {len(marks)} of 'is_selected'.")
        yield from (Passage(text, useful=bool(mark)) for text, mark in zip(texts, marks, strict=True))
        return
    for index, passage in enumerate(field(record, "passages", list[dict], where)):
        mark = field(passage, "is_selected", int, f"{place}[{index}]")
        yield Passage(field(passage, "passage_text", str, f"{place}[{index}]"), useful=bool(mark))
