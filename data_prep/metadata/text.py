"""Extract lengths, title and paragraphs from a text and its tags (BigScience's rules, fixed where they lose text)."""

import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from html import unescape
from itertools import count
from typing import Any

Row = dict[str, Any]
COLUMNS = (
    "metadata_generation_length_text",
    "metadata_generation_length_sentence",
    "metadata_title",
    "metadata_paragraph",
    "metadata_entity_paragraph",
)
PARAGRAPH_TAGS = frozenset(
    re.findall(
        r"\w+",
        "p div li ul ol hr pre blockquote dt dd dl menu figcaption figure h1 h2 h3 h4 h5 h6 "
        "nav article main section address aside",
    )
)
"""A paragraph ends at the end of these tags."""
_TITLE = re.compile(r"<title[^>]*>(.*?)</title>", re.DOTALL | re.IGNORECASE)
_TITLE_OF_THE_ORIGINAL = re.compile(r"<title.*>(.*)</title>")
_SENTENCE_END = re.compile(r"(?<![.!?])[.!?]+[\"')\]]*(?=\s|$)")


def extract(row: Mapping[str, Any], compatible: bool = False) -> Row:
    """Make the columns of a row with "text". The title comes from "html_title", paragraphs from "metadata_html".

    compatible: reproduce the faults of the reference.
    """
    text = row.get("text") or ""
    paragraphs = list(split_paragraphs(text, row.get("metadata_html") or []))
    return {
        "metadata_generation_length_text": [{"key": "length", "type": "global", "value": str(len(text))}]
        if text
        else [],
        "metadata_generation_length_sentence": list(sentence_lengths(text, compatible)),
        "metadata_title": title_items(row.get("html_title") or [], compatible),
        "metadata_paragraph": paragraphs,
        "metadata_entity_paragraph": list(place_entities(row.get("metadata_entity") or [], paragraphs)),
    }


def _span(key: str, start: int, end: int, value: str) -> Row:
    return {"key": key, "type": "local", "char_start_idx": start, "char_end_idx": end, "value": value}


def sentence_lengths(text: str, compatible: bool = False) -> Iterator[Row]:
    """Yield the length of each sentence. A sentence ends with a stop before a blank, or at the end of the text.

    compatible: every dot ends a sentence, which starts at the previous dot. Text after the last dot is dropped.
    """
    if compatible:
        dots = [match.start() for match in re.finditer(r"\.", text)]
        for begin, end, piece in zip([0, *dots], dots, text.split("."), strict=False):
            yield _span("length", begin, end, str(len(piece)))
        return
    begin = 0
    for end in [*(match.end() for match in _SENTENCE_END.finditer(text)), len(text)]:
        begin += len(text[begin:end]) - len(text[begin:end].lstrip())
        if begin < end and text[begin:end].strip():
            yield _span("length", begin, end, str(end - begin))
        begin = max(begin, end)


def title_items(titles: Sequence[str], compatible: bool = False) -> list[Row]:
    """Item of the first title of a page. compatible: the last title on its line; skip titles with a line end."""
    match = (_TITLE_OF_THE_ORIGINAL if compatible else _TITLE).search(titles[0]) if titles else None
    value = (match[1] if compatible else " ".join(unescape(match[1]).split())) if match else ""
    return [{"key": "title", "type": "global", "value": value}] if value else []


def split_paragraphs(text: str, tags: Sequence[Mapping[str, Any]]) -> Iterator[Row]:
    """Split a text into paragraphs, where a tag of PARAGRAPH_TAGS ends and after two line ends.

    "marker" is the end of the paragraph: the tag, with "+lf" if its text was cut at lines, or "remainder" at the end.
    """
    begin = 0
    ends = sorted(
        (tag["char_end_idx"], tag["char_start_idx"], tag["value"]) for tag in tags if tag["value"] in PARAGRAPH_TAGS
    )
    for end, _, name in [*ends, (len(text), 0, "remainder")]:
        end = min(end + (name == "p"), len(text))  # include the line end after a <p>
        if end <= begin:
            continue
        pieces = re.findall(r"(?s).*?\n\n+|.+\Z", text[begin:end])
        for piece in pieces:
            marker = f"{name}+lf" if len(pieces) > 1 else name
            yield {**_span("paragraph", begin, begin + len(piece), piece), "marker": marker}
            begin += len(piece)


def place_entities(entities: Sequence[Mapping[str, Any]], paragraphs: Sequence[Mapping[str, Any]]) -> Iterator[Row]:
    """Yield each entity once per paragraph that contains it. Spans at the same character are numbered in order."""
    seen = set[tuple[int, int, str]]()
    counts: dict[int, count[int]] = defaultdict(count)
    starts = [paragraph["char_start_idx"] for paragraph in paragraphs]
    for entity in entities:
        start, end = entity["char_start_idx"], entity["char_end_idx"]
        if not starts or start < starts[0]:
            continue
        paragraph = paragraphs[bisect_right(starts, start) - 1]
        if end > paragraph["char_end_idx"]:  # the entity crosses a paragraph boundary
            continue
        span = paragraph["char_start_idx"], paragraph["char_end_idx"], entity["value"]
        if span in seen:
            continue
        seen.add(span)
        # The markers at a character share one count, so the ends of a paragraph come before the starts of the next.
        places = next(counts[span[1]]), next(counts[span[0]])
        yield {**_span("entity_paragraph", *span), "relative_start_pos": places[1], "relative_end_pos": places[0]}
