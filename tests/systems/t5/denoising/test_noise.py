"""Masks, sentinels and lengths of span corruption, as Google's code has them."""

import re
from math import comb

import numpy as np
import pytest

from src.errors import ConfigError
from src.systems.t5.denoising.noise import composition, corrupt, counts, exact_lengths, lengths, noise_mask, run_starts


def bits(mask):
    return "".join("01"[int(x)] for x in mask)


@pytest.mark.parametrize(
    ("length", "density", "mean_span", "seed", "plain", "rolled_mask"),
    [
        (5, 0.5, 2, 42, "00011", "01100"),
        (10, 0.5, 3, 42, "0001110011", "1000111001"),
        (10, 0.5, 3, 100, None, "0001111001"),
        (10, 0.9, 9, 42, "0111111111", "1011111111"),
    ],
)
def test_seeded_masks_are_those_of_the_reference(length, density, mean_span, seed, plain, rolled_mask):
    assert bits(noise_mask(length, density, mean_span, np.random.RandomState(seed), roll=True)) == rolled_mask
    if plain:
        assert bits(noise_mask(length, density, mean_span, np.random.RandomState(seed))) == plain


@pytest.mark.parametrize(("length", "mask"), [(1, "0"), (2, "01"), (3, "001"), (5, "00001")])
def test_short_rows(length, mask):
    assert bits(noise_mask(length, 0.15, 3, np.random.default_rng(0))) == mask


def test_a_single_token_counts_as_two():
    assert counts(1, 0.15, 3) == counts(2, 0.15, 3) == (1, 1, 1)


def test_padded_rows_of_the_reference():
    """Masks of padded rows, drawn one after the other and turned, with padding and end token cleared, as the seed draws
    them."""
    rows = [
        [8774, 296, 55, 1],
        [947, 19, 46, 677, 28, 3, 9, 1200, 7142, 1],
        [389, 677, 28, 1317, 16513, 58, 23840, 36, 16114, 233, 16990, 2505, 55, 1],
    ]
    inputs = [
        [32099, 296, 55, 1],
        [947, 32099, 46, 677, 28, 3, 9, 1200, 32098, 1],
        [32099, 28, 1317, 16513, 32098, 16114, 233, 16990, 2505, 32097, 1],
    ]
    targets = [[32099, 8774], [32099, 19, 32098, 7142], [32099, 389, 677, 32098, 58, 23840, 36, 32097, 55]]
    rng, sentinels = np.random.RandomState(42), np.arange(32099, 31999, -1)
    for row, row_inputs, row_targets in zip(rows, inputs, targets, strict=True):
        mask = noise_mask(14, 0.5, 3, rng, roll=True)[: len(row)]
        mask[-1] = False
        got = corrupt(np.array(row), mask, run_starts(mask), sentinels, eos_id=-7)
        assert [ids.tolist() for ids in got] == [[*row_inputs, -7], [*row_targets, -7]]


def test_density_0_masks_nothing():
    assert not noise_mask(20, 0.0, 3, np.random.default_rng(0), roll=True).any()


def test_mean_span_1_masks_single_tokens():
    mask = noise_mask(511, 0.15, 1, np.random.default_rng(0))
    assert mask.sum() == run_starts(mask).sum() == 77


def test_density_of_nine_tenths():
    mask = noise_mask(100, 0.9, 9, np.random.default_rng(0))
    assert (mask.sum(), run_starts(mask).sum()) == (90, 10)
    with pytest.raises(
        ConfigError, match=r"90 of 100 tokens in 30 runs leaves 10 tokens, too few .* smaller noise density"
    ):
        noise_mask(100, 0.9, 3, np.random.default_rng(0))


@pytest.mark.parametrize(("density", "mean_span"), [(-0.1, 3), (1.0, 3), (0.15, 0.5)])
def test_values_out_of_range(density, mean_span):
    with pytest.raises(ConfigError, match=re.escape(f"got {density} and {mean_span}.")):
        counts(10, density, mean_span)


def test_halves_are_rounded_to_even():
    assert counts(10, 0.25, 1).noise == 2  # 2.5
    assert counts(10, 0.35, 1).noise == 4  # 3.5
    assert counts(100, 0.05, 2).spans == 2  # 5 / 2


@pytest.mark.parametrize(
    ("inputs", "density", "mean_span", "raw", "targets"),
    [
        (512, 0.15, 3, 568, 114),
        (256, 0.15, 3, 284, 58),
        (128, 0.15, 3, 141, 29),
        (114, 0.15, 3, 126, 26),
        (1024, 0.15, 3, 1137, 229),
        (512, 0.25, 3, 614, 206),
        (512, 0.5, 3, 766, 512),
        (512, 0.15, 8, 588, 100),
        (512, 0.15, 64, 600, 92),
        (512, 0.5, 8, 908, 512),
        (512, 0.5, 64, 1006, 512),
        (64, 0.2, 2, 70, 22),
        (64, 0.2, 1, 63, 27),
        (512, 0.15, 1, 511, 155),
    ],
)
def test_lengths(inputs, density, mean_span, raw, targets):
    assert lengths(inputs, density, mean_span) == (raw, targets)
    mask = noise_mask(raw, density, mean_span, np.random.default_rng(0))
    input_ids, target_ids = corrupt(np.arange(raw), mask, run_starts(mask), np.arange(-1, -1000, -1), eos_id=9999)
    assert (len(input_ids), len(target_ids)) == (inputs, targets)
    assert exact_lengths(inputs, density, mean_span) == (raw, counts(raw, density, mean_span))


@pytest.mark.parametrize(("inputs", "density"), [(3, 0.15), (2, 0.5), (10, 0.01)])
def test_lengths_that_no_row_has(inputs, density):
    with pytest.raises(
        ConfigError, match=f"no row of tokens gives exactly {inputs} input tokens at noise density {density}"
    ):
        exact_lengths(inputs, density, 3)


def test_corrupt():
    ids, mask = np.array([10, 11, 12, 13, 14, 15]), np.array([True, True, False, False, True, False])
    inputs, targets = corrupt(ids, mask, run_starts(mask), np.array([999, 998, 997]), eos_id=1)
    assert inputs.tolist() == [999, 12, 13, 998, 15, 1]
    assert targets.tolist() == [999, 10, 11, 998, 14, 1]


def test_a_run_that_follows_another_has_its_own_sentinel():
    ids, mask = np.array([10, 11, 12, 13]), np.array([False, True, True, True])
    starts = np.array([False, True, False, True])
    inputs, targets = corrupt(ids, mask, starts, np.array([999, 998]), eos_id=1)
    assert inputs.tolist() == [10, 999, 998, 1]
    assert targets.tolist() == [999, 11, 12, 998, 13, 1]


def test_targets_equal_google_for_masks_that_start_unmasked():
    """Its targets are the row with each kept run replaced by the next sentinel."""
    ids, sentinels = np.arange(100, 140), np.arange(999, 900, -1)
    for seed in range(50):
        mask = noise_mask(40, 0.4, 2, np.random.default_rng(seed))
        theirs, num_used = [], 0
        for i, token in enumerate(ids):
            if mask[i]:
                theirs.append(token)
            elif i == 0 or mask[i - 1]:
                theirs.append(sentinels[num_used])
                num_used += 1
        assert corrupt(ids, mask, run_starts(mask), sentinels, 1)[1].tolist() == [*theirs, 1]


def test_padding_ids_in_the_text_are_tokens_like_any_other():
    ids, mask = np.array([0, 5, 0, 0, 6]), np.array([False, False, True, True, False])
    inputs, targets = corrupt(ids, mask, run_starts(mask), np.array([99]), eos_id=1)
    assert inputs.tolist() == [0, 5, 99, 6, 1]
    assert targets.tolist() == [99, 0, 0, 1]


def test_the_row_is_left_as_it_was():
    ids, mask = np.array([10, 11]), np.array([False, True])
    corrupt(ids, mask, run_starts(mask), np.array([99]), eos_id=1)
    assert (ids.tolist(), mask.tolist()) == ([10, 11], [False, True])


def test_compositions_are_equally_likely():
    rng = np.random.default_rng(0)
    compositions = [tuple(composition(5, 3, rng).tolist()) for _ in range(6000)]
    assert set(compositions) == {(1, 1, 3), (1, 3, 1), (3, 1, 1), (1, 2, 2), (2, 1, 2), (2, 2, 1)}
    assert all(abs(compositions.count(parts) - 1000) < 4 * (1000 * 5 / 6) ** 0.5 for parts in set(compositions))


def test_statistics_of_a_hundred_thousand_masks():
    rng, N, L = np.random.default_rng(0), 100_000, 141
    masks = np.empty((N, L), dtype=bool)
    for n in range(N):
        masks[n] = noise_mask(L, 0.15, 3.0, rng)
    starts = masks.copy()
    starts[:, 1:] &= ~masks[:, :-1]
    assert (masks.sum(axis=1) == 21).all()  # density .149
    assert (starts.sum(axis=1) == 7).all()  # mean span 3
    assert not masks[:, 0].any()
    assert masks[:, -1].all()
    # A run's length is that of a part of a random composition of 21 into 7: P(k) = C(20 - k, 5) / C(20, 6).
    ends = np.flatnonzero(masks & ~np.pad(masks[:, 1:], ((0, 0), (0, 1))))
    runs = np.bincount(ends - np.flatnonzero(starts) + 1, minlength=16)[1:16] / (7 * N)
    expected = np.array([comb(20 - k, 5) / comb(20, 6) for k in range(1, 16)])
    assert np.abs(runs - expected).max() < 0.003
    # Positions away from both ends are masked alike.
    assert np.abs(masks[:, 20:-20].mean(axis=0) - masks[:, 20:-20].mean()).max() < 0.01
