"""SQuAD 1.1, 2.0 and sets of their layout, as XQuAD: articles of paragraphs with questions, or a row a question."""

from collections.abc import Iterator
from typing import Any

from data_prep.crossattn.qa_releases.question import (
    UNANSWERABLE,
    Passage,
    Question,
    clean_answers,
    field,
    identifier,
    passages,
    text,
)
from src.errors import DataError

DESCRIPTION = (
    'SQuAD 1.1 or 2.0: {"data": [{"title", "paragraphs": [{"context", "qas": [{"id", "question", "answers"}]}]}]}'
)


def fits(record: dict[str, Any]) -> bool:
    """True for an article, or a row {"id", "title", "context", "question", "answers"}."""
    return "paragraphs" in record or (
        {"question", "answers"} <= record.keys() and isinstance(record.get("context"), str)
    )


def questions(record: dict[str, Any], where: str) -> Iterator[Question]:
    """The questions of one article, or of one row. A question marked `is_impossible` is UNANSWERABLE.

    Raises:
        DataError: a field is missing or malformed.
    """
    title = field(record, "title", str, where) if "title" in record else ""
    if "paragraphs" not in record:
        yield _question(record, title.replace("_", " "), field(record, "context", str, where), where)
        return
    for p, paragraph in enumerate(field(record, "paragraphs", list[dict], where)):
        place = f"{where}, paragraphs[{p}]"
        context = field(paragraph, "context", str, place)
        for q, asked in enumerate(field(paragraph, "qas", list[dict], place)):
            yield _question(asked, title.replace("_", " "), context, f"{place}.qas[{q}]")


def _question(asked: dict[str, Any], title: str, context: str, where: str) -> Question:
    columns = isinstance(asked.get("answers"), dict)  # {"text": [...], "answer_start": [...]}, as in rows
    if columns:
        given = field(asked["answers"], "text", list[str], f"{where}: field 'answers'")
    else:
        given = [field(answer, "text", str, where) for answer in field(asked, "answers", list[dict], where)]
    impossible = asked.get("is_impossible")
    if impossible is not None and not isinstance(impossible, bool):
        raise DataError(
            f"{where}: field 'is_impossible': expected true or false, got {impossible!r} ({type(impossible).__name__})."
        )
    if not given and not impossible and not columns:
        raise DataError(f"{where}: no answers, and not marked 'is_impossible'.")
    return Question(
        where=where,
        id=identifier(asked, "id", where),
        text=text(field(asked, "question", str, where), "question", where),
        answers=clean_answers(given, where) if given and not impossible else (UNANSWERABLE,),
        passages=passages([Passage(text(context, "context", where) and context, title, useful=True)]),
        dataset="squad" if impossible is None else "squad_v2",
    )
