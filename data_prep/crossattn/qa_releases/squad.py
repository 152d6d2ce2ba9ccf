"""SQuAD 1.1, 2.0 and data sets of the same layout, such as XQuAD: articles with questions, or a row per question."""

from collections.abc import Iterator
from typing import Any

from data_prep.crossattn.qa_releases.question import UNANSWERABLE, Passage, Question, Record, clean_answers, passages
from src.errors import DataError

DESCRIPTION = (
    'SQuAD 1.1 or 2.0: {"data": [{"title", "paragraphs": [{"context", "qas": [{"id", "question", "answers"}]}]}]}'
)


def fits(record: dict[str, Any]) -> bool:
    """True for an article, or a row {"id", "title", "context", "question", "answers"}."""
    return "paragraphs" in record or (
        {"question", "answers"} <= record.keys() and isinstance(record.get("context"), str)
    )


def questions(record: Record) -> Iterator[Question]:
    """Yield the questions of one article or one row. A question marked `is_impossible` is UNANSWERABLE.

    Raises:
        DataError: a field is missing or malformed.
    """
    title = (record.require("title", str) if "title" in record else "").replace("_", " ")
    if "paragraphs" not in record:
        record.text("context")
        yield _question(record, title, record["context"])
        return
    for paragraph in record.objects("paragraphs"):
        paragraph.text("context")
        for item in paragraph.objects("qas"):
            yield _question(item, title, paragraph["context"])


def _question(item: Record, title: str, context: str) -> Question:
    columns = isinstance(item.get("answers"), dict)  # {"text": [...], "answer_start": [...]}, as in rows
    if columns:
        answer_texts = item.inner("answers").require("text", list[str])
    else:
        answer_texts = [answer.require("text", str) for answer in item.objects("answers")]
    impossible = item.get("is_impossible")
    if impossible is not None:
        item.require("is_impossible", bool)
    if not answer_texts and not impossible and not columns:
        raise DataError(f"{item.where}: no answers. Add one, or set 'is_impossible' to true.")
    return Question(
        where=item.where,
        id=item.identifier("id"),
        text=item.text("question"),
        answers=clean_answers(answer_texts, item.where) if answer_texts and not impossible else (UNANSWERABLE,),
        passages=passages([Passage(context, title, useful=True)]),
        dataset="squad" if impossible is None else "squad_v2",
    )
