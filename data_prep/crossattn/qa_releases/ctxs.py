"""Questions with passages: files of "Lost in the Middle" (Liu et al., 2023), oracle or not, and Fusion-in-Decoder."""

from collections.abc import Iterator
from typing import Any

from data_prep.crossattn.qa_releases.question import Passage, Question, Record, Skipped, clean_answers, passages

DESCRIPTION = (
    'retrieved passages: {"question", "answers", "ctxs": [{"title", "text", "isgold"}]}, with or without "isgold"'
)


def fits(record: dict[str, Any]) -> bool:
    """True for a question with `ctxs`."""
    return "ctxs" in record and "question" in record


def questions(record: Record) -> Iterator[Question | Skipped]:
    """One question. A passage is useful if it is `isgold`; without such marks that is not known.

    The annotated long answer, `nq_annotated_gold`, is not read: its passage stands in `ctxs`.

    Raises:
        DataError: a field is missing or malformed.
    """
    kept = passages(_passage(found) for found in record.objects("ctxs"))
    if not kept:
        yield Skipped("no passage has any text")
        return
    yield Question(
        where=record.where,
        id=record.identifier("id") if "id" in record else None,
        text=record.text("question"),
        answers=clean_answers(record.require("answers", list[str]), record.where),
        passages=kept,
        dataset="nq_open",
    )


def _passage(found: Record) -> Passage:
    useful = found.require("isgold", bool) if found.get("isgold") is not None else None
    return Passage(found.require("text", str), found.optional("title", str, ""), useful)
