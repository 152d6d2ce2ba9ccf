"""Sentences: no character is lost, and where they end."""

import pytest

from src.systems.t5.denoising.depth.sentences import split


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("One. Two! Three? Four", ["One.", " Two!", " Three?", " Four"]),
        (
            "Dr. Smith met Mrs. Jones at 5 p.m. sharp. He left.",
            ["Dr. Smith met Mrs. Jones at 5 p.m. sharp.", " He left."],
        ),
        ("See Fig. 3 and J. R. Smith, e.g. The Book of 3.14 in. Ok.", None),
        (
            "A heading\n\nIts text. More\nof it.\n \n\nEnd",
            ["A heading", "\n\nIts text.", " More\nof it.", "\n \n\nEnd"],
        ),
        ('He said "Go." Then went.', ['He said "Go."', " Then went."]),
        ("  \n\n  Led by blanks. And trailed. \n\n\n ", ["  \n\n  Led by blanks.", " And trailed. \n\n\n "]),
        ("", []),
        (" \n\n \n", []),
        ("no end", ["no end"]),
        ("\n\n\n\na\n\n\n\nb", ["\n\n\n\na", "\n\n\n\nb"]),
    ],
)
def test_where_sentences_end(text, expected):
    sentences = split(text)
    assert "".join(sentences) == (text if text.strip() else "")
    assert all(sentence.strip() for sentence in sentences)
    if expected is not None:
        assert sentences == expected


def test_abbreviations_end_no_sentence():
    assert split("See Fig. A of Prof. Jones vs. Smith Jr. today. Yes.") == [
        "See Fig. A of Prof. Jones vs. Smith Jr. today.",
        " Yes.",
    ]
