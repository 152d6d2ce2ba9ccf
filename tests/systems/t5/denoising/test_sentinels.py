"""Sentinels are what the tokenizer's table says, however it numbers them."""

import pytest

from src.errors import ConfigError, DataError
from src.systems.t5.denoising import sentinels

ENDS = ("<|endoftext|>", "<|pad|>")


@pytest.mark.parametrize("order", [1, -1])
def test_ids_come_from_the_table(make_tokenizer, order):
    tokenizer = make_tokenizer([*ENDS, *[f"<extra_id_{k}>" for k in range(5)][::order]])
    assert sentinels.sentinel_ids(tokenizer) == [2, 3, 4, 5, 6][::order]
    assert sentinels.require(tokenizer, 2, "data.input_tokens") == [2, 3, 4, 5, 6][::order][:2]


def test_a_gap_ends_them(make_tokenizer):
    assert sentinels.sentinel_ids(make_tokenizer([*ENDS, "<extra_id_0>", "<extra_id_1>", "<extra_id_3>"])) == [2, 3]


def test_none(tokenizer):
    with pytest.raises(DataError, match=r"has no sentinels <extra_id_0>, .*data_prep\.t5\.t5_tokenizer"):
        sentinels.sentinel_ids(tokenizer)


def test_tokens_that_text_could_spell_are_refused(make_tokenizer):
    tokenizer = make_tokenizer([*ENDS, "<extra_id_0>"])
    tokenizer.add_tokens(["<extra_id_1>"])
    with pytest.raises(DataError, match="<extra_id_1> is not a special token"):
        sentinels.sentinel_ids(tokenizer)


def test_too_few(make_tokenizer):
    with pytest.raises(ConfigError, match=r"^data\.x: masks 2 runs .* has 1 sentinels\. Use fewer input tokens"):
        sentinels.require(make_tokenizer([*ENDS, "<extra_id_0>"]), 2, "data.x")
