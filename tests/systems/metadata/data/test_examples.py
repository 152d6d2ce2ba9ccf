"""Pieces of documents: the worked examples of the specification under a tokenizer of bytes, and what holds of both
linearisations."""

from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from src.data.text.tokenizers import SafeTokenizer
from src.errors import ConfigError
from src.experiments.config import load
from src.systems.metadata.data.annotations import Document, read_row
from src.systems.metadata.data.examples import PROMPT, ExampleMaker, Piece, Writing, prompt
from tests.systems.metadata.data.test_linearise import item, random_document


def byte_tokenizer(*special: str, merges: tuple[tuple[str, str], ...] = ()) -> PreTrainedTokenizerFast:
    """One token for each byte; "#" stands for the end token in these tests."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*letters, *(first + second for first, second in merges)]
    inner = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=list(merges)))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    from tokenizers import decoders

    inner.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<eos>", extra_special_tokens=list(special))


def tokenizer_of_letters() -> PreTrainedTokenizerFast:
    """Which leaves out what it does not know."""
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.BPE(vocab={"a": 0, " ": 1}, merges=[])), eos_token="<eos>"
    )


def maker(
    room: int, merges: tuple[tuple[str, str], ...] = (), end_token: bool = False, **writing: Any
) -> tuple[ExampleMaker, Any]:
    config = load(Writing, writing, "data.writing")
    tokenizer = byte_tokenizer(*config.new_tokens(), merges=merges)
    return ExampleMaker(config, SafeTokenizer(tokenizer), room, writing.get("regular", False), end_token), tokenizer


def document(text: str, *items: dict[str, Any]) -> Document:
    return read_row({"text": text, "metadata": list(items)}, "row")


def global_item(key: str, value: str) -> dict[str, str]:
    return {"key": key, "type": "global", "value": value}


def metadata_mask(piece: Piece) -> str:
    return "".join(str(int(not text)) for text in piece.of_text)


URL = global_item("url", "a.b/x%20y+z")
BOLD = item("html", "b", 0, 1, (0, 0))


def test_a_prefix_and_a_text_in_one_row():
    make, tokenizer = maker(40, keys=["url"], linearisation="compatible")
    (piece,) = make.pieces(document("Wubba Lubba Dub Dub!", URL))
    assert tokenizer.decode(piece.ids) == "url: a.b/x y z ||| Wubba Lubba Dub Dub!"
    assert metadata_mask(piece) == "1" * 18 + "0" * 21
    assert piece.loss_mask == [False] * 18 + [True] * 21


def test_no_metadata_no_space():
    make, tokenizer = maker(8, keys=["url"], linearisation="compatible", separators={"prefix_end": "|"})
    (piece,) = make.pieces(document("hello"))
    assert (tokenizer.decode(piece.ids), metadata_mask(piece), piece.loss_mask) == (
        "hello",
        "00000",
        [False, True, True, True, True],
    )


def test_local_metadata_and_announced_keys():
    make, tokenizer = maker(16, keys=["html"], linearisation="compatible")
    (piece,) = make.pieces(document("ab", BOLD))
    assert (tokenizer.decode(piece.ids), metadata_mask(piece)) == ("<b>a</b>b", "111011110")
    announcing, tokenizer = maker(24, keys=["html"], linearisation="compatible", list_local_keys=True)
    (piece,) = announcing.pieces(document("ab", BOLD))
    assert (tokenizer.decode(piece.ids), metadata_mask(piece)) == ("html ||| <b>a</b>b", "111111110111011110")


def test_every_block_has_the_prefix_and_the_space():
    """BigScience's code loses the space of all blocks but the first."""
    for linearisation in ("compatible", "nested"):
        make, tokenizer = maker(20, keys=["url"], linearisation=linearisation)
        pieces = make.pieces(document("0123456789abcdef", global_item("url", "u")))
        assert [tokenizer.decode(piece.ids) for piece in pieces] == ["url: u ||| 012345678", "url: u ||| 9abcdef"]


@pytest.mark.parametrize("linearisation", ["compatible", "nested"])
def test_truncated_prefix_ends_with_its_separator(linearisation: str):
    """BigScience's code takes the last two tokens for the separator."""
    for merges in ((), (("|", "|"),), (("Ġ", "|"), ("|", "|"), ("Ġ|", "||"))):
        make, tokenizer = maker(40, merges, keys=["url"], linearisation=linearisation)
        (piece, *_) = make.pieces(document("text" * 3, global_item("url", "u" * 99)))
        assert tokenizer.decode(piece.ids).startswith("url: uuu")
        assert "u ||| text" in tokenizer.decode(piece.ids)
        assert piece.of_text.index(True) == 20 + (linearisation == "nested"), (
            "half of the row; the space is of the text in one"
        )


def test_special_tokens_are_one_token_and_text_never_is():
    make, tokenizer = maker(
        64, keys=["html"], special_tokens=True, run_starts={"html": "<HTML>"}, run_ends={"html": "</HTML>"}
    )
    for linearisation in ("nested", "compatible"):
        make, tokenizer = maker(
            64,
            keys=["html"],
            linearisation=linearisation,
            special_tokens=True,
            run_starts={"html": "<HTML>"},
            run_ends={"html": "</HTML>"},
        )
        start = tokenizer.convert_tokens_to_ids("<HTML>")
        (piece,) = make.pieces(document("a <HTML> b", item("html", "p", 0, 10, (0, 0))))
        assert piece.ids.count(start) == 2, "before each run"
        assert piece.ids[0] == start
        text = tokenizer.decode([token for token, text in zip(piece.ids, piece.of_text, strict=True) if text])
        assert text == "a <HTML> b"


MERGES = (("a", "a"), ("Ġ", "a"), ("<", "b"), ("[", "["), ("Ã", "©"))


@pytest.mark.parametrize("linearisation", ["compatible", "nested"])
def test_without_metadata_the_blocks_are_the_plain_text(linearisation: str):
    make, _ = maker(24, MERGES, linearisation=linearisation, end_token=True)
    encoder = SafeTokenizer(byte_tokenizer(merges=MERGES))
    for seed in range(300):
        example = random_document(seed)
        both, plain = make.pieces(example), make.pieces(example, with_metadata=False)
        ids = iter([*encoder.encode(example.text), encoder.eos_id])
        assert all(token in ids for piece in plain for token in piece.ids), (
            "in their order; one alone in its block has nothing to learn from"
        )
        if linearisation == "nested":
            text = [[token for token, text in zip(piece.ids, piece.of_text, strict=True) if text] for piece in both]
            assert [ids for ids in text if len(ids) > 1] == [piece.ids for piece in plain if len(piece.ids) > 1]
        for piece in [*both, *plain]:
            assert any(piece.loss_mask)
            assert not piece.loss_mask[0]
            assert len(piece.ids) <= 24
            spans = [span for span in piece.spans if span]
            assert spans == sorted(spans)


def test_nested_text_has_the_tokens_of_the_plain_text():
    make, _ = maker(4000, MERGES)
    encoder = SafeTokenizer(byte_tokenizer(merges=MERGES))
    for seed in range(300):
        example = random_document(seed)
        ids = [
            token
            for piece in make.pieces(example)
            for token, text in zip(piece.ids, piece.of_text, strict=True)
            if text
        ]
        assert ids == encoder.encode(example.text) or len(encoder.encode(example.text)) < 2


def test_markers_in_the_loss_are_optional():
    config = load(Writing, {"keys": ["url", "html"]}, "data.writing")
    make = ExampleMaker(config, SafeTokenizer(byte_tokenizer()), 64, metadata_loss=True, end_token=False)
    (piece,) = make.pieces(document("ab", URL, BOLD))
    assert piece.loss_mask == [False] * 19 + [True] * len("<b>a</b>b")


def test_a_prompt_says_it_in_words():
    example = document(
        "abc",
        URL,
        global_item("length", "130"),
        global_item("datasource", "a > b"),
        item("entity", "Joe_Biden", 0, 1),
        item("entity", "A", 1, 2),
        BOLD,
    )
    text = "url: a.b/x y z; Number of characters: 130; Data source: a > b; Entities: Joe Biden, A; Html"
    keys = ["url", "length", "datasource", "entity", "html"]
    assert prompt(example, keys, PROMPT) == text
    make, tokenizer = maker(200, keys=keys, style="prompt", separators=PROMPT.model_dump())
    (piece,) = make.pieces(example)
    assert tokenizer.decode(piece.ids) == f"{text} abc"


def test_no_room_or_no_separator():
    with pytest.raises(ConfigError, match=r"data\.sequence_tokens: 8 tokens leave no room"):
        maker(8)
    with pytest.raises(ConfigError, match=r"prefix_end: .*'é'"):
        ExampleMaker(load(Writing, {"separators": {"prefix_end": "é"}}, "w"), SafeTokenizer(tokenizer_of_letters()), 64)
    specials = load(
        Writing,
        {"keys": ["html"], "special_tokens": True, "run_starts": {"html": "<X>"}, "run_ends": {"html": "<Y>"}},
        "w",
    )
    with pytest.raises(ConfigError, match=r"special_tokens: .*'<X>'"):
        ExampleMaker(specials, SafeTokenizer(byte_tokenizer("<Y>")), 64)
    with pytest.raises(ConfigError, match=r"unknown key 'urll'. Did you mean 'url'\?"):
        load(Writing, {"keys": ["url"], "local_key_names": {"urll": "x"}}, "data.writing")


@pytest.mark.parametrize("room", [4, 5, 7, 8])
def test_lists_of_a_block_have_equal_length(room: int):
    """M16: consecutive blocks of n, the last one shorter; ids and masks stay aligned."""
    make, tokenizer = maker(room, end_token=False, prefix_share=0.5, separators={"prefix_end": "|"})
    text = "abcdefgh"
    pieces = make.pieces(document(text))
    assert [tokenizer.decode(piece.ids) for piece in pieces] == [
        text[i : i + room] for i in range(0, len(text), room) if len(text[i:]) > 1
    ]
    assert all(len(piece.ids) == len(piece.loss_mask) == len(piece.spans) for piece in pieces)


def test_every_block_has_room_for_text():
    with pytest.raises(ConfigError, match=r"prefix_share: 0\.95 of 10 tokens leaves no room for the text"):
        maker(10, prefix_share=0.95, separators={"prefix_end": "|"})
    make, _ = maker(10, prefix_share=0.8, separators={"prefix_end": "|"})
    assert all(len(piece.ids) == 10 for piece in make.pieces(document("abcdefgh", global_item("url", "u" * 99))))


@pytest.mark.parametrize("linearisation", ["compatible", "nested"])
def test_text_cannot_spell_a_control_token(linearisation: str):
    starts = {"run_starts": {"html": "<HTML>"}, "run_ends": {"html": "</HTML>"}, "special_tokens": True}
    make, tokenizer = maker(100, linearisation=linearisation, keys=["html"], **starts)
    html_item = item("html", "b", 0, 1, (0, 0), **{"class": "<HTML>", "id": chr(0xFDD0)})
    (piece,) = make.pieces(document(f"ab <HTML> {chr(0xFDD0)}", html_item))
    token_id = tokenizer.convert_tokens_to_ids("<HTML>")
    assert piece.ids.count(token_id) == 2, "before the start and before the end of the span"


def test_only_the_host_of_an_address():
    make, tokenizer = maker(60, keys=["url"], url="host", separators={"prefix_end": "\n\n"})
    for address in ("https://me:secret@docs.python.org:443/3/", "docs.python.org/3/library", "//docs.python.org"):
        (piece,) = make.pieces(document("x", global_item("url", address)))
        assert tokenizer.decode(piece.ids) == "URL: docs.python.org\n\nx"
    assert make.prefix(document("x", global_item("url", "http://[broken"))) == "URL: http://[broken"
