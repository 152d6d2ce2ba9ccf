"""Fill in the middle: nothing is lost but the suffix's end, and the draw is a pure function."""

from random import Random

import pytest

from src.data.text.tokenizers import SafeTokenizer
from src.systems.crossattn.data.fim import FimTokens, fill_in_the_middle, fim_tokens, maybe_fill_in_the_middle

TOKENS = FimTokens(prefix=[101], middle=[102], suffix=[103])


def parts(ids):
    """(order, prefix, middle, suffix) of a transformed sequence in which 101, 102 and 103 are the markers."""
    assert ids[0] == 101
    m, s = ids.index(102), ids.index(103)
    if s == 1:
        return "spm", None, ids[m + 1 :], ids[2:m]
    return "psm", ids[1:s], ids[m + 1 :], ids[s + 1 : m]


@pytest.mark.parametrize("length", [6, 7, 20, 60])
def test_both_orders_give_back_the_sequence(length):
    ids, seen, cuts = list(range(length)), set(), set()
    for seed in range(200):
        out = fill_in_the_middle(ids, TOKENS, Random(seed), max_tokens=100)
        order, prefix, middle, suffix = parts(out)
        seen.add(order)
        original_order = middle + suffix if order == "spm" else prefix + middle + suffix
        assert original_order == ids
        cuts.add(length - len(suffix))
        if order == "psm":
            assert prefix[:4] == [0, 1, 2, 3]
    assert seen == {"psm", "spm"}
    assert min(cuts) >= 4


def test_exact_example():
    ids = [0, 1, 2, 3, 4, 5, 6, 7]
    outs = {tuple(fill_in_the_middle(ids, TOKENS, Random(seed), max_tokens=20)) for seed in range(500)}
    assert (101, 0, 1, 2, 3, 4, 103, 6, 7, 102, 5) in outs
    assert (101, 103, 6, 7, 102, 0, 1, 2, 3, 4, 5) in outs
    assert len(outs) == 9  # two cuts among 4, 5, 6: six for PSM; in SPM only the second can be told


def test_a_long_sequence_loses_the_end_of_its_suffix_only():
    ids = list(range(50))
    for seed in range(100):
        out = fill_in_the_middle(ids, TOKENS, Random(seed), max_tokens=20)
        order, prefix, middle, suffix = parts(out)
        remaining_ids = middle + suffix if order == "spm" else prefix + middle + suffix
        assert len(out) == 20
        assert remaining_ids == ids[:17]


@pytest.mark.parametrize("length", [0, 1, 4, 5])
def test_too_short_to_cut_comes_back(length):
    assert fill_in_the_middle(list(range(length)), TOKENS, Random(0), max_tokens=20) == list(range(length))


def test_missing_markers_are_spelled_out(make_tokenizer):
    tokenizer = make_tokenizer(["<|endoftext|>", "<fim_prefix>"], pad=None)
    tokens = fim_tokens(SafeTokenizer(tokenizer))
    assert list(tokens.prefix) == [1]
    assert tokenizer.decode(tokens.middle) == "<fim_middle>"
    assert len(tokens.middle) == len("<fim_middle>")


def test_whether_and_where_is_a_function_of_seed_epoch_and_index():
    ids = list(range(40))

    def draw(*place):
        return maybe_fill_in_the_middle(ids, TOKENS, 100, *place)

    places = [(seed, epoch, index) for seed in range(5) for epoch in range(5) for index in range(20)]
    first = [draw(*place) for place in places]
    assert first == [draw(*place) for place in places]
    num_changed = sum(out != ids for out in first)
    assert 200 < num_changed < 300  # half of 500, within 4.5 standard deviations
    assert len({tuple(out) for out in first}) > 100
