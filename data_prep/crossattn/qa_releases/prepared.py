"""Prepared questions, in the fields of prepared data: as published with `datasets`, or by
data_prep.crossattn.prepare_qa."""

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
from src.errors import DataError

DESCRIPTION = (
    'prepared data: {"contexts_list", "titles_list", "useful_contexts", "question", "answer", "dataset"}, '
    "as xc-cache has it"
)
DROPPED = ("encoder_hidden_states",)
"""Fields of many megabytes that are not read: `data_prep.crossattn.preproc_nq` encodes contexts again."""


def fits(record: dict[str, Any]) -> bool:
    """True for a row of prepared data with its list of contexts."""
    return {"contexts_list", "question", "answer", "dataset"} <= record.keys()


def questions(record: dict[str, Any], where: str) -> Iterator[Question | Skipped]:
    """One row. Contexts may be marked useful or not.

    `sample_idx` is not read, as it is given anew, nor `context`, which the useful ones make up.

    Raises:
        DataError: a field is missing or malformed, or the lists are not of one length.
    """
    texts = field(record, "contexts_list", list[str], where)
    titles = field(record, "titles_list", list[str], where) if record.get("titles_list") else [""] * len(texts)
    marks = field(record, "useful_contexts", list[int], where) if record.get("useful_contexts") else [None] * len(texts)
    for name, values in (("titles_list", titles), ("useful_contexts", marks)):
        if len(values) != len(texts):
            raise DataError(f"{where}: field {name!r}: {len(values)} values for {len(texts)} contexts.")
    kept = passages(
        Passage(passage, title, None if mark is None else bool(mark))
        for passage, title, mark in zip(texts, titles, marks, strict=True)
    )
    if not kept:
        yield Skipped("no context has any text")
        return
    others = field(record, "answers", list[str], where) if record.get("answers") else []
    yield Question(
        where=where,
        id=identifier(record, "id", where) if record.get("id") is not None else None,
        text=text(field(record, "question", str, where), "question", where),
        answers=clean_answers([field(record, "answer", str, where), *others], where),
        passages=kept,
        dataset=text(field(record, "dataset", str, where), "name of the dataset", where),
    )
