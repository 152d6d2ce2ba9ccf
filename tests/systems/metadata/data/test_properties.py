"""Properties of random texts with metadata: the text is complete and in order, and every row has a token in the
loss."""

import re
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_prep.metadata import html
from src.data.text.tokenizers import SafeTokenizer
from src.experiments.config import load
from src.systems.metadata.data.annotations import Document, read_row
from src.systems.metadata.data.examples import ExampleMaker, Writing
from src.systems.metadata.data.linearise import ESCAPE, insert, markers
from src.systems.metadata.data.processors import HtmlFilter, local_markers
from tests.systems.metadata.data.test_examples import byte_tokenizer

KEYS = ["url", "title", "html", "entity", "entity_paragraph", "paragraph"]
MERGES = (("Ġ", "|"), ("|", "|"), ("a", "b"), ("Ġ", "a"), ("b", "c"), ("<", "b"), ("[", "["))
WORDS = st.sampled_from(
    ["a", "ab", " abc", "<b>", "</", "[[x]]", " |a|", "\\", "é", "😀", "\n", " ||| ", "[paragraph: ", "&lt;", "b c"]
)
TEXTS = st.lists(WORDS, max_size=12).map("".join)
many = settings(max_examples=150, deadline=None, derandomize=True)


@st.composite
def documents(draw: st.DrawFn) -> Document:
    """A text, with spans that may cross, nest, be empty or end with the text, of keys with and without places."""
    text = draw(TEXTS)
    items: list[dict[str, Any]] = [
        {"key": key, "type": "global", "value": draw(TEXTS)} for key in draw(st.sets(st.sampled_from(KEYS[:2])))
    ]
    for key in draw(st.sets(st.sampled_from(KEYS[2:]))):
        spans = [
            sorted(pair) for pair in draw(st.lists(st.tuples(*[st.integers(0, len(text))] * 2), min_size=1, max_size=5))
        ]
        counts, with_places = dict[int, int](), draw(st.booleans())
        for start, end in spans:
            item = {"key": key, "type": "local", "value": draw(WORDS), "char_start_idx": start, "char_end_idx": end}
            if with_places:
                for name, index in (("relative_start_pos", start), ("relative_end_pos", end)):
                    item[name] = counts[index] = counts.get(index, -1) + 1
            items.append(item)
    return read_row({"text": text, "metadata": items}, "here")


def process(item: Any) -> Any:
    return local_markers(item, HtmlFilter(), "beginning")


AROUND = {"html": ("<HTML>", "</HTML>"), "entity_paragraph": ("<CHAIN>", " </CHAIN> ")}


@pytest.mark.slow
@many
@given(documents(), st.sampled_from(["nested", "compatible"]), st.booleans())
def test_text_without_markers_is_unchanged(document: Document, linearisation: Any, around: bool):
    marked_text = insert(document.text, markers(document, KEYS, process, AROUND if around else {}, linearisation))
    assert len(marked_text.mask) == len(marked_text.text)
    assert "".join(character for character, mark in zip(*marked_text, strict=True) if not mark) == document.text


@many
@given(documents())
def test_escaped_text_is_not_a_marker(document: Document):
    """Where a nested text is read from the left, each marker that no escape precedes is one of ours."""
    marked_text = insert(document.text, markers(document, KEYS, process, {}, "nested"))
    keys = {item.key for item in document.items if item.start is not None}
    looks = {
        "html": r"</?[A-Za-z]",
        "entity": r"\[\[",
        "entity_paragraph": r"\|(?=\S)",
        "paragraph": r"\[/?paragraph: ",
    }
    for match in re.finditer("|".join(looks[key] for key in sorted(keys)) or r"(?!)", marked_text.text):
        before = marked_text.text[: match.start()]
        escapes = len(before) - len(before.rstrip(ESCAPE))
        assert marked_text.mask[match.start()] or (escapes and marked_text.mask[match.start() - 1]), marked_text.text


@cache
def maker(linearisation: str, room: int, metadata_loss: bool) -> ExampleMaker:
    writing = load(Writing, {"keys": KEYS, "linearisation": linearisation, "list_local_keys": room > 40}, "here")
    return ExampleMaker(writing, SafeTokenizer(byte_tokenizer(merges=MERGES)), room, metadata_loss)


@many
@given(documents(), st.sampled_from(["nested", "compatible"]), st.sampled_from([16, 40, 200]), st.booleans())
def test_pieces_hold_all_tokens_of_the_text_and_fit(
    document: Document, linearisation: str, room: int, metadata_loss: bool
):
    make = maker(linearisation, room, metadata_loss)
    with_metadata, plain = make.pieces(document), make.pieces(document, with_metadata=False)
    for piece in [*with_metadata, *plain]:
        assert 0 < len(piece.ids) == len(piece.loss_mask) == len(piece.of_text) <= room
        assert any(piece.loss_mask), "no row without a token to learn"
        assert not piece.loss_mask[0]
        assert metadata_loss or all(
            text for text, has_loss in zip(piece.of_text, piece.loss_mask, strict=True) if has_loss
        )
    if linearisation == "nested":
        ids = SafeTokenizer(byte_tokenizer(merges=MERGES)).encode(document.text)
        text_ids = [
            token for piece in with_metadata for token, text in zip(piece.ids, piece.of_text, strict=True) if text
        ]
        assert len(text_ids) <= len(ids) + 1
        if len(with_metadata) == len(plain) == 1:
            assert text_ids[:-1] == plain[0].ids[:-1] == ids, "the text's tokens, and the end"


TAGS = st.sampled_from(
    ["p", "div", "b", "i", "td", "table", "pre", "br", "li", "ul", "a", "section", "script", "h1", "footer"]
)


@st.composite
def pages(draw: st.DrawFn, depth: int = 0) -> str:
    pieces = []
    for _ in range(draw(st.integers(0, 3))):
        inside = draw(pages(depth + 1)) if depth < 4 else ""
        name, attribute = draw(TAGS), draw(st.sampled_from(["", ' class="x y"', " id=4", " hidden"]))
        is_closed = draw(st.integers(0, 9)) > 0
        pieces.append(f"<{name}{attribute}>{draw(TEXTS)}{inside}{f'</{name}>' if is_closed else ''}{draw(TEXTS)}")
    return "".join(pieces)


@pytest.mark.slow
@many
@given(pages(), st.sampled_from([None, 8, 64]))
def test_tags_of_any_page_nest_and_can_be_removed(page: str, limit: int | None):
    rules = [
        rule.model_copy(update={"max_chars": rule.max_chars and limit})
        for rule in html.read_rules()
        if limit or rule.max_chars is None
    ]
    marked_text = html.extract(f"<html><head><title>t</title></head><body>{page}</body></html>", rules)
    document = read_row({"text": marked_text.text, "metadata_html": marked_text.tags}, "here")
    for linearisation in ("nested", "compatible"):
        result = insert(document.text, markers(document, ["html"], process, {}, linearisation))
        assert "".join(character for character, mark in zip(*result, strict=True) if not mark) == marked_text.text
        if document.text:
            open_tags = list[str]()
            ours = "".join(character if mark else " " for character, mark in zip(*result, strict=True)).replace(
                ESCAPE, " "
            )
            for closes, name in re.findall(r"<(/?)(\w+)[^<>]*>", ours):
                if not closes:
                    open_tags.append(name)
                else:
                    assert open_tags.pop() == name, result.text
            assert not open_tags


@pytest.mark.parametrize("room", [6, 9])
def test_rows_are_refused_that_have_no_room_for_a_prefix(room: int):
    from src.errors import ConfigError

    with pytest.raises(ConfigError, match="leave no room for a prefix"):
        ExampleMaker(Writing(), SafeTokenizer(byte_tokenizer()), room)
