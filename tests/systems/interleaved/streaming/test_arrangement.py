"""Which lane takes which document when: each of a source once in each of its epochs, whatever the lanes."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from src.systems.interleaved.streaming.arrangement import PERIOD, JoinedSources, Source, Streams, arrange

SHUFFLES = ("none", "shards", "window")
sizes = st.lists(st.integers(1, 30), min_size=1, max_size=8)


def numbers(
    streams: JoinedSources | Streams, lanes: int, each: int, reshuffles: tuple[tuple[int, int], ...] = ()
) -> list[list[tuple[int, int]]]:
    return [[streams.document(lane, lanes, n, reshuffles) for n in range(each)] for lane in range(lanes)]


@settings(max_examples=60, deadline=None)
@given(sizes, st.sampled_from(SHUFFLES), st.integers(2, 50), st.integers(1, 7), st.integers(0, 3))
def test_an_epoch_has_every_document_once(shard_sizes: list[int], shuffle: str, window: int, lanes: int, seed: int):
    source = Source(shard_sizes, shuffle, window, str(seed))  # pyright: ignore[reportArgumentType]
    streams = JoinedSources([source])
    epochs = 3
    each = -(-epochs * source.count // lanes)
    counts = Counter(pair for lane in numbers(streams, lanes, each) for pair in lane)
    for epoch in range(epochs):
        assert [counts[epoch, document] for document in range(source.count)] == [1] * source.count
    if shuffle == "none":
        assert [source.document(1, place) for place in range(source.count)] == list(range(source.count))


@settings(max_examples=40, deadline=None)
@given(sizes, st.sampled_from(SHUFFLES), st.integers(2, 50), st.integers(1, 5), st.integers(0, 20), st.integers(0, 20))
def test_a_reshuffle_changes_only_the_order_of_the_rest(
    shard_sizes: list[int], shuffle: str, window: int, lanes: int, first: int, second: int
):
    source = Source(shard_sizes, shuffle, window, "s")  # pyright: ignore[reportArgumentType]
    streams = JoinedSources([source])
    each = -(-2 * source.count // lanes)
    plain = numbers(streams, lanes, each)
    again = numbers(streams, lanes, each, ((first, 1), (first + second, 2)))
    for before, after in zip(plain, again, strict=True):
        assert before[:first] == after[:first]
    plain_counts, reshuffled_counts = (Counter(pair for lane in lanes_ for pair in lane) for lanes_ in (plain, again))
    assert {pair: n for pair, n in plain_counts.items() if pair[0] == 0} == {
        pair: n for pair, n in reshuffled_counts.items() if pair[0] == 0
    }


def test_another_epoch_and_another_seed_have_another_order():
    source, other = Source([10] * 10, "window", 30, "a"), Source([10] * 10, "window", 30, "b")
    orders = [[each.document(epoch, place) for place in range(100)] for each in (source, other) for epoch in (0, 1)]
    assert len({tuple(order) for order in orders}) == 4


def test_seeds_are_no_strings_of_digits_in_a_row():
    """Bug of m4: seed 1 with number 11 drew what seed 11 drew with number 1."""
    one, eleven = Source([40], "window", 40, "1"), Source([40], "window", 40, "11")
    orders = [
        [source.document(epoch, place) for place in range(40)]
        for source, epoch in ((one, 11), (eleven, 1), (one, 1), (eleven, 11))
    ]
    assert len({tuple(order) for order in orders}) == 4


def test_shards_stay_together_and_windows_mix_few_of_them():
    shards = Source([10] * 20, "shards", 2, "s")
    places = [shards.document(0, place) // 10 for place in range(200)]
    assert [places[i] for i in range(0, 200, 10)] == [places[i] for i in range(9, 200, 10)]
    assert places[::10] != sorted(places[::10])
    window = Source([10] * 20, "window", 40, "s")
    for first in range(0, 200, 40):
        inside = [window.document(0, place) for place in range(first, first + 40)]
        assert len({document // 10 for document in inside}) == 4
        assert inside != sorted(inside)


@pytest.mark.parametrize("lanes", [1, 3, 16])
def test_sources_have_their_rates_and_epochs_of_their_own(lanes: int):
    """Bug 5 of m4: where one source ended, all began anew, and of a large one most was never seen."""
    sources = [Source([5], "window", 3, "small"), Source([50, 50], "window", 30, "big")]
    streams = Streams(sources, [0.5, 0.5])
    each = 4 * 100 // lanes + 8
    for lane, pairs in enumerate(numbers(streams, lanes, each)):
        for end in range(1, each):
            of_small = sum(document < 5 for _, document in pairs[:end])
            assert abs(of_small - end / 2) <= 1, f"lane {lane} after {end} documents"
    counts = Counter(pair for lane in numbers(streams, lanes, each) for pair in lane)
    assert all(counts[0, document] == 1 for document in range(5, 105))
    assert all(counts[epoch, document] == 1 for epoch in range(20) for document in range(5))


@pytest.mark.parametrize(
    ("sizes", "lanes"),
    [([100, 10], 1), ([3, 500, 7, 1], 4), ([1], 3), ([1] * 300, 7), ([40, 40], 2), ([64, 32, 32], 64)],
)
@pytest.mark.parametrize("shuffle", SHUFFLES)
def test_sources_without_rates_are_read_once_in_an_epoch_and_evenly(sizes: list[int], lanes: int, shuffle: str):
    order = arrange([Source([size], shuffle, 5, str(number)) for number, size in enumerate(sizes)], [])  # pyright: ignore[reportArgumentType]
    total = sum(sizes)
    by_lane = numbers(order, lanes, -(-3 * total // lanes))
    sequence = [by_lane[g % lanes][g // lanes] for g in range(3 * total)]
    assert Counter(sequence) == {(epoch, document): 1 for epoch in range(3) for document in range(total)}
    for part in range(1, 5):
        first = [document for _, document in sequence[: total * part // 4]]
        for start, size in zip(order.starts, sizes, strict=False):
            assert abs(sum(start <= document < start + size for document in first) - size * part / 4) <= 1


def test_a_huge_source_does_not_multiply_the_epochs_of_a_small_one():
    order, total = arrange([Source([10**8], "none", 2, ""), Source([10], "none", 2, "")], []), 10**8 + 10
    near = [(2 * k + 1) * total // 20 + shift for k in range(10) for shift in range(-3, 4)]
    assert sorted(
        document for _, document in (order.document(0, 1, number) for number in near) if document >= 10**8
    ) == [*range(10**8, total)]
    assert [order.epoch(0, 1, number) for number in (total - 1, total)] == [0, 1]


@pytest.mark.slow
def test_thousands_of_sources_without_rates_are_all_read():
    order = arrange([Source([2], "window", 3, str(number)) for number in range(5000)], [])
    assert len({order.document(lane, 8, number) for lane in range(8) for number in range(1250)}) == 10_000


def test_a_step_has_a_share_of_each_source():
    """Lanes begin at different places of the schedule: else all would take the rare source in the same step."""
    streams = Streams([Source([1000], "none", 2, ""), Source([1000], "none", 2, "")], [0.9, 0.1])
    for number in range(50):
        rare = sum(streams.document(lane, 100, number)[1] >= 1000 for lane in range(100))
        assert 8 <= rare <= 12


def test_documents_of_a_source_are_counted():
    streams = Streams([Source([7], "none", 2, ""), Source([9], "none", 2, "")], [2, 1])
    for lane in range(3):
        for number in (0, 1, 50, PERIOD - 1, PERIOD, 3 * PERIOD + 17):
            expected = [0, 0]
            if number <= 50:
                for n in range(number):
                    expected[streams.turn(lane, 3, n)[0]] += 1
                assert [streams.count_of_source(lane, 3, number, source) for source in (0, 1)] == expected
            assert sum(streams.count_of_source(lane, 3, number, source) for source in (0, 1)) == number
