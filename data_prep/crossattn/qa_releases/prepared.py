"""Rows that are already prepared, as published with `datasets` or written by data_prep.crossattn.prepare_qa."""

from collections.abc import Iterator
from typing import Any

from data_prep.crossattn.qa_releases.question import Passage, Question, Record, Skipped, clean_answers, passages
from src.errors import DataError

DESCRIPTION = (
    'prepared data: {"contexts_list", "titles_list", "useful_contexts", "question", "answer", "dataset"}, '
    "as xc-cache has it"
)
DROPPED = ("encoder_hidden_states",)
"""Fields of many megabytes that are not read; `data_prep.crossattn.preproc_nq` encodes the contexts again."""


def fits(record: dict[str, Any]) -> bool:
    """True for a row of prepared data with its list of contexts."""
    return {"contexts_list", "question", "answer", "dataset"} <= record.keys()


def questions(record: Record) -> Iterator[Question | Skipped]:
    """Yield the question of one row. Contexts can be marked as useful or not.

    `sample_idx` is not read because rows are renumbered, nor `context`, which joins the useful contexts.

    Raises:
        DataError: a field is missing or malformed, or the lists have different lengths.
    """
    texts = record.require("contexts_list", list[str])
    titles = record.optional("titles_list", list[str], [""] * len(texts))
    marks = record.optional("useful_contexts", list[int], [None] * len(texts))
    for name, values in (("titles_list", titles), ("useful_contexts", marks)):
        if len(values) != len(texts):
            raise DataError(
                f"{record.where}: field {name!r}: expected {len(texts)} values, one per context, got {len(values)}."
            )
    contexts = passages(
        Passage(passage, title, None if mark is None else bool(mark))
        for passage, title, mark in zip(texts, titles, marks, strict=True)
    )
    if not contexts:
        yield Skipped("no context has any text")
        return
    yield Question(
        where=record.where,
        id=record.identifier("id") if record.get("id") is not None else None,
        text=record.text("question"),
        answers=clean_answers(
            [record.require("answer", str), *record.optional("answers", list[str], [])], record.where
        ),
        passages=contexts,
        dataset=record.text("dataset"),
    )
