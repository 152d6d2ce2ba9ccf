"""T5's preprocessing of the rows of MultiRC, ReCoRD and WSC (Google's t5.data.preprocessors).

Each function takes a record of the original release, or a row of the hub's, and gives records that have the columns of the task.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from src.errors import DataError

Record = dict[str, Any]
_TAG = re.compile("</?b>")
_HIGHLIGHT_AFTER_A_STOP = re.compile(r"([.?!\"'])\n@highlight\n")


def multirc(record: Record, split: str, where: str) -> Iterator[Record]:
    """One record for each answer; "group" is its question."""
    del split
    if "paragraph" in record:
        index = _get(record, "idx", dict, where)
        group = f"{index.get('paragraph')}-{index.get('question')}"
        texts = {name: _without_markup(_get(record, name, str, where)) for name in ("question", "answer", "paragraph")}
        yield {**texts, "label": record.get("label"), "group": group}
        return
    passage = _get(record, "passage", dict, where)
    paragraph = _without_markup(_get(passage, "text", str, where))
    for number, question in enumerate(_get(passage, "questions", list, where)):
        text = _without_markup(_get(question, "question", str, where))
        for answer in _get(question, "answers", list, where):
            yield {
                "question": text,
                "answer": _without_markup(_get(answer, "text", str, where)),
                "paragraph": paragraph,
                "label": answer.get("label"),
                "group": f"{record.get('idx', where)}-{question.get('idx', number)}",
            }


def _without_markup(text: str) -> str:
    return _TAG.sub("", text.replace("<br>", " "))


def record(record: Record, split: str, where: str) -> Iterator[Record]:
    """For training one record for each answer; else one for each question, with all "answers".

    Entities and answers stand once each, in the order of the alphabet, as the hub's rows have them.
    """
    passage = record.get("passage")
    if isinstance(passage, str):
        entities = _get(record, "entities", list, where)
        questions = [(_get(record, "query", str, where), _get(record, "answers", list, where), record.get("idx"))]
        text = passage
    else:
        passage = _get(record, "passage", dict, where)
        text = _get(passage, "text", str, where)
        entities = [text[entity["start"] : entity["end"] + 1] for entity in _get(passage, "entities", list, where)]
        questions = [
            (_get(qa, "query", str, where), [answer["text"] for answer in qa.get("answers", [])], qa.get("idx", number))
            for number, qa in enumerate(_get(record, "qas", list, where))
        ]
    text = _HIGHLIGHT_AFTER_A_STOP.sub(r"\1 ", text).replace("\n@highlight\n", ". ")
    for query, answers, index in questions:
        columns = {"query": query, "entities": ", ".join(sorted(set(entities))), "passage": text}
        answers = sorted(set(answers))
        for label in (answers if split == "train" else answers[:1]) or [None]:
            yield {**columns, "label": label, "answers": answers or None, "group": str(index)}


def wsc(record: Record, split: str, where: str) -> Iterator[Record]:
    """Mark the noun with asterisks and the pronoun with number signs."""
    del split
    target = record.get("target") or record
    noun, noun_at = _get(target, "span1_text", str, where), _get(target, "span1_index", int, where)
    pronoun, pronoun_at = _get(target, "span2_text", str, where), _get(target, "span2_index", int, where)
    text = _mark_span(_get(record, "text", str, where), noun, noun_at, "*", where)
    # The marks around the noun are two words more.
    text = _mark_span(text, pronoun, pronoun_at + 2 * (noun_at < pronoun_at), "#", where)
    yield {"text": text, "label": record.get("label"), "index": record.get("idx")}


def _mark_span(text: str, span: str, word: int, mark: str, where: str) -> str:
    """`text` with marks around `span`, which begins at word number `word`."""
    found = re.match(rf"((?:\S+\s){{{word}}}){re.escape(span)}", text)
    if found is None:
        raise DataError(f"{where}: {span!r} does not stand at word {word} of {text[:80]!r}.")
    return f"{found[1]}{mark} {span} {mark}{text[found.end() :]}"


def _get(record: Mapping[str, Any], name: str, kind: type, where: str) -> Any:
    value = record.get(name) if isinstance(record, Mapping) else None
    if type(value) is not kind:
        raise DataError(f"{where}: expected {kind.__name__} as {name!r}, got {str(value)[:60]!r} ({type(value).__name__}).")
    return value


FORMS: dict[str, Callable[[Record, str, str], Iterator[Record]]] = {"multirc": multirc, "record": record, "wsc": wsc}
