"""T5's preprocessing of the rows of MultiRC, ReCoRD, WSC and DPR (Google's t5.data.preprocessors).

Each function takes a record of the original release or a row of the hub, and yields records with the columns of the
task.
"""

import logging
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from src.data.jsonl import check_type
from src.errors import DataError

log = logging.getLogger(__name__)
Record = dict[str, Any]
_TAG = re.compile("</?b>")
_HIGHLIGHT_AFTER_A_STOP = re.compile(r"([.?!\"'])\n@highlight\n")


def multirc(record: Record, split: str, where: str) -> Iterator[Record]:
    """Yield one record per answer; "group" is its question."""
    del split
    if "paragraph" in record:
        index = _get(record, "idx", dict, where)
        group = f"{index.get('paragraph')}-{index.get('question')}"
        texts = {name: _without_markup(_get(record, name, str, where)) for name in ("question", "answer", "paragraph")}
        yield {**texts, "label": record.get("label"), "group": group, "index": index.get("answer")}
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
                "index": answer.get("idx"),
            }


def _without_markup(text: str) -> str:
    return _TAG.sub("", text.replace("<br>", " "))


def record(record: Record, split: str, where: str) -> Iterator[Record]:
    """Yield one record per answer for training, else one record per question with all "answers".

    Entities and answers are listed once, in alphabetical order, as in the rows of the hub.
    """
    passage = record.get("passage")
    if isinstance(passage, str):
        entities = _get(record, "entities", list, where)
        answers = _get(record, "answers", list, where)
        questions = [(_get(record, "query", str, where), answers, record.get("idx"))]
        text = passage
    else:
        passage = _get(record, "passage", dict, where)
        text = _get(passage, "text", str, where)
        entities = [
            text[_get(entity, "start", int, where) : _get(entity, "end", int, where) + 1]
            for entity in _get(passage, "entities", list, where)
        ]
        questions = []
        for number, qa in enumerate(_get(record, "qas", list, where)):
            query = _get(qa, "query", str, where)
            answers = [] if qa.get("answers") is None else _get(qa, "answers", list, where)
            questions.append((query, [_get(answer, "text", str, where) for answer in answers], qa.get("idx", number)))
    text = _HIGHLIGHT_AFTER_A_STOP.sub(r"\1 ", text).replace("\n@highlight\n", ". ")
    for query, answers, numbers in questions:
        check_type(entities, list[str], f"{where}: field 'entities'")
        check_type(answers, list[str], f"{where}: field 'answers'")
        index = numbers.get("query") if isinstance(numbers, dict) else numbers
        columns = {"query": query, "entities": ", ".join(sorted(set(entities))), "passage": text}
        answers = sorted(set(answers))
        for label in (answers if split == "train" else answers[:1]) or [None]:
            yield {**columns, "label": label, "answers": answers or None, "group": str(index)}


def wsc(record: Record, split: str, where: str) -> Iterator[Record]:
    """Mark the noun with asterisks and the pronoun with number signs.
    A span that is not at its word index is not marked, as in T5."""
    del split
    target = record.get("target") or record
    noun, noun_at = _get(target, "span1_text", str, where), _get(target, "span1_index", int, where)
    pronoun, pronoun_at = _get(target, "span2_text", str, where), _get(target, "span2_index", int, where)
    text = _get(record, "text", str, where)
    noun, pronoun = _fitted_span(text, noun, noun_at), _fitted_span(text, pronoun, pronoun_at)
    text = _mark_span(text, noun, noun_at, "*", where)
    # The marks around the noun add two words.
    text = _mark_span(text, pronoun, pronoun_at + 2 * (noun_at < pronoun_at), "#", where)
    yield {"text": text, "label": record.get("label"), "index": record.get("idx")}


def wsc_simple(record: Record, split: str, where: str) -> Iterator[Record]:
    """Mark the pronoun with asterisks; the label is the noun that it refers to.
    Rows with a noun that the pronoun does not refer to are dropped.

    The index of the pronoun counts words of the text split at blanks (Raffel et al. 2020, section 2.4).
    """
    del split
    target = record.get("target") or record
    if str(record.get("label")) in ("False", "0"):
        return
    text, noun, noun_at = (
        _get(record, "text", str, where),
        _get(target, "span1_text", str, where),
        _get(target, "span1_index", int, where),
    )
    pronoun, pronoun_at = _get(target, "span2_text", str, where), _get(target, "span2_index", int, where)
    label = None if record.get("label") is None else _fitted_span(text, noun, noun_at)
    words = text.split(" ")
    # In one row of the release, the index is that of the previous word.
    places = [
        place for place in (pronoun_at, pronoun_at + 1) if 0 <= place < len(words) and words[place].startswith(pronoun)
    ]
    if places:
        words[places[0]] = f"*{pronoun}*{words[places[0]].removeprefix(pronoun)}"
    else:
        log.warning("%s: %r is not at word %d of %r; it is not marked.", where, pronoun, pronoun_at, text[:80])
    yield {"text": " ".join(words), "label": label, "index": record.get("idx")}


def dpr(record: Record, split: str, where: str) -> Iterator[Record]:
    """Definite pronoun resolution (Rahman & Ng 2012): like `wsc_simple`. Marks the first of equal pronouns."""
    del split
    sentence, pronoun = _get(record, "sentence", str, where), _get(record, "pronoun", str, where)
    candidates, label = _get(record, "candidates", list, where), record.get("label")
    if label is not None and not (type(label) is int and 0 <= label < len(candidates)):
        raise DataError(f"{where}: label: expected the index of one of {len(candidates)} candidates, got {label!r}.")
    text = re.sub(rf" ({re.escape(pronoun)})( |\.|,)", r" *\1*\2", sentence, count=1)
    yield {"text": text, "label": None if label is None else candidates[label], "index": record.get("idx")}


def _fitted_span(text: str, span: str, word: int) -> str:
    """`span` as it is written in `text`.
    Some spans of the release have another case, a full stop or line ends (wsc.fixed of TFDS)."""
    words = text.split()
    if span in text or not span or not 0 <= word < len(words):
        return span
    first = span[0].lower() if words[word][0].islower() else span[0].upper()
    candidate = f"{first}{span[1:]}".rstrip(".").replace("\n", " ")
    return candidate if candidate in text else span


def _mark_span(text: str, span: str, word: int, mark: str, where: str) -> str:
    """Put marks around `span` if it starts at word `word`; else return `text` unchanged."""
    match = 0 <= word < len(text) and re.match(rf"((?:\S+\s){{{word}}}){re.escape(span)}", text)
    if not match:
        log.warning("%s: %r is not at word %d of %r; it is not marked.", where, span, word, text[:80])
        return text
    return f"{match[1]}{mark} {span} {mark}{text[match.end() :]}"


def _get(record: Mapping[str, Any], name: str, kind: type, where: str) -> Any:
    value = record.get(name) if isinstance(record, Mapping) else None
    if type(value) is not kind:
        raise DataError(
            f"{where}: field {name!r}: expected {kind.__name__}, got {str(value)[:60]!r} ({type(value).__name__})."
        )
    return value


FORMS: dict[str, Callable[[Record, str, str], Iterator[Record]]] = {
    "multirc": multirc,
    "record": record,
    "wsc": wsc,
    "wsc_simple": wsc_simple,
    "dpr": dpr,
}
