"""Natural Questions (Kwiatkowski et al., 2019): simplified lines, original lines with HTML tokens, rows of the hub."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qs, urlsplit

from data_prep.crossattn.qa_releases.question import UNANSWERABLE, Passage, Question, Record, Skipped, clean_answers
from src.errors import DataError

DESCRIPTION = (
    'Natural Questions: lines with "annotations" and "document_text" (simplified) or "document_tokens" (original)'
)

_TAG = re.compile(
    r"</?[A-Z][A-Za-z0-9]*(_[^>]*)?>"
)  # in the simplified text, where <Td colspan="2"> is <Td_colspan="2">
_YES_NO_ANSWERS = {"YES": "Yes", "NO": "No", 1: "Yes", 0: "No"}  # in the release, and in rows of the hub
_FEW = 2
"""Minimum number of annotators with an answer if there are several annotators, as in the release's nq_eval.py."""


@dataclass(frozen=True)
class _Annotation:
    """Annotation by one annotator."""

    context: str
    answers: tuple[str, ...]


def fits(record: dict[str, Any]) -> bool:
    """True for an annotated document."""
    return "annotations" in record and bool({"document_text", "document_tokens", "document"} & record.keys())


def questions(record: Record) -> Iterator[Question | Skipped]:
    """Yield one question. Its context is the long answer; its answers are the short answers, yes or no.

    Without an answer it is UNANSWERABLE. Text is tokens joined by spaces, without HTML. The context is from the first
    annotator with an answer; the answers of all annotators are accepted. Without a long answer there is no context.

    Raises:
        DataError: a field is missing or malformed, or an answer is outside the document.
    """
    document = _document(record)
    annotations = [_annotation(annotation, document) for annotation in _annotations(record)]
    enough = _FEW if len(annotations) > 1 else 1
    with_answers = [a for a in annotations if a.answers and a.context]
    with_contexts = [a for a in annotations if a.context]
    if len(with_contexts) < enough:
        yield Skipped("no long answer, so no context")
        return
    has_answer = len(with_answers) >= enough
    texts = [text for annotation in with_answers for text in annotation.answers]
    in_hub = isinstance(record.get("question"), dict)
    yield Question(
        where=record.where,
        id=record.identifier("example_id" if "example_id" in record else "id"),
        text=record.inner("question").text("text") if in_hub else record.text("question_text"),
        answers=clean_answers(texts, record.where) if has_answer else (UNANSWERABLE,),
        passages=(Passage((with_answers if has_answer else with_contexts)[0].context, _title(record), useful=True),),
        dataset="nq",
    )


@dataclass(frozen=True)
class _Document:
    """Tokens of a page. Only the tokens of answers are read, because a page has 10,000 or more."""

    tokens: Sequence[Any]
    is_html: Sequence[Any] | None
    """Whether each token is HTML. None: read it from the spelling of a token or, if tokens are dicts, `html_token`."""
    where: str

    def words(self, span: Mapping[str, Any], what: str) -> str:
        """Text from `start_token` to `end_token` without HTML; "" if both are -1, which means no span."""
        start, end = span.get("start_token"), span.get("end_token")
        if start == end == -1:
            return ""
        if not (type(start) is int and type(end) is int and 0 <= start < end <= len(self.tokens)):
            raise DataError(
                f"{self.where}: {what}: expected a span within {len(self.tokens)} tokens, got {start!r} to {end!r}."
            )
        return " ".join(word for i in range(start, end) if (word := self._word(i)) is not None).strip()

    def _word(self, index: int) -> str | None:
        token = self.tokens[index]
        if isinstance(token, dict):
            token = Record(token, f"{self.where}: document_tokens[{index}]")
            return None if token.require("html_token", bool) else token.require("token", str)
        if self.is_html is not None:
            return None if self.is_html[index] else token
        return None if _TAG.fullmatch(token) else token


def _document(record: Record) -> _Document:
    if "document_text" in record:
        return _Document(record.require("document_text", str).split(" "), None, record.where)
    if "document_tokens" in record:
        return _Document(record.require("document_tokens", list[dict]), None, record.where)
    words = record.inner("document").inner("tokens").parallel(token=list[str], is_html=list)
    return _Document([token for token, _ in words], [is_html for _, is_html in words], record.where)


def _annotations(record: Record) -> list[Record]:
    if not isinstance(record["annotations"], dict):
        return record.objects("annotations")
    columns = dict.fromkeys(("long_answer", "short_answers", "yes_no_answer"), list)
    rows = record.inner("annotations").parallel(**columns)
    return [Record(dict(zip(columns, row, strict=True)), f"{record.where}: field 'annotations'") for row in rows]


def _annotation(record: Record, document: _Document) -> _Annotation:
    long = record.require("long_answer", dict)
    short = record.get("short_answers") or []
    if isinstance(short, dict):  # one list per field, as in rows of the hub
        columns = Record(short, f"{record.where}: field 'short_answers'")
        starts, ends = (columns.optional(name, list[int], []) for name in ("start_token", "end_token"))
        short = [{"start_token": start, "end_token": end} for start, end in zip(starts, ends, strict=False)]
    else:
        short = record.optional("short_answers", list[dict], [])
    answers = [answer for span in short if (answer := document.words(span, "short answer"))]
    yes_no_answer = record.get("yes_no_answer")
    if yes_no_answer is not None and not isinstance(yes_no_answer, (str, int)):
        raise DataError(
            f"{document.where}: field 'yes_no_answer': expected str or int, got {yes_no_answer!r:.60} "
            f"({type(yes_no_answer).__name__})."
        )
    if not answers and yes_no_answer in _YES_NO_ANSWERS:
        answers = [_YES_NO_ANSWERS[yes_no_answer]]
    return _Annotation(document.words(long, "long answer"), tuple(answers))


def _title(record: Record) -> str:
    """The title in the release, else the title in the address of the page, else ""."""
    if isinstance(record.get("document"), dict):
        return str(record["document"].get("title") or "")
    if record.get("document_title"):
        return record.require("document_title", str)
    address = record.get("document_url") or ""
    try:
        query = urlsplit(str(address).replace("&amp;", "&")).query
    except ValueError:  # such as brackets without an address
        return ""
    return parse_qs(query).get("title", [""])[0].replace("_", " ")
