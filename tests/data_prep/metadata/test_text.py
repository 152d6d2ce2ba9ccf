"""Lengths, titles and paragraphs, and the faults of the original."""

import random

import pytest

from data_prep.metadata.html import extract
from data_prep.metadata.text import extract as extract_text
from data_prep.metadata.text import place_entities, sentence_lengths, split_paragraphs, title_items
from src.systems.metadata.data.annotations import read_row
from tests.data_prep.metadata.test_html import random_page


def spans(text: str, compatible: bool = False) -> list[tuple[str, str]]:
    items = sentence_lengths(text, compatible=compatible)
    return [(text[item["char_start_idx"] : item["char_end_idx"]], item["value"]) for item in items]


def test_b16_sentences_keep_their_dots_and_their_tail():
    assert spans("It is v1.2. Is it? No") == [("It is v1.2.", "11"), ("Is it?", "6"), ("No", "2")]
    assert spans("It is v1.2. No", compatible=True) == [("It is v1", "8"), (".2", "1")]
    assert spans("") == spans("   ") == []


@pytest.mark.parametrize(
    ("html", "title", "original"),
    [
        ("<title>T</title>", "T", "T"),
        ("<title a=b>A</title><title>B</title>", "A", "B"),
        ("<title>two\nlines</title>", "two lines", None),
        ("<title></title>", None, None),
    ],
)
def test_b13_a_title(html: str, title: str | None, original: str | None):
    assert [item["value"] for item in title_items([html])] == ([title] if title else [])
    assert [item["value"] for item in title_items([html], compatible=True)] == ([original] if original else [])


def test_paragraphs_end_with_tags_and_empty_lines():
    page = extract("<body><p>one</p><div>two<pre>a\n\nb</pre></div>rest</body>", [])
    paragraphs = list(split_paragraphs(page.text, page.tags))
    assert [(item["value"], item["marker"]) for item in paragraphs] == [
        ("one\n", "p"),
        ("two\na\n\n", "pre+lf"),
        ("b", "pre+lf"),
        ("\n", "div"),
        ("rest\n", "remainder"),
    ]


def test_paragraphs_together_are_the_text():
    for seed in range(200):
        page = extract(random_page(seed), [])
        assert "".join(item["value"] for item in split_paragraphs(page.text, page.tags)) == page.text


def test_entities_are_named_once_a_paragraph_in_their_order():
    page = extract("<body><p>Ann met Bo and Ann</p><p>Ann left</p></body>", [])
    places = [(0, 3, "Ann"), (8, 10, "Bo"), (15, 18, "Ann"), (19, 22, "Ann")]
    entities = [
        {"key": "entity", "type": "local", "char_start_idx": s, "char_end_idx": e, "value": v} for s, e, v in places
    ]
    row = {"text": page.text, "metadata_html": page.tags, "metadata_entity": entities, "html_title": page.title}
    text = extract_text(row)
    names = [
        (item["value"], item["char_start_idx"], item["relative_start_pos"])
        for item in text["metadata_entity_paragraph"]
    ]
    assert names == [("Ann", 0, 0), ("Bo", 0, 1), ("Ann", 19, 2)]
    both = read_row({**row, **text}, "row")
    assert {"generation_length_text", "paragraph", "entity_paragraph"} <= set(both.columns)


def test_rows_of_any_page_are_read():
    for seed in range(100):
        page = extract(random_page(seed), [])
        words = [i for i in range(len(page.text)) if page.text[i].isalpha()]
        draw = random.Random(seed)
        starts = draw.sample(words, min(3, len(words)))
        entities = [
            {"key": "entity", "type": "local", "char_start_idx": s, "char_end_idx": s + 1, "value": "E"} for s in starts
        ]
        row = {**page.columns(), "metadata_entity": entities}
        assert read_row({**row, **extract_text(row)}, "row").text == page.text


def test_long_runs_of_dots_and_many_entities_take_no_longer_than_they_are():
    """A page of a table of contents has thousands."""
    assert len(list(sentence_lengths("a " + "." * 200_000 + "x. End."))) == 2
    text = "word \n\n" * 4000
    paragraphs = list(split_paragraphs(text, []))
    entities = [{"char_start_idx": 7 * i, "char_end_idx": 7 * i + 4, "value": "W"} for i in range(4000)]
    assert len(list(place_entities(entities, paragraphs))) == 4000


def test_titles_are_text_and_not_markup():
    assert title_items(["<title>A &amp; B</title>"]) == [{"key": "title", "type": "global", "value": "A & B"}]
