"""Gains are of the same characters of the same documents, whatever the tokenizer makes of them with markers between."""

import random
from typing import Any

import pytest

from src.data.text.tokenizers import SafeTokenizer
from src.errors import DataError
from src.systems.metadata import gains
from src.systems.metadata.data.annotations import read_row
from src.systems.metadata.data.examples import ExampleMaker, Writing
from tests.systems.metadata.data.test_examples import MERGES, byte_tokenizer, global_item
from tests.systems.metadata.data.test_linearise import item, random_document


@pytest.mark.parametrize("linearisation", ["nested", "compatible"])
@pytest.mark.parametrize("room", [12, 30, 4000])
@pytest.mark.parametrize("metadata_loss", [False, True])
def test_both_sides_are_scored_at_the_same_tokens(linearisation: Any, room: int, metadata_loss: bool):
    make = ExampleMaker(
        Writing(linearisation=linearisation), SafeTokenizer(byte_tokenizer(merges=MERGES)), room, metadata_loss
    )
    some = 0
    for seed in range(150):
        with_metadata, plain = gains._score_same(gains._both(make, random_document(seed)))
        tokens = [
            [
                (token, span)
                for side_piece in side
                for token, span, mask in zip(side_piece.piece.ids, side_piece.piece.spans, side_piece.mask, strict=True)
                if mask
            ]
            for side in (with_metadata, plain)
        ]
        assert tokens[0] == tokens[1]
        assert not any(side_piece.mask[0] for side in (with_metadata, plain) for side_piece in side), (
            "nothing stands before it"
        )
        some += len(tokens[0])
    assert some > 100


def test_a_check_makes_no_more_blocks_than_two_fitting_documents_need():
    """Long pages with many tags take seconds each."""
    counted_calls = []

    class Counting(ExampleMaker):
        def pieces(self, *args: Any, **kwargs: Any) -> Any:
            counted_calls.append(1)
            return super().pieces(*args, **kwargs)

    rows = [{"text": "abc", "metadata": [global_item("title", f"t{i}")]} for i in range(40)]
    documents = [read_row({"text": "long " * 90, "metadata": rows[0]["metadata"]}, "here")]
    documents += [read_row(row, "here") for row in rows]
    make = Counting(Writing(keys=["title"]), SafeTokenizer(byte_tokenizer()), 60)
    gains.check_fits(gains.Gains(columns=["title"], documents=40), make, lambda: documents)
    assert len(counted_calls) == 1 + 2 * 5, "the long document once, and two documents with all their sides"


@pytest.mark.parametrize("fitting", [0, 1])
def test_a_check_refuses_fewer_than_two_fitting_documents(fitting: int):
    rows = [
        {"text": "abc" if i < fitting else "long " * 90, "metadata": [global_item("title", f"t{i}")]} for i in range(5)
    ]
    make = ExampleMaker(Writing(keys=["title"]), SafeTokenizer(byte_tokenizer()), 60)
    config = gains.Gains(columns=["title"], documents=40)
    with pytest.raises(DataError, match=r"gains\.columns: fewer than two of the 5 documents with title"):
        gains.check_fits(config, make, lambda: [read_row(row, "here") for row in rows])


def test_missing_blocks_on_one_side_do_not_shift_gains():
    """With one token of the text in the first block, that block is left out without metadata."""
    make = ExampleMaker(Writing(keys=["title", "html"]), SafeTokenizer(byte_tokenizer()), 30, end_token=False)
    document = read_row(
        {
            "text": "abcdefghijklmnopqrstuvwxyz",
            "metadata": [global_item("title", "t"), item("html", "x" * 14, 1, 26, (0, 0))],
        },
        "here",
    )
    both = gains._both(make, document)
    assert len(both.with_metadata) != len(both.plain)
    with_metadata, plain = gains._score_same(both)
    scored_tokens = [
        [span for side in sides for span, mask in zip(side.piece.spans, side.mask, strict=True) if mask]
        for sides in (with_metadata, plain)
    ]
    assert scored_tokens[0] == scored_tokens[1] != []


def test_moved_spans_keep_the_marks_around_their_runs():
    document = read_row(
        {"text": "x" * 40, "metadata": [item("html", name, 2, 5, (n, 2 - n)) for n, name in enumerate("abc")]}, "here"
    )
    moved_items = list(gains._move(document.items, 40, random.Random(0)))
    assert [later.end - later.start for later in moved_items] == [3, 3, 3]  # type: ignore[operator]
    assert all(later.start_place is not None for later in moved_items)
    assert moved_items != list(document.items)
    read_row(
        {
            "text": document.text,
            "metadata": [
                item("html", later.value, *later.span, (later.start_place or 0, later.end_place or 0))
                for later in moved_items
            ],
        },
        "here",
    )


def test_the_control_has_the_metadata_of_another_document(caplog: pytest.LogCaptureFixture):
    """Which is written differently: of addresses, only the host is."""
    maker = ExampleMaker(Writing(keys=["title", "url"], url="host"), SafeTokenizer(byte_tokenizer()), 60)
    for key, values, expected in (
        ("title", ["a", "a", "b"], ["b", "b", "a"]),
        ("url", ["https://a/1", "https://a/2", "https://b/1"], ["https://b/1", "https://b/1", "https://a/1"]),
        ("url", ["https://a/1", "https://a/2"], [None, None]),
    ):
        documents = [
            read_row({"text": f"text {n}", "metadata": [global_item(key, value)]}, "here")
            for n, value in enumerate(values)
        ]
        caplog.clear()
        wrong = gains._wrong(documents, maker)
        assert [document.text for document in wrong] == [document.text for document in documents]
        assert [next((item.value for item in document.items), None) for document in wrong] == expected
        assert ("same metadata" in caplog.text) == (None in expected)
