"""Rows of both versions, and the one-line errors of malformed rows."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from src.data.text import tokenizers
from src.errors import DataError
from src.experiments.config import Places
from src.files import new_directory
from src.systems.metadata.data.annotations import Item, compact_item, read_row
from src.systems.metadata.data.dataset import Config
from tests import toy

TITLE = {"key": "title", "type": "global", "value": "t"}


def tag(start: int, end: int, places: tuple[int, int] | None = None, **more: Any) -> dict[str, Any]:
    item = {"key": "html", "type": "local", "value": "b", "char_start_idx": start, "char_end_idx": end, **more}
    return item if places is None else {**item, "relative_start_pos": places[0], "relative_end_pos": places[1]}


def test_version_2_gets_keys_from_its_columns():
    """M25 of the worked examples: the key is that of the column where the item has none; a null column has no items."""
    row = {
        "text": "x",
        "metadata_url": [{"type": "global", "value": "u"}],
        "metadata_html": None,
        "metadata_title": [TITLE],
    }
    assert read_row(row, "here").items == (Item("url", "u", column="url"), Item("title", "t", column="title"))
    assert read_row({**row, "metadata": [TITLE]}, "here").items == (Item("title", "t", column="title"),), (
        "version 1 goes before"
    )
    assert (
        read_row({"text": "x", "metadata_website_desc": [{"type": "global", "value": "d"}]}, "here").items[0].key
        == "website_description"
    )


def test_null_is_a_missing_field():
    """Parquet has all fields of a list in each of its items."""
    items = [
        {"value": "t"},
        tag(0, 1, html_attrs={"attrs": ["a"], "values": [None]}),
        tag(0, 1, html_attrs={"attrs": None, "values": None}),
    ]
    names = dict.fromkeys(name for item in items for name in item)
    full = [{name: item.get(name) for name in (*names, "relative_start_pos", "relative_end_pos")} for item in items]
    row = {"text": "x", "metadata_title": full[:1], "metadata_html": full[1:]}
    assert read_row(row, "here").items == (
        Item("title", "t", column="title"),
        Item("html", "b", 0, 1, attributes=(("a", ""),), column="html"),
        Item("html", "b", 0, 1, column="html"),
    )
    length = [{"key": None, "type": None, "value": None}]
    assert read_row({"text": "four", "metadata_generation_length_text": length}, "here").items[0].value == "4"


def test_columns_are_named_as_in_version_2_or_by_their_keys():
    """A corpus may have rows of both versions."""
    description = {"type": "global", "value": "d"}
    rows = [
        {"text": "x", "metadata": [{"key": "website_description", **description}]},
        {"text": "x", "metadata_website_desc": [description]},
    ]
    for row in rows:
        assert read_row(row, "here").columns == ["website_desc"]
        for name in ("website_desc", "website_description"):
            assert len(read_row(row, "here", [name]).items) == 1


def test_only_listed_columns_are_read():
    row = {"text": "x", "metadata_url": [], "metadata_title": [TITLE], "metadata_entity": None}
    assert read_row(row, "here", ["title", "url"]).columns == ["title"]
    with pytest.raises(DataError, match=re.escape("here: unknown column 'titles'. Did you mean 'title'?")):
        read_row(row, "here", ["titles"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"text": 3}, "field 'text': expected str, got 3 (int)."),
        ({"text": "ab\ud800"}, "field 'text': \\ud800 at character 2 is half of a surrogate pair"),
        ({"metadata": {}}, "field 'metadata': expected a list of items or null, got {}."),
        ({"metadata": ["x"]}, "metadata[0]: expected an item, got 'x'."),
        (
            {"metadata": [TITLE, {**TITLE, "type": "both"}]},
            "metadata[1].type: expected 'global' or 'local', got 'both'.",
        ),
        ({"metadata": [{**TITLE, "key": ""}]}, "metadata[0].key: expected text, got ''."),
        ({"metadata": [{**TITLE, "value": 5}]}, "metadata[0].value: expected text, got 5."),
        (
            {"metadata": [{**TITLE, "value": "\udfff"}]},
            "metadata[0].value: \\udfff at character 0 is half of a surrogate pair",
        ),
        ({"metadata": [tag(0, 4)]}, "metadata[0]: the span [0, 4) is not in the text of 3 characters. Correct it."),
        ({"metadata": [tag(2, 1)]}, "metadata[0]: the span [2, 1) is not in the text of 3 characters. Correct it."),
        ({"metadata": [tag(-1, 1)]}, "metadata[0].char_start_idx: expected a number from 0 on, got -1."),
        ({"metadata": [tag(0, True)]}, "metadata[0].char_end_idx: expected a number from 0 on, got True."),
        ({"metadata": [tag(0, 1, relative_start_pos=0)]}, "metadata[0].relative_end_pos: missing"),
        ({"metadata": [tag(0, 1, (0, 0)), tag(0, 2)]}, "character 0: 2 markers of the key 'html'"),
        ({"metadata": [tag(0, 2, (0, 0)), tag(0, 2, (0, 1), value="i")]}, "character 0: 'b' and 'i' of the key 'html'"),
        (
            {"metadata": [tag(0, 1, html_attrs={"attrs": ["a"], "values": []})]},
            "metadata[0].html_attrs: expected lists 'attrs' and 'values'",
        ),
        (
            {"metadata_html": [{**TITLE, "key": "html"}]},
            "metadata_html[0].type: items of the key 'html' are local here, got 'global'.",
        ),
        (
            {"metadata_title": [{**TITLE, "key": "titel"}]},
            "metadata_title[0].key: items of this column are 'title', got 'titel'.",
        ),
        (
            {"metadata": [tag(0, 1, key="title")]},
            "metadata[0].type: items of the key 'title' are global here, got 'local'.",
        ),
        (
            {"metadata": [{**TITLE, "key": "timestamp", "value": "2018"}]},
            "metadata[0].value: expected a date, such as 2018-12-10",
        ),
        (
            {"metadata_html": [tag(0, 9)]},
            "metadata_html[0]: the span [0, 9) is not in the text of 3 characters. Correct it.",
        ),
    ],
)
def test_errors_name_file_line_and_item(changes: dict[str, Any], message: str, tmp_path: Path):
    toy.write_data(tmp_path / "data")
    places = Places(tmp_path / "data", tmp_path / "runs")
    with new_directory(places.data / "bad") as folder:
        for split in ("train", "val"):
            (folder / f"{split}.jsonl").write_text('{"text": "abc"}\n' + json.dumps({"text": "abc", **changes}) + "\n")
    config = Config(corpus="bad", sequence_tokens=16)
    with pytest.raises(DataError) as error_info:
        config.build(places, tokenizers.load(places.data / "toy_tokenizer"), "train", 0)
    assert str(error_info.value).startswith(f"{places.data / 'bad' / 'train.jsonl'}:2: ")
    assert message in str(error_info.value)
    assert len(str(error_info.value).splitlines()) == 1


def places(items: list[dict[str, Any]], text: str = "abcdef") -> list[tuple[int | None, int | None]]:
    return [(item.start_place, item.end_place) for item in read_row({"text": text, "metadata": items}, "here").items]


def entity(start: int, end: int, place: int) -> dict[str, Any]:
    return tag(start, end, (place, place), key="entity_paragraph", value=f"E{start}{end}{place}")


def test_one_counter_for_starts_and_ends():
    """The layout of HTML columns: `<b>ab</b><i><br></br>cd</i>` with one counter per character."""
    items = [tag(0, 2, (0, 0)), tag(2, 4, (1, 0)), tag(2, 2, (2, 3))]
    assert places(items) == [(0, 0), (1, 0), (2, 3)]
    assert places([tag(0, 2, (7, 3)), tag(2, 4, (9, 0))]) == [(0, 0), (1, 0)], "ranks, whatever the numbers"


def test_counters_that_restart_at_each_paragraph():
    """The layout of BigScience's entity paragraphs: both sides count from 0, so an end and a start share a position."""
    items = [entity(0, 3, 0), entity(0, 3, 1), entity(3, 6, 0), entity(3, 6, 1), entity(3, 6, 2)]
    assert places(items) == [(0, 0), (1, 1), (2, 0), (3, 1), (4, 2)]


def test_entities_of_a_paragraph_that_another_span_interrupts():
    """The counter restarts after the other span, so two starts have position 0: the order of the row counts."""
    items = [entity(0, 6, 0), entity(0, 6, 1), entity(2, 4, 0), {**entity(0, 6, 0), "value": "last"}]
    assert places(items) == [(0, 0), (1, 1), (0, 0), (2, 2)]


def test_separate_counters_for_starts_and_ends_of_tags():
    """`<b>ab</b><br></br><i>cd</i>` and `<b>ab<br></br></b><i>cd</i>`: the ends show whether the break is inside."""
    assert places([tag(0, 2, (0, 0)), tag(2, 2, (0, 1)), tag(2, 4, (1, 0))]) == [(0, 0), (1, 2), (3, 0)]
    assert places([tag(0, 2, (0, 1)), tag(2, 2, (0, 0)), tag(2, 4, (1, 0))]) == [(0, 2), (0, 1), (3, 0)]
    assert places([tag(1, 1, (2, 2))]) == [(0, 1)], "an empty span starts before it ends"
    assert places([tag(0, 2, (0, 0)), tag(0, 4, (0, 0))]) == [(1, 0), (0, 0)], "the longer span is outside"


def test_equal_tags_with_equal_positions():
    """Their order makes no difference."""
    assert sorted(places([tag(0, 3, (0, 0)), tag(0, 3, (0, 0))])) == [(0, 0), (1, 1)]


def test_positions_of_only_some_items_where_the_order_is_clear():
    assert places([tag(0, 2, (0, 0)), tag(2, 4)]) == [(0, 0), (1, 0)]
    assert places([tag(0, 2), tag(2, 4)]) == [(None, None), (None, None)]


def test_items_without_derivable_fields():
    text = "one two"
    raw = {"key": "paragraph", "type": "local", "char_start_idx": 0, "char_end_idx": 3, "value": "one", "marker": "p"}
    short = compact_item("paragraph", raw, text)
    assert short == {"char_start_idx": 0, "char_end_idx": 3, "marker": "p"}
    assert compact_item("paragraph", {**raw, "value": "other"}, text)["value"] == "other"
    length = {"key": "length", "type": "local", "char_start_idx": 0, "char_end_idx": 3, "value": "3"}
    assert compact_item("generation_length_sentence", length, text) == {"char_start_idx": 0, "char_end_idx": 3}
    html = {**tag(0, 3, (0, 0)), "html_attrs": {"attrs": [], "values": []}}
    assert compact_item("html", html, text).keys() == html.keys() - {"key", "type", "html_attrs"}
    full = {
        "text": text,
        "metadata_paragraph": [raw],
        "metadata_generation_length_sentence": [length],
        "metadata_html": [html],
    }
    both = [
        full,
        {
            name: [compact_item(name.removeprefix("metadata_"), value[0], text)] if name != "text" else text
            for name, value in full.items()
        },
    ]
    assert read_row(both[0], "here") == read_row(both[1], "here")
