"""TopiOCQA: conversations. The context is the gold passage where the release has it, or else the earlier turns."""

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
    'TopiOCQA: [{"Conversation_no", "Turn_no", "Context": [earlier questions and answers], "Question", "Answer"}]'
)


def fits(record: dict[str, Any]) -> bool:
    """True for a turn of a conversation."""
    return {"Conversation_no", "Turn_no", "Question"} <= record.keys()


def questions(record: dict[str, Any], where: str) -> Iterator[Question | Skipped]:
    """One turn. Its answer may be UNANSWERABLE, spelt as in the release.
    All turns of a conversation belong in one split.

    A file without gold passages tests whether a model remembers the conversation, not whether it reads; its first turns
    have nothing to read and are skipped.

    Raises:
        DataError: a field is missing or malformed.
    """
    turns = field(record, "Context", list[str], where)
    if len(turns) % 2:
        raise DataError(f"{where}: field 'Context': expected questions and answers in turn, got {len(turns)} texts.")
    asked = text(field(record, "Question", str, where), "question", where)
    gold = record.get("Gold_passage")
    if gold is not None:
        gold = field(record, "Gold_passage", dict, where)
        found = Passage(
            field(gold, "text", str, where), field(gold, "title", str, where) if gold.get("title") else "", useful=True
        )
    else:
        said = "\n".join(f"{'A' if i % 2 else 'Q'}: {turn}" for i, turn in enumerate(turns))
        found = Passage(said, useful=True)
    if not (kept := passages([found])):
        yield Skipped("a first turn, without a gold passage: there is nothing to read")
        return
    others = field(record, "Additional_answers", list[dict], where) if record.get("Additional_answers") else []
    yield Question(
        where=where,
        id=f"{identifier(record, 'Conversation_no', where)}/{identifier(record, 'Turn_no', where)}",
        text=asked,
        answers=clean_answers([field(answer, "Answer", str, where) for answer in (record, *others)], where),
        passages=kept,
        dataset="topiocqa",
        family=turns[0] if turns else asked,
    )
