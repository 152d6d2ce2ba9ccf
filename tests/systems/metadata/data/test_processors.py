"""The strings of the worked examples, byte for byte."""

import pytest

from src.systems.metadata.data.annotations import Item
from src.systems.metadata.data.processors import HtmlFilter, Separators, TagRule, global_text, local_markers

LINK = Item("html", "a", 0, 3, attributes=(("class", "x y"), ("id", "4"), ("href", "http://q")))


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("url", "callto:RickAndMorty/Year%202021/", "url: callto:RickAndMorty/Year 2021/"),
        ("timestamp", "2018-12-10T13:45:00.000Z", "Year: 2018 | Month: December"),
        ("timestamp", "2020-09-01 00:00:00", "Year: 2020 | Month: September"),
        ("title", "X", "Title: X"),
        ("website_description", "BBC is", "Website Description: BBC is"),
        ("datasource", "a > b", "Datasource: a > b"),
        ("length", "130", "Text Length: 130"),
        ("foo", "bar", "foo: bar"),
    ],
)
def test_prefix_of_each_key(key: str, value: str, text: str):
    """M1 to M3."""
    assert global_text(Item(key, value), Separators()) == text


@pytest.mark.parametrize(
    ("item", "position", "both"),
    [
        (Item("paragraph", "b", 0, 1), "beginning", ("[paragraph: b]", "[/paragraph: b]")),
        (Item("entity", "Joe_Biden", 0, 1), "beginning", ("", " [[Joe Biden]]")),
        (Item("entity_paragraph", "Joe_Biden", 0, 1), "beginning", (" |Joe Biden|", "")),
        (Item("entity_paragraph", "Joe_Biden", 0, 1), "end", ("", " |Joe Biden|")),
    ],
)
def test_markers_around_a_span(item: Item, position: str, both: tuple[str, str]):
    """M4."""
    assert local_markers(item, HtmlFilter(), position) == both  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("selected", "opening"),
    [(None, "<a class:x y id:4 href:http://q>"), (["class", "id"], "<a class:x y id:4>"), ([], "<a>")],
)
def test_selected_attributes(selected: list[str] | None, opening: str):
    """M5."""
    assert local_markers(LINK, HtmlFilter(attributes=selected), "end") == (opening, "</a>")


def test_tags_that_are_left_out():
    """M6, and M29: without the body alone, what it holds stays."""
    html_filter = HtmlFilter(max_length=0, exceptions=["td"], exclude=[TagRule(tag="body", min_length=0)])
    lengths = {("p", 0): False, ("td", 0): True, ("p", 1): True, ("body", 30): False, ("h1", 15): True}
    assert {(tag, length): html_filter.accepts(tag, length) for tag, length in lengths} == lengths
