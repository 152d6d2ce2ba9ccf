"""TriviaQA (Joshi et al., 2017): questions with pages. The texts are separate files in the folder `evidence`."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from data_prep.crossattn.qa_releases.question import Passage, Question, Record, Skipped, clean_answers, passages
from src.errors import DataError
from src.files import reading

DESCRIPTION = (
    'TriviaQA: {"Data": [{"QuestionId", "Question", "Answer": {"Value", "Aliases"}, "EntityPages", "SearchResults"}]}'
)

_PAGES = {"EntityPages": "wikipedia", "SearchResults": "web"}
"""{list of pages: folder of their texts}."""
_HUB = {"entity_pages": "wiki_context", "search_results": "search_context"}
"""{list of pages in rows of the hub: field of their texts}."""


def fits(record: dict[str, Any]) -> bool:
    """True for a question of the release, or of the hub."""
    return {"QuestionId", "Question"} <= record.keys() or {"question_id", "entity_pages"} <= record.keys()


def questions(record: Record, evidence: Path | None = None) -> Iterator[Question | Skipped]:
    """Yield one question with all its pages: their texts below `evidence`, or without it the search engine snippets.

    The release does not mark useful pages. The answer is the "Value" of the release; its aliases are accepted, too.

    Raises:
        DataError: a field is missing or malformed, or a page is not below `evidence`.
    """
    hub = "question_id" in record
    names = ("question_id", "question", "answer", "value", "aliases")
    number, question, answer, value, aliases = (
        names if hub else ("QuestionId", "Question", "Answer", "Value", "Aliases")
    )
    if not record.get(answer):
        yield Skipped("no answer is given, as in the hidden test set")
        return
    contexts = passages(_from_hub(record) if hub else _from_release(record, evidence))
    if not contexts:
        yield Skipped("no page has any text: name the release's folder of texts with --evidence")
        return
    answer_record = record.inner(answer)
    yield Question(
        where=record.where,
        id=record.identifier(number),
        text=record.text(question),
        answers=clean_answers(
            [answer_record.require(value, str), *answer_record.require(aliases, list[str])], record.where
        ),
        passages=contexts,
        dataset="triviaqa",
    )


def _from_release(record: Record, evidence: Path | None) -> Iterator[Passage]:
    for name, folder in _PAGES.items():
        for page in record.objects(name) if record.get(name) else []:
            title = page.optional("Title", str, "")
            if evidence is not None and page.get("Filename"):
                yield Passage(_read_evidence(evidence, folder, page.require("Filename", str), page.where), title)
            elif page.get("Description"):
                yield Passage(page.require("Description", str), title)


def _from_hub(record: Record) -> Iterator[Passage]:
    for name, texts in _HUB.items():
        pages = Record(record.get(name) or {}, f"{record.where}: {name}")
        titles = pages.get("title") or []
        for index, page in enumerate(pages.optional(texts, list[str], [])):
            yield Passage(page, titles[index] if index < len(titles) else "")


def _read_evidence(evidence: Path, folder: str, name: str, where: str) -> str:
    path = evidence / folder / name
    if not path.resolve().is_relative_to(evidence.resolve()):
        raise DataError(f"{where}: field 'Filename': expected a path inside {evidence}, got {name!r}.")
    try:
        with reading(path, DataError):
            return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise DataError(
            f"{where}: its text {path} is missing. Set --evidence to the folder that contains {folder}."
        ) from None
    except UnicodeDecodeError as bad:
        raise DataError(f"{path}: not UTF-8 text: {bad.reason} at byte {bad.start}. Convert it to UTF-8.") from None
