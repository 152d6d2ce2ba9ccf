"""Dense Passage Retrieval (Karpukhin et al., 2020): passages with the answer, and hard negatives of a retriever."""

from collections.abc import Iterator
from typing import Any

from data_prep.crossattn.qa_releases.question import Passage, Question, Skipped, clean_answers, field, passages, text

DESCRIPTION = (
    'DPR: [{"question", "answers", "positive_ctxs": [{"title", "text"}], "hard_negative_ctxs", "negative_ctxs"}]'
)
MANY_DISTRACTORS = True
"""There are up to 150 for a question, so the user must choose a number."""


def fits(record: dict[str, Any]) -> bool:
    """True for a question with `positive_ctxs`."""
    return "positive_ctxs" in record


def questions(record: dict[str, Any], where: str) -> Iterator[Question | Skipped]:
    """One question: the positive passages are useful; of the others the hard ones come first, as ranked in the file.

    Raises:
        DataError: a field is missing or malformed.
    """
    found = []
    for name, useful in (("positive_ctxs", True), ("hard_negative_ctxs", False), ("negative_ctxs", False)):
        if name in record or useful:
            for i, c in enumerate(field(record, name, list[dict], where)):
                place = f"{where}: {name}[{i}]"
                found.append(
                    Passage(
                        field(c, "text", str, place), field(c, "title", str, place) if c.get("title") else "", useful
                    )
                )
    kept = passages(found)
    if not any(passage.useful for passage in kept):
        yield Skipped("no passage holds the answer")
        return
    named = field(record, "dataset", str, where) if "dataset" in record else "dpr"
    yield Question(
        where=where,
        id=None,
        text=text(field(record, "question", str, where), "question", where),
        answers=clean_answers(field(record, "answers", list[str], where), where),
        passages=kept,
        dataset=named.partition("_")[0],
    )
