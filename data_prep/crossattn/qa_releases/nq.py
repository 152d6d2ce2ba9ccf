"""Natural Questions (Kwiatkowski et al., 2019): simplified lines, original lines of html tokens, rows of the hub."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qs, urlsplit

from data_prep.crossattn.qa_releases.question import (
    UNANSWERABLE,
    Passage,
    Question,
    Skipped,
    clean_answers,
    field,
    identifier,
    text,
)
from src.errors import DataError

DESCRIPTION = (
    'Natural Questions: lines with "annotations" and "document_text" (simplified) or "document_tokens" (original)'
)

_TAG = re.compile(
    r"</?[A-Z][A-Za-z0-9]*(_[^>]*)?>"
)  # in the simplified text, where <Td colspan="2"> is <Td_colspan="2">
_SPELLED = {"YES": "Yes", "NO": "No", 1: "Yes", 0: "No"}  # of the release, and of rows of the hub
_FEW = 2
"""Number of annotators who must have found an answer, if there are several; as in the release's own nq_eval.py."""


@dataclass(frozen=True)
class _Annotation:
    """The annotation of one annotator."""

    context: str
    answers: tuple[str, ...]


def fits(record: dict[str, Any]) -> bool:
    """True for an annotated document."""
    return "annotations" in record and bool({"document_text", "document_tokens", "document"} & record.keys())


def questions(record: dict[str, Any], where: str) -> Iterator[Question | Skipped]:
    """One question: the long answer is its context, short answers, yes or no its answers; with neither, UNANSWERABLE.

    Text is tokens joined by spaces, without html. Of several annotators the first who gave an answer says the context;
    the answers of all are accepted. Without a long answer there is no context.

    Raises:
        DataError: a field is missing or malformed, or an answer lies outside the document.
    """
    document = _document(record, where)
    found = [_annotation(annotation, document) for annotation in _annotations(record, where)]
    enough = _FEW if len(found) > 1 else 1
    answered = [a for a in found if a.answers and a.context]
    located = [a for a in found if a.context]
    if len(located) < enough:
        yield Skipped("no long answer, so no context")
        return
    has_answer = len(answered) >= enough
    answers = clean_answers([text for a in answered for text in a.answers], where) if has_answer else (UNANSWERABLE,)
    asked = record["question"] if isinstance(record.get("question"), dict) else {"text": record.get("question_text")}
    yield Question(
        where=where,
        id=identifier(record, "example_id" if "example_id" in record else "id", where),
        text=text(field(asked, "text", str, f"{where}: question"), "question", where),
        answers=answers,
        passages=(Passage((answered if has_answer else located)[0].context, _title(record, where), useful=True),),
        dataset="nq",
    )


@dataclass(frozen=True)
class _Document:
    """Tokens of a page. Only those of answers are read: a page has 10,000 and more."""

    tokens: Sequence[Any]
    is_html: Sequence[Any] | None
    """None: the tokens show it, by their spelling or, if they are dicts, in `html_token`."""
    where: str

    def words(self, span: Mapping[str, Any], what: str) -> str:
        """Text from `start_token` to `end_token` without html; "" if both are -1, which means none."""
        start, end = span.get("start_token"), span.get("end_token")
        if start == end == -1:
            return ""
        if not (type(start) is int and type(end) is int and 0 <= start < end <= len(self.tokens)):
            raise DataError(
                f"{self.where}: the {what} is said to be tokens {start!r} to {end!r} of {len(self.tokens)}."
            )
        return " ".join(word for i in range(start, end) if (word := self._word(i)) is not None).strip()

    def _word(self, index: int) -> str | None:
        token = self.tokens[index]
        if isinstance(token, dict):
            place = f"{self.where}: document_tokens[{index}]"
            return None if field(token, "html_token", bool, place) else field(token, "token", str, place)
        if self.is_html is not None:
            return None if self.is_html[index] else token
        return None if _TAG.fullmatch(token) else token


def _document(record: dict[str, Any], where: str) -> _Document:
    if "document_text" in record:
        return _Document(field(record, "document_text", str, where).split(" "), None, where)
    if "document_tokens" in record:
        return _Document(field(record, "document_tokens", list[dict], where), None, where)
    inner = field(field(record, "document", dict, where), "tokens", dict, where)
    tokens, is_html = field(inner, "token", list[str], where), field(inner, "is_html", list, where)
    if len(tokens) != len(is_html):
        raise DataError(f"{where}: field 'document': {len(tokens)} tokens for {len(is_html)} of 'is_html'.")
    return _Document(tokens, is_html, where)


def _annotations(record: dict[str, Any], where: str) -> list[dict[str, Any]]:
    given = record["annotations"]
    if not isinstance(given, dict):
        return field(record, "annotations", list[dict], where)
    columns = ("long_answer", "short_answers", "yes_no_answer")
    lists = [field(given, name, list, f"{where}: field 'annotations'") for name in columns]
    if len({len(values) for values in lists}) > 1:
        raise DataError(f"{where}: field 'annotations': {', '.join(columns)} are not of one length.")
    return [dict(zip(columns, values, strict=True)) for values in zip(*lists, strict=True)]


def _annotation(given: dict[str, Any], document: _Document) -> _Annotation:
    long = field(given, "long_answer", dict, f"{document.where}: field 'annotations'")
    short = given.get("short_answers") or []
    if isinstance(short, dict):  # lists, as in rows of the hub
        starts, ends = short.get("start_token") or [], short.get("end_token") or []
        short = [{"start_token": start, "end_token": end} for start, end in zip(starts, ends, strict=False)]
    else:
        short = field(given, "short_answers", list[dict], document.where) if short else []
    answers = [answer for span in short if (answer := document.words(span, "short answer"))]
    said = given.get("yes_no_answer")
    if said is not None and not isinstance(said, (str, int)):
        raise DataError(
            f"{document.where}: field 'yes_no_answer': expected str or int, got {said!r:.60} ({type(said).__name__})."
        )
    if not answers and said in _SPELLED:
        answers = [_SPELLED[said]]
    return _Annotation(document.words(long, "long answer"), tuple(answers))


def _title(record: dict[str, Any], where: str) -> str:
    """The title in the release, or else from the address of the page; "" without both."""
    if isinstance(record.get("document"), dict):
        return str(record["document"].get("title") or "")
    if record.get("document_title"):
        return field(record, "document_title", str, where)
    address = record.get("document_url") or ""
    return parse_qs(urlsplit(str(address).replace("&amp;", "&")).query).get("title", [""])[0].replace("_", " ")
