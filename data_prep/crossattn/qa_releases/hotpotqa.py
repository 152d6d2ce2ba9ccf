"""HotpotQA and 2WikiMultihopQA: ten paragraphs per question; the supporting facts name the useful ones."""

from collections.abc import Iterator
from typing import Any

from data_prep.crossattn.qa_releases.question import Passage, Question, Record, Skipped, clean_answers, passages
from src.errors import DataError

DESCRIPTION = (
    'HotpotQA: [{"_id", "question", "answer", "supporting_facts": [[title, sentence]], '
    '"context": [[title, [sentence]]]}]'
)
SHUFFLED = True
"""The order of the paragraphs can reveal the useful ones."""


def fits(record: dict[str, Any]) -> bool:
    """True for a question with supporting facts, or for one of the hidden test set."""
    return "supporting_facts" in record or ("_id" in record and isinstance(record.get("context"), list))


def questions(record: Record) -> Iterator[Question | Skipped]:
    """Yield one question. A paragraph is useful if a supporting fact has its title.

    Raises:
        DataError: a field is missing or malformed.
    """
    if "answer" not in record and "supporting_facts" not in record:
        yield Skipped("no answer is given, as in the hidden test set")
        return
    facts = {title for title, _ in _pairs(record, "supporting_facts", "sent_id")}
    paragraphs = []
    for title, sentences in _pairs(record, "context", "sentences"):
        if not isinstance(sentences, list) or not all(isinstance(sentence, str) for sentence in sentences):
            raise DataError(
                f"{record.where}: field 'context': expected a list of sentences for {title!r}, "
                f"got {str(sentences)[:60]!r} ({type(sentences).__name__})."
            )
        # Every sentence except the first starts with a space.
        paragraphs.append(Passage("".join(sentences).strip(), title, useful=title in facts))
    contexts = passages(paragraphs)
    if not contexts:
        yield Skipped("no paragraph has any text")
        return
    yield Question(
        where=record.where,
        id=record.identifier("_id" if "_id" in record else "id"),
        text=record.text("question"),
        answers=clean_answers([record.require("answer", str)], record.where),
        passages=contexts,
        dataset="hotpotqa",
    )


def _pairs(record: Record, name: str, second: str) -> list[tuple[Any, ...]]:
    """(title, value) pairs. The release has a list of pairs, rows of the hub have two lists."""
    if isinstance(record.get(name), dict):
        return record.inner(name).parallel(**{"title": list[str], second: list})
    pairs = record.require(name, list[list])
    for index, pair in enumerate(pairs):
        if len(pair) != 2 or not isinstance(pair[0], str):
            raise DataError(
                f"{record.where}: field {name!r}[{index}]: expected [title, {second}], got {str(pair)[:60]}."
            )
    return [(pair[0], pair[1]) for pair in pairs]
