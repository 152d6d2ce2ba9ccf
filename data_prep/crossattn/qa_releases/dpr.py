"""Dense Passage Retrieval (Karpukhin et al., 2020): passages with the answer, and a retriever's hard negatives."""

from collections.abc import Iterator
from typing import Any

from data_prep.crossattn.qa_releases.question import Passage, Question, Record, Skipped, clean_answers, passages

DESCRIPTION = (
    'DPR: [{"question", "answers", "positive_ctxs": [{"title", "text"}], "hard_negative_ctxs", "negative_ctxs"}]'
)
MANY_DISTRACTORS = True
"""A question can have 150 distractors, so the user must choose a number."""


def fits(record: dict[str, Any]) -> bool:
    """True for a question with `positive_ctxs`."""
    return "positive_ctxs" in record


def questions(record: Record) -> Iterator[Question | Skipped]:
    """Yield one question. Positive passages are useful. Hard negatives come before other negatives, as in the file.

    Raises:
        DataError: a field is missing or malformed.
    """
    lists = [("positive_ctxs", True), ("hard_negative_ctxs", False), ("negative_ctxs", False)]
    contexts = passages(
        Passage(item.require("text", str), item.optional("title", str, ""), useful)
        for name, useful in lists
        if name in record or useful
        for item in record.objects(name)
    )
    if not any(passage.useful for passage in contexts):
        yield Skipped("no passage holds the answer")
        return
    dataset_name = record.require("dataset", str) if "dataset" in record else "dpr"
    yield Question(
        where=record.where,
        id=None,
        text=record.text("question"),
        answers=clean_answers(record.require("answers", list[str]), record.where),
        passages=contexts,
        dataset=dataset_name.partition("_")[0],
    )
