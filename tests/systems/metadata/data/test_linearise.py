"""Markers in texts: worked examples of the specification, and properties of random spans."""

import random
import re
from functools import partial
from typing import Any

import pytest

from src.systems.metadata.data.annotations import Document, Item, read_row
from src.systems.metadata.data.linearise import insert, markers
from src.systems.metadata.data.processors import HtmlFilter, TagRule, local_markers

APPLE = "An apple is an edible fruit produced by an apple tree (Malus domestica)."


def item(
    key: str, value: str, start: int, end: int, places: tuple[int, int] | None = None, **attributes: str
) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "key": key,
        "type": "local",
        "value": value,
        "char_start_idx": start,
        "char_end_idx": end,
    }
    if places:
        fields |= {"relative_start_pos": places[0], "relative_end_pos": places[1]}
    return fields | {"html_attrs": {"attrs": list(attributes), "values": list(attributes.values())}}


def document(text: str, *items: dict[str, Any]) -> Document:
    return read_row({"text": text, "metadata": list(items)}, "row")


def generic(item):
    return f"[{item.key}: {item.value}]", f"[/{item.key}: {item.value}]"


real = partial(local_markers, html=HtmlFilter(), entity_position="beginning")


def insert_markers(
    doc: Document, keys: str, process=real, linearisation: Any = "compatible", **around: tuple[str, str]
):
    return insert(doc.text, markers(doc, keys.split(), process, around, linearisation))


def runs(mask: list[bool]) -> list[tuple[int, int]]:
    counts = list[list[int]]()
    for value in mask:
        if counts and counts[-1][1] == value:
            counts[-1][0] += 1
        else:
            counts.append([1, int(value)])
    return [(count, value) for count, value in counts]


@pytest.mark.parametrize("linearisation", ["compatible", "nested"])
def test_an_entity(linearisation: str):
    text = (
        "It was a brilliant first round. You have to break down the Cuban's rhythm you can't let them get into rhythm. "
        "The risk with that is Yafai has got to go him."
    )
    doc = document(text, item("entity", "Galal_Yafai", 132, 137))
    result = insert_markers(document(text, item("entity", "Galal Yafai", 132, 137)), "entity", generic, linearisation)
    assert "that is [entity: Galal Yafai]Yafai[/entity: Galal Yafai] has" in result.text
    assert runs(result.mask) == [(132, 0), (21, 1), (5, 0), (22, 1), (19, 0)]
    assert "Yafai [[Galal Yafai]] has got" in insert_markers(doc, "entity", real, linearisation).text


FRUIT = (
    item("html", "b", 3, 8, (0, 0)),
    item("entity", "Malus domestica", 3, 8),
    item("html", "b", 43, 53, (1, 1), **{"class": "level1", "id": "4", "href": "https://test.org"}),
    item("html", "i", 43, 48, (2, 0), **{"class": "level2"}),
)


@pytest.mark.parametrize("linearisation", ["compatible", "nested"])
def test_real_processors(linearisation: str):
    expected = (
        "An <b>apple [[Malus domestica]]</b> is an edible fruit produced by an <b class:level1 id:4 "
        "href:https://test.org>"
        "<i class:level2>apple</i> tree</b> (Malus domestica)."
    )
    for keys in ("html entity", "entity html") if linearisation == "compatible" else ("html entity",):
        assert insert_markers(document(APPLE, *FRUIT), keys, real, linearisation).text == expected


@pytest.mark.parametrize("linearisation", ["compatible", "nested"])
def test_generic_processors(linearisation: str):
    expected = (
        "An [html: b][entity: Malus domestica]apple[/entity: Malus domestica][/html: "
        "b] is an edible fruit produced by an [html: b][html: i]apple[/html: i] tree[/html: b] (Malus domestica)."
    )
    assert insert_markers(document(APPLE, *FRUIT), "html entity", generic, linearisation).text == expected


EMPTY = [
    item("html", "a", 43, 43, (0, 1)),
    item("html", "a", 43, 43, (6, 7)),
    item("html", "b", 43, 53, (4, 0), **{"class": "level2"}),
    item("html", "b", 43, 53, (3, 1), **{"class": "level1"}),
    item("html", "i", 43, 48, (5, 0), **{"class": "level3"}),
]


@pytest.mark.parametrize("linearisation", ["compatible", "nested"])
@pytest.mark.parametrize("seed", range(5))
def test_empty_tags_do_not_depend_on_the_order_of_the_list(linearisation: str, seed: int):
    items = random.Random(seed).sample(EMPTY, len(EMPTY))
    text = insert_markers(document(APPLE, *items), "html", real, linearisation).text
    assert "by an <a></a><b class:level1><b class:level2><i class:level3><a></a>apple</i> tree</b></b> (Malus" in text


def test_runs_of_markers_are_wrapped():
    doc = document(APPLE, *EMPTY)
    text = insert_markers(doc, "html", real, html=("<HTML>", "</HTML>")).text
    tags = "<a></a><b class:level1><b class:level2><i class:level3><a></a>"
    assert f"<HTML>{tags}</HTML>apple<HTML></i></HTML> tree<HTML></b></b></HTML>" in text
    assert insert_markers(doc, "html", real, "nested", html=("<HTML>", "</HTML>")).text == text


def test_inner_spans_end_first():
    doc = document("aabbcc", item("entity", "E", 0, 4), item("html", "b", 2, 4, (0, 0)))
    assert (
        insert_markers(doc, "html entity", generic, "nested").text == "[entity: E]aa[html: b]bb[/html: b][/entity: E]cc"
    )
    assert insert_markers(doc, "html entity", generic).text == "[entity: E]aa[html: b]bb[/entity: E][/html: b]cc", (
        "the original's"
    )


def test_text_that_looks_like_a_marker_is_escaped():
    text = r"if a <b and [[1, 2]] or c\d"
    doc = document(text, item("html", "p", 0, len(text), (0, 0)), item("entity", "E", 0, 2))
    marked_text = insert_markers(doc, "html entity", real, "nested")
    assert marked_text.text == r"<p>if [[E]] a \<b and \[[1, 2]] or c\\d</p>"
    assert "".join(c for c, m in zip(*marked_text, strict=True) if not m) == text
    assert insert_markers(document(text), "html entity", real, "nested").text == text, (
        "nothing is marked, so nothing can be mistaken"
    )


@pytest.mark.parametrize("opening", ["<CHAIN>", "{{"])
def test_text_that_looks_like_the_start_of_a_run_is_escaped(opening: str):
    doc = document(f"a {opening} b", item("entity_paragraph", "E", 0, 5, (0, 0)))
    marked_text = insert_markers(doc, "entity_paragraph", real, "nested", entity_paragraph=(opening, " </CHAIN> "))
    assert marked_text.text == f"{opening} |E| </CHAIN> a \\{opening} b"
    assert "".join(c for c, m in zip(*marked_text, strict=True) if not m) == doc.text


def test_filters():
    keeps = HtmlFilter(max_length=0, exceptions=["td"], exclude=[TagRule(tag="body", min_length=0)]).accepts
    assert [keeps("p", 0), keeps("td", 0), keeps("p", 1), keeps("body", 30)] == [False, True, True, False]
    text = "abc"
    doc = document(text, item("html", "a", 0, 3, (0, 0), **{"class": "x y", "id": "4", "href": "http://q"}))
    for names, expected in (
        (None, "<a class:x y id:4 href:http://q>"),
        (["class", "id"], "<a class:x y id:4>"),
        ([], "<a>"),
    ):
        process = partial(local_markers, html=HtmlFilter(attributes=names), entity_position="end")
        assert insert_markers(doc, "html", process).text == f"{expected}abc</a>"


def random_document(seed: int) -> Document:
    """With tags that nest, as in a page, and other spans anywhere; in a text that is full of what looks like
    markers."""
    draw = random.Random(seed)
    text = "".join(
        draw.choices(["<b>", "</", "[[", "]]", "|", "\\", "a", " ", "é", "[/paragraph: "], k=draw.randrange(1, 12))
    )
    items, counters = list[dict[str, Any]](), dict[int, int]()

    def place(index: int) -> int:
        counters[index] = counters.get(index, -1) + 1
        return counters[index]

    def tags(first: int, last: int, depth: int) -> None:
        at = first
        for _ in range(draw.randrange(3) if depth < 4 else 0):
            start = draw.randint(at, last)
            end = draw.randint(start, last)
            tag = item("html", draw.choice(["a", "b", "td"]), start, end)
            tag["relative_start_pos"] = place(start)
            tags(start, end, depth + 1)
            tag["relative_end_pos"] = place(end)
            items.append(tag)
            at = end

    tags(0, len(text), 0)
    for _ in range(draw.randrange(4)):
        start = draw.randint(0, len(text))
        items.append(item(draw.choice(["entity", "paragraph"]), "X_Y", start, draw.randint(start, len(text))))
    draw.shuffle(items)
    return document(text, *items)


@pytest.mark.parametrize("linearisation", ["compatible", "nested"])
def test_text_without_markers_is_unchanged(linearisation: str):
    for seed in range(500):
        doc = random_document(seed)
        marked_text = insert_markers(doc, "html entity paragraph", real, linearisation)
        assert len(marked_text.mask) == len(marked_text.text)
        assert "".join(c for c, m in zip(*marked_text, strict=True) if not m) == doc.text


def test_nested_tags_are_a_tree_and_can_be_read_back():
    for seed in range(500):
        doc = random_document(seed)
        only = Document(doc.text, [item for item in doc.items if item.key == "html"])
        marked_text = insert_markers(only, "html", real, "nested").text
        text, open_tags = "", list[str]()
        for token in re.findall(r"\\.|</?[a-z]+>|.", marked_text, re.DOTALL):
            if token.startswith("</"):
                assert open_tags.pop() == token[2:-1], marked_text
            elif token.startswith("<") and token.endswith(">") and len(token) > 2:
                open_tags.append(token[1:-1])
            else:
                text += token.removeprefix("\\") if len(token) == 2 else token
        if only.items:  # else nothing is escaped
            assert (text, open_tags) == (doc.text, []), marked_text


CHAIN = [item("entity_paragraph", name, 0, 5, (place, place)) for place, name in enumerate(["A", "B", "C"])]


@pytest.mark.parametrize("linearisation", ["compatible", "nested"])
def test_chains_at_the_end_of_a_paragraph_are_in_order(linearisation: str):
    at_end = partial(local_markers, html=HtmlFilter(), entity_position="end")
    doc = document("hello", *CHAIN)
    around = {"entity_paragraph": ("<CHAIN>", " </CHAIN> ")}
    assert (
        insert_markers(doc, "entity_paragraph", at_end, linearisation, **around).text
        == "hello<CHAIN> |A| |B| |C| </CHAIN> "
    )
    assert (
        insert_markers(doc, "entity_paragraph", real, linearisation, **around).text
        == "<CHAIN> |A| |B| |C| </CHAIN> hello"
    )


def test_nested_spans_of_one_key_follow_their_relative_positions():
    """Both ends of overlapping spans, with another key around them."""
    spans = [
        item("entity_paragraph", "A", 0, 4, (0, 0)),
        item("entity_paragraph", "B", 2, 4, (0, 1)),
        item("html", "b", 1, 4, (0, 0)),
    ]
    at_end = partial(local_markers, html=HtmlFilter(), entity_position="end")
    assert (
        insert_markers(document("abcdef", *spans), "html entity_paragraph", at_end, "nested").text
        == "a<b>bcd |A|</b> |B|ef"
    )


@pytest.mark.parametrize("linearisation", ["compatible", "nested"])
def test_empty_sides_are_not_wrapped(linearisation: str):
    doc = document("hello", *CHAIN[:1])
    assert (
        insert_markers(doc, "entity_paragraph", real, linearisation, entity_paragraph=("<CHAIN>", " </CHAIN> ")).text
        == "<CHAIN> |A| </CHAIN> hello"
    )


def read_tag(marker: str) -> tuple[str, list[tuple[str, str]]]:
    """Read a start tag back. An attribute starts at a blank before `name:`; a backslash makes the next character part
    of the text."""
    body = re.fullmatch(r"<((?:\\.|[^\\>])*)>", marker, re.DOTALL)
    assert body, marker
    tag, *rest = re.split(r"(?<!\\) (?=(?:\\[^ ]|[^\\ :])+:)", re.sub(r"\\\\", END + "b", body[1]))

    def plain(text: str) -> str:
        return re.sub(r"\\(.)", r"\1", text, flags=re.DOTALL).replace(END + "b", "\\")

    pairs = (re.fullmatch(r"((?:\\.|[^\\:])*):(.*)", each, re.DOTALL) for each in rest)
    return plain(tag), [(plain(pair[1]), plain(pair[2])) for pair in pairs if pair]


END = "\0"
VALUES = [
    "",
    "x",
    "x y",
    "x id:4",
    " id:4",
    "a>b",
    "</p>",
    "\\",
    "x \\",
    "http://a.org/?q=1 2",
    "style: red; b: c",
    " ",
    "a  b:c",
    "\n d:e",
    "é",
]


def test_attribute_values_can_be_read_back():
    draw = random.Random(0)
    for _ in range(2000):
        names = draw.sample(["class", "id", "xlink:href", "data-x", "@click", "a>b"], draw.randrange(4))
        attributes = tuple((name, "".join(draw.choices(VALUES, k=draw.randrange(3)))) for name in names)
        tag = draw.choice(["a", "svg:p", "a>b", "/x", "two words"])
        start, end = local_markers(
            Item("html", tag, 0, 3, attributes=attributes), HtmlFilter(), "end", escape=True
        ) or ("", "")
        assert read_tag(start) == (tag, list(attributes)), start
        assert end.endswith(">")


def test_names_of_entities_can_be_read_back():
    for key, pattern in (
        ("entity", r" \[\[((?:\\.|[^\\\]])*)\]\]"),
        ("entity_paragraph", r" \|((?:\\.|[^\\|])*)\|"),
        ("x", r"\[x: ((?:\\.|[^\\\]])*)\]"),
    ):
        for name in ("a", "a]] b", "a|b", "\\", "a] [[b", "|"):
            texts = local_markers(Item(key, name, 0, 3), HtmlFilter(), "beginning", escape=True)
            match = re.fullmatch(pattern, "".join(texts or ()).split("[/")[0])
            assert match and re.sub(r"\\(.)", r"\1", match[1]) == name  # noqa: PT018


@pytest.mark.slow
def test_many_empty_tags_at_one_character_with_another_key():
    """The empty tags of a page that starts with an entity, in time that is not quadratic."""
    count = 20_000
    tags = [item("html", "b", 0, 0, (2 * number, 2 * number + 1)) for number in range(count)]
    doc = document(
        "hello", *tags, item("html", "p", 0, 5, (2 * count, 0)), item("entity", "E", 0, 5), item("paragraph", "x", 0, 0)
    )
    text = insert_markers(doc, "html entity paragraph", real, "nested").text
    assert text == "[paragraph: x][/paragraph: x]" + "<b></b>" * count + "<p>hello [[E]]</p>"
