"""TopiOCQA: conversations. The context of a turn is its gold passage if the release has it, else the previous turns."""

from collections.abc import Iterator
from typing import Any

from data_prep.crossattn.qa_releases.question import Passage, Question, Record, Skipped, clean_answers, passages
from src.errors import DataError

DESCRIPTION = (
    'TopiOCQA: [{"Conversation_no", "Turn_no", "Context": [earlier questions and answers], "Question", "Answer"}]'
)


def fits(record: dict[str, Any]) -> bool:
    """True for a turn of a conversation."""
    return {"Conversation_no", "Turn_no", "Question"} <= record.keys()


def questions(record: Record) -> Iterator[Question | Skipped]:
    """Yield one turn. Its answer can be UNANSWERABLE, which the release spells the same.
    All turns of a conversation are in the same split.

    A file without gold passages tests whether a model remembers the conversation, not whether it reads; the first
    turns have no context and are skipped.

    Raises:
        DataError: a field is missing or malformed.
    """
    turns = record.require("Context", list[str])
    if len(turns) % 2:
        raise DataError(
            f"{record.where}: field 'Context': expected alternating questions and answers, got an odd number of "
            f"texts ({len(turns)})."
        )
    question_text = record.text("Question")
    if record.get("Gold_passage") is not None:
        gold = record.inner("Gold_passage")
        passage = Passage(gold.require("text", str), gold.optional("title", str, ""), useful=True)
    else:
        dialogue = "\n".join(f"{'A' if i % 2 else 'Q'}: {turn}" for i, turn in enumerate(turns))
        passage = Passage(dialogue, useful=True)
    if not (contexts := passages([passage])):
        yield Skipped("a first turn, without a gold passage: there is nothing to read")
        return
    others = record.objects("Additional_answers") if record.get("Additional_answers") else []
    yield Question(
        where=record.where,
        id=f"{record.identifier('Conversation_no')}/{record.identifier('Turn_no')}",
        text=question_text,
        answers=clean_answers([answer.require("Answer", str) for answer in (record, *others)], record.where),
        passages=contexts,
        dataset="topiocqa",
        family=turns[0] if turns else question_text,
    )
