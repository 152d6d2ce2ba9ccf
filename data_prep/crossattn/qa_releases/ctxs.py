"""Questions with passages: files of "Lost in the Middle" (Liu et al., 2023), oracle or not, and Fusion-in-Decoder."""

from collections.abc import Iterator
from typing import Any

from data_prep.crossattn.qa_releases.question import (
    Passage,
    Question,
    Skipped,
    clean_answers,
    field,
    identifier,
    passages,
    text,
)

DESCRIPTION = (
    'retrieved passages: {"question", "answers", "ctxs": [{"title", "text", "isgold"}]}, with or without "isgold"'
)


def fits(record: dict[str, Any]) -> bool:
    """True for a question with `ctxs`."""
    return "ctxs" in record and "question" in record


def questions(record: dict[str, Any], where: str) -> Iterator[Question | Skipped]:
    """One question. A passage is useful if it is `isgold`; without such marks that is not known.

    The annotated long answer, `nq_annotated_gold`, is not read: its passage stands in `ctxs`.

    Raises:
        DataError: a field is missing or malformed.
    """
    kept = passages(_passage(c, f"{where}: ctxs[{i}]") for i, c in enumerate(field(record, "ctxs", list[dict], where)))
    if not kept:
        yield Skipped("no passage has any text")
        return
    yield Question(
        where=where,
        id=identifier(record, "id", where) if "id" in record else None,
        text=text(field(record, "question", str, where), "question", where),
        answers=clean_answers(field(record, "answers", list[str], where), where),
        passages=kept,
        dataset="nq_open",
    )


def _passage(found: dict[str, Any], where: str) -> Passage:
    useful = field(found, "isgold", bool, where) if found.get("isgold") is not None else None
    return Passage(
        field(found, "text", str, where), field(found, "title", str, where) if found.get("title") else "", useful
    )
