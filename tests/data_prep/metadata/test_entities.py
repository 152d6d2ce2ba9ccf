"""Mentions of a dictionary in a text, and the paragraphs that hold them."""

from pathlib import Path

import pytest

from data_prep.metadata import entities
from data_prep.metadata.entities import DictionaryLinker, read_linker
from data_prep.metadata.text import place_entities, split_paragraphs
from src.errors import DataError

LINKER = DictionaryLinker(
    {"Joe": "Joe", "Joe Biden": "Joe Biden", "New York City": "New York City", "York": "York", "C++": "C++"}
)


def mentions_in(text: str) -> list[tuple[str, str]]:
    items = entities.extract({"text": text}, LINKER)["metadata_entity"]
    assert all(item["key"] == "entity" and item["type"] == "local" for item in items)
    return [(text[item["char_start_idx"] : item["char_end_idx"]], item["value"]) for item in items]


def test_the_longest_mention_counts_and_words_are_not_cut():
    assert mentions_in("Joe Biden met Joe in New York City.") == [
        ("Joe Biden", "Joe_Biden"),
        ("Joe", "Joe"),
        ("New York City", "New_York_City"),
    ]
    assert mentions_in("Joey and Yorkshire, joe") == []
    assert mentions_in("Newer: New York") == [("York", "York")]
    assert mentions_in("") == []


def test_entities_of_paragraphs():
    text = "Joe Biden.\n\nYork and Joe."
    items = LINKER.link(text)
    placed_items = list(place_entities(items, list(split_paragraphs(text, []))))
    assert [(item["value"], text[item["char_start_idx"] : item["char_end_idx"]]) for item in placed_items] == [
        ("Joe_Biden", "Joe Biden.\n\n"),
        ("York", "York and Joe."),
        ("Joe", "York and Joe."),
    ]
    assert [item["relative_start_pos"] for item in placed_items] == [0, 1, 2]


def test_a_dictionary_is_a_table(tmp_path: Path):
    (tmp_path / "good.tsv").write_text("Rick\tRick Sanchez\n")
    assert read_linker(str(tmp_path / "good.tsv")).link("So Rick said")[0]["value"] == "Rick_Sanchez"
    (tmp_path / "bad.tsv").write_text("Rick\tRick Sanchez\nMorty\n")
    with pytest.raises(DataError, match=r"bad\.tsv:2: expected a mention, a tab and a title, got 'Morty'"):
        read_linker(str(tmp_path / "bad.tsv"))


def test_a_dictionary_is_utf_8(tmp_path: Path):
    (tmp_path / "good.tsv").write_bytes("\ufeffRick\tRick Sanchez\r\nMorty\tMorty Smith\r\n".encode())
    items = read_linker(str(tmp_path / "good.tsv")).link("Rick said to Morty")
    assert [item["value"] for item in items] == ["Rick_Sanchez", "Morty_Smith"]
    (tmp_path / "bad.tsv").write_bytes(b"Rick\tRick Sanchez\nM\xff\tx\n")
    with pytest.raises(DataError, match=r"bad\.tsv:2: .*invalid start byte at byte 1"):
        read_linker(str(tmp_path / "bad.tsv"))
