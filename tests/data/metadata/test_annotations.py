"""Rows of both versions, and what is no row: one line that names the file, the line and the item."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from src.config import Places
from src.data.metadata.annotations import Item, read_row
from src.data.metadata.dataset import Config
from src.data.text import tokenizers
from src.errors import DataError
from src.files import new_directory
from tests import toy

TITLE = {"key": "title", "type": "global", "value": "t"}


def tag(start: int, end: int, places: tuple[int, int] | None = None, **more: Any) -> dict[str, Any]:
    found = {"key": "html", "type": "local", "value": "b", "char_start_idx": start, "char_end_idx": end, **more}
    return found if places is None else {**found, "relative_start_pos": places[0], "relative_end_pos": places[1]}


def test_version_2_takes_keys_from_its_columns():
    """M25 of the worked examples: the key is that of the column where the item has none; a null column has no items."""
    row = {"text": "x", "metadata_url": [{"type": "global", "value": "u"}], "metadata_html": None, "metadata_title": [TITLE]}
    assert read_row(row, "here").items == (Item("url", "u", column="url"), Item("title", "t", column="title"))
    assert read_row({**row, "metadata": [TITLE]}, "here").items == (Item("title", "t", column="title"),), "version 1 goes before"
    assert (
        read_row({"text": "x", "metadata_website_desc": [{"type": "global", "value": "d"}]}, "here").items[0].key == "website_description"
    )


def test_columns_are_named_as_in_version_2_or_by_their_keys():
    """A corpus may have rows of both versions."""
    described = {"type": "global", "value": "d"}
    rows = [{"text": "x", "metadata": [{"key": "website_description", **described}]}, {"text": "x", "metadata_website_desc": [described]}]
    for row in rows:
        assert read_row(row, "here").columns == ["website_desc"]
        for name in ("website_desc", "website_description"):
            assert len(read_row(row, "here", [name]).items) == 1


def test_listed_columns_are_read_and_no_others():
    row = {"text": "x", "metadata_url": [], "metadata_title": [TITLE], "metadata_entity": None}
    assert read_row(row, "here", ["title", "url"]).columns == ["title"]
    with pytest.raises(DataError, match=re.escape("here: unknown column 'titles'. Did you mean 'title'?")):
        read_row(row, "here", ["titles"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"text": 3}, "field 'text': expected str, got 3 (int)."),
        ({"text": "ab\ud800"}, "field 'text': \\ud800 at character 2 is half of a surrogate pair, not text."),
        ({"metadata": {}}, "field 'metadata': expected a list of items or null, got {}."),
        ({"metadata": ["x"]}, "metadata[0]: expected an item, got 'x'."),
        ({"metadata": [TITLE, {**TITLE, "type": "both"}]}, "metadata[1].type: expected 'global' or 'local', got 'both'."),
        ({"metadata": [{**TITLE, "key": ""}]}, "metadata[0].key: expected text, got ''."),
        ({"metadata": [{**TITLE, "value": 5}]}, "metadata[0].value: expected text, got 5."),
        ({"metadata": [{**TITLE, "value": "\udfff"}]}, "metadata[0].value: \\udfff at character 0 is half of a surrogate pair, not text."),
        ({"metadata": [tag(0, 4)]}, "metadata[0]: the span [0, 4) is not in the text of 3 characters."),
        ({"metadata": [tag(2, 1)]}, "metadata[0]: the span [2, 1) is not in the text of 3 characters."),
        ({"metadata": [tag(-1, 1)]}, "metadata[0].char_start_idx: expected a number from 0 on, got -1."),
        ({"metadata": [tag(0, True)]}, "metadata[0].char_end_idx: expected a number from 0 on, got True."),
        ({"metadata": [tag(0, 1, relative_start_pos=0)]}, "metadata[0]: of relative_start_pos and relative_end_pos there is only one."),
        ({"metadata": [tag(0, 1, (0, 0)), tag(1, 2)]}, "some items of the key 'html' have relative positions, and some do not."),
        (
            {"metadata": [tag(0, 2, (0, 0)), tag(0, 1, (0, 0))]},
            "'b' and 'b' of the key 'html' have the relative position 0 at character 0.",
        ),
        ({"metadata": [tag(1, 1, (2, 2))]}, "'b' and 'b' of the key 'html' have the relative position 2 at character 1."),
        (
            {"metadata": [tag(0, 1, html_attrs={"attrs": ["a"], "values": []})]},
            "metadata[0].html_attrs: expected lists 'attrs' and 'values'",
        ),
        ({"metadata_html": [{**TITLE, "key": "html"}]}, "metadata_html[0].type: items of the key 'html' are local here, got 'global'."),
        ({"metadata_title": [{**TITLE, "key": "titel"}]}, "metadata_title[0].key: items of this column are 'title', got 'titel'."),
        ({"metadata": [tag(0, 1, key="title")]}, "metadata[0].type: items of the key 'title' are global here, got 'local'."),
        ({"metadata": [{**TITLE, "key": "timestamp", "value": "2018"}]}, "metadata[0].value: expected a date, such as 2018-12-10"),
        ({"metadata_html": [tag(0, 9)]}, "metadata_html[0]: the span [0, 9) is not in the text of 3 characters."),
    ],
)
def test_what_is_no_row_is_told_with_its_place(changes: dict[str, Any], message: str, tmp_path: Path):
    toy.write_data(tmp_path / "data")
    places = Places(tmp_path / "data", tmp_path / "runs")
    with new_directory(places.data / "bad") as made:
        for split in ("train", "val"):
            (made / f"{split}.jsonl").write_text('{"text": "abc"}\n' + json.dumps({"text": "abc", **changes}) + "\n")
    config = Config(corpus="bad", sequence_tokens=16)
    with pytest.raises(DataError) as caught:
        config.build(places, tokenizers.load(places.data / "toy_tokenizer"), "train", 0)
    assert str(caught.value).startswith(f"{places.data / 'bad' / 'train.jsonl'}:2: ")
    assert message in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1
