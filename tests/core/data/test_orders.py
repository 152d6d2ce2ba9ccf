"""Data order is a pure function of (seed, step): each sample once an epoch, for every world size and after every
restart.

Each test is of both ways to permute an epoch.
"""

import random
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice

import numpy as np
import pytest

from src.data.orders import GroupedOrder, IndexedOrder, Key, RankShare, Shuffle
from src.errors import RunError
from src.runs.history.branches import Branch
from src.training.seeds import dropout_seed


@pytest.fixture(params=["numpy", "feistel"])
def shuffle(request: pytest.FixtureRequest) -> Shuffle:
    return request.param


def test_each_epoch_is_a_permutation_of_its_own(shuffle: Shuffle):
    stream = list(islice(IndexedOrder(3, 10, 4, shuffle=shuffle).keys(), 30))
    epochs = [[index for epoch, index in stream if epoch == e] for e in range(3)]
    assert [sorted(indices) for indices in epochs] == [list(range(10))] * 3
    assert epochs[0] != epochs[1] != epochs[2]


def test_another_seed_is_another_order(shuffle: Shuffle):
    first, second = (list(islice(IndexedOrder(seed, 100, 4, shuffle=shuffle).keys(), 100)) for seed in (0, 1))
    assert first != second


@pytest.mark.parametrize("first", [0, 1, 9, 10, 25])
def test_the_order_does_not_depend_on_where_one_starts(first: int, shuffle: Shuffle):
    order = IndexedOrder(7, 10, 4, shuffle=shuffle)
    whole = list(islice(order.keys(), 40))
    assert list(islice(order.keys(first), 40 - first)) == whole[first:]


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_the_ranks_together_read_the_positions_of_each_step_once(world_size: int, shuffle: Shuffle):
    order = IndexedOrder(0, 50, per_step=8, shuffle=shuffle)

    def read(rank: int, first_step: int, steps: int) -> list[list[Key]]:
        share = RankShare(per_step=8, micro_batch=2, rank=rank, world_size=world_size)
        return [keys for keys, *_ in islice(order.micro_batches(first_step, share, {}), steps * 4 // world_size)]

    per_rank = [read(rank, first_step=5, steps=3) for rank in range(world_size)]
    interleaved = [batch for group in zip(*per_rank, strict=True) for batch in group]
    assert [key for batch in interleaved for key in batch] == list(islice(order.keys(40), 24))


def test_noise_differs_by_seed_step_and_micro_batch():
    seeds = {dropout_seed(s, t, m) for s in range(4) for t in range(10) for m in range(8)}
    assert len(seeds) == 4 * 10 * 8
    assert all(0 <= seed < 2**63 for seed in seeds)


Reader = Callable[..., list[list[Key]]]


@pytest.fixture
def keys(shuffle: Shuffle) -> Reader:
    return partial(read_keys, shuffle)


def read_keys(
    shuffle: Shuffle, branches: Sequence[Branch], first: int, last: int, num_samples: int = 50, world_size: int = 1
) -> list[list[Key]]:
    """What each of the steps after `first` up to `last` reads."""
    per_step = 4
    order, read = IndexedOrder(3, num_samples, per_step, branches, shuffle), []
    for rank in range(world_size):
        share = RankShare(per_step=per_step, micro_batch=2, rank=rank, world_size=world_size)
        stream = islice(order.micro_batches(first, share, {}), (last - first) * 2 // world_size)
        read.append([each.keys for each in stream])
    flat = [key for group in zip(*read, strict=True) for batch in group for key in batch]
    return [flat[i : i + per_step] for i in range(0, len(flat), per_step)]


def random_branches(draw: random.Random) -> list[Branch]:
    """A chain of one to four rewinds."""
    steps = sorted(draw.sample(range(1, 60), draw.randint(1, 4)))
    return [
        Branch(
            number=number,
            from_step=step,
            data=draw.choice(["same", "reshuffle", "reshuffle", f"skip:{draw.randint(1, 20)}"]),
        )
        for number, step in enumerate(steps, start=1)
    ]


def test_a_branch_that_changes_no_data_reads_the_same(keys: Reader):
    assert keys([Branch(number=1, from_step=5, data="same")], 0, 40) == keys([], 0, 40)


@pytest.mark.slow
@pytest.mark.parametrize("case", range(40))
def test_after_any_rewinds_the_order_does_not_depend_on_where_one_starts_or_how_many_read(case: int, keys: Reader):
    draw = random.Random(case)
    branches, num_samples = random_branches(draw), draw.choice([13, 50, 64, 300])
    whole = keys(branches, 0, 80, num_samples)
    for first in [branches[-1].from_step, *draw.sample(range(80), 5)]:
        assert keys(branches, first, 80, num_samples) == whole[first:]
    assert keys(branches, 0, 80, num_samples, world_size=2) == whole


@pytest.mark.parametrize("case", range(40))
def test_a_rewind_changes_no_earlier_step_and_repeats_no_sample_in_an_epoch(case: int, keys: Reader):
    draw = random.Random(case)
    branches, num_samples = random_branches(draw), draw.choice([13, 50, 64, 300])
    whole = keys(branches, 0, 80, num_samples)
    for count in range(len(branches)):
        first = branches[count].from_step
        assert keys(branches[:count], 0, first, num_samples) == whole[:first]
    flat = [key for step in whole for key in step]
    assert len(set(flat)) == len(flat)
    if not any(branch.skipped_steps for branch in branches):
        for epoch in range(len(flat) // num_samples):
            assert sorted(index for e, index in flat if e == epoch) == list(range(num_samples))


def test_a_reshuffle_reorders_only_the_rest_of_its_epoch(keys: Reader):
    before = [key for step in keys([], 0, 40, 50) for key in step]
    after = [key for step in keys([Branch(number=1, from_step=15, data="reshuffle")], 0, 40, 50) for key in step]
    assert after[:60] == before[:60]
    assert after[60:100] != before[60:100]
    assert set(after[60:100]) == set(before[60:100])
    assert after[100:] == before[100:], "later epochs are as they would have been"


def test_each_reshuffle_is_another_order(keys: Reader):
    orders = [keys([Branch(number=number, from_step=5, data="reshuffle")], 5, 12) for number in range(1, 5)]
    assert all(a != b for i, a in enumerate(orders) for b in orders[:i])


def test_a_skip_drops_the_data_of_k_steps(keys: Reader):
    plain = keys([], 0, 60)
    assert keys([Branch(number=1, from_step=10, data="skip:7")], 0, 40) == [*plain[:10], *plain[17:47]]
    two = [Branch(number=1, from_step=10, data="skip:7"), Branch(number=2, from_step=12, data="skip:3")]
    assert keys(two, 0, 40) == [*plain[:10], *plain[17:19], *plain[22:50]]


def test_a_reshuffle_after_a_skip_omits_the_skipped_samples(keys: Reader):
    branches = [Branch(number=1, from_step=2, data="skip:3"), Branch(number=2, from_step=4, data="reshuffle")]
    flat = [key for step in keys(branches, 0, 10, 50) for key in step]
    skipped = [key for step in keys([], 2, 5, 50) for key in step]
    assert not set(flat[:38]) & set(skipped)
    assert len(set(flat[:38])) == 38  # 50 samples of the first epoch without the 12 that were passed over


def test_a_permutation_without_memory_needs_none():
    order = IndexedOrder(0, 10**15, 8, [Branch(number=1, from_step=10**6, data="reshuffle")], "feistel")
    share = RankShare(per_step=8, micro_batch=2, rank=1, world_size=2)
    read = [key for step in (0, 10**6) for keys, *_ in islice(order.micro_batches(step, share, {}), 4) for key in keys]
    assert len(set(read)) == 16
    assert all(epoch == 0 and 0 <= index < 10**15 for epoch, index in read)


def test_the_order_of_runs_made_before_is_unmoved():
    assert list(islice(IndexedOrder(0, 1000, 4).keys(), 6)) == [
        (0, index) for index in np.random.default_rng([0, 0]).permutation(1000)[:6]
    ]


LENGTHS = random.Random(0).choices(range(5, 500), k=330)


def grouped(branches: Sequence[Branch] = ()) -> GroupedOrder:
    return GroupedOrder(
        IndexedOrder(1, len(LENGTHS), per_step=8, branches=branches), lambda _, index: LENGTHS[index], group=4
    )


def read_steps(
    order: GroupedOrder, first: int, steps: int, micro_batch: int = 4, world_size: int = 1
) -> list[list[list[Key]]]:
    """The micro-batches of each step, in the order of their numbers."""
    shares = [RankShare(8, micro_batch, rank, world_size) for rank in range(world_size)]
    streams = [order.micro_batches(first, share, {}) for share in shares]
    return [[next(streams[g % world_size]).keys for g in range(8 // micro_batch)] for _ in range(steps)]


def test_grouping_by_length_reads_the_same_samples_in_each_window():
    order = grouped()
    steps = read_steps(order, 0, 100)
    for begin in (0, 50):
        read = sorted(key for step in steps[begin : begin + 50] for batch in step for key in batch)
        assert read == sorted(islice(order.order.keys(8 * begin), 400))
    padded = sum(max(LENGTHS[index] for _, index in batch) * 4 for step in steps for batch in step)
    assert padded < 1.03 * sum(LENGTHS[index] for step in steps for batch in step for _, index in batch)
    assert max(LENGTHS[index] for _, index in steps[0][0]) == max(
        LENGTHS[index] for step in steps[:50] for b in step for _, index in b
    )


@pytest.mark.parametrize("first", [0, 3, 49, 50, 77])
def test_groups_do_not_depend_on_where_one_starts_nor_on_processes_nor_on_the_micro_batch(first: int):
    whole = read_steps(grouped(), 0, 100)[first:]
    assert read_steps(grouped(), first, 100 - first) == whole
    assert read_steps(grouped(), first, 100 - first, world_size=2) == whole
    other = read_steps(grouped(), first, 100 - first, micro_batch=2)
    assert [[key for batch in step for key in batch] for step in other] == [
        [key for batch in step for key in batch] for step in whole
    ]


def test_groups_after_a_rewind_pass_over_steps_and_are_not_permuted_again():
    skipped = grouped([Branch(number=1, from_step=10, data="skip:3")])
    assert read_steps(skipped, 10, 20) == read_steps(grouped(), 13, 20)
    with pytest.raises(RunError, match="cannot be reshuffled"):
        grouped([Branch(number=1, from_step=10, data="reshuffle")])
