"""Questions with passages, as in "Lost in the Middle" (Liu et al., 2023; oracle or not) and Fusion-in-Decoder."""

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
    """Yield one question. A passage is useful if `isgold` is true; without `isgold`, usefulness is unknown.

    The annotated long answer, `nq_annotated_gold`, is not read: its passage is in `ctxs`.

    Raises:
        DataError: a field is missing or malformed.
    """
    contexts = passages(_passage(item) for item in record.objects("ctxs"))
    if not contexts:
        yield Skipped("no passage has any text")
        return
    yield Question(
        where=record.where,
        id=record.identifier("id") if "id" in record else None,
        text=record.text("question"),
        answers=clean_answers(record.require("answers", list[str]), record.where),
        passages=contexts,
        dataset="nq_open",
    )


def _passage(item: Record) -> Passage:
    useful = item.require("isgold", bool) if item.get("isgold") is not None else None
    return Passage(item.require("text", str), item.optional("title", str, ""), useful)
