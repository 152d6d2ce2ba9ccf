"""Data order is a pure function of (seed, step): each sample once an epoch, for every world size and after every restart."""

from itertools import islice

import pytest

from src.training.order import Share, micro_batches, noise_seed, samples


def test_each_epoch_is_a_permutation_of_its_own():
    stream = list(islice(samples(seed=3, num_samples=10, first=0), 30))
    epochs = [[index for epoch, index in stream if epoch == e] for e in range(3)]
    assert [sorted(indices) for indices in epochs] == [list(range(10))] * 3
    assert epochs[0] != epochs[1] != epochs[2]


def test_another_seed_is_another_order():
    assert list(islice(samples(0, 100, 0), 100)) != list(islice(samples(1, 100, 0), 100))


@pytest.mark.parametrize("first", [0, 1, 9, 10, 25])
def test_the_order_does_not_depend_on_where_one_starts(first: int):
    whole = list(islice(samples(7, 10, 0), 40))
    assert list(islice(samples(7, 10, first), 40 - first)) == whole[first:]


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_the_ranks_together_read_the_positions_of_each_step_once(world_size: int):
    def read(rank: int, first_step: int, steps: int) -> list[list[tuple[int, int]]]:
        share = Share(per_step=8, micro_batch=2, rank=rank, world_size=world_size)
        return list(islice(micro_batches(0, 50, first_step, share), steps * 4 // world_size))

    per_rank = [read(rank, first_step=5, steps=3) for rank in range(world_size)]
    interleaved = [batch for group in zip(*per_rank, strict=True) for batch in group]
    assert [key for batch in interleaved for key in batch] == list(islice(samples(0, 50, first=40), 24))


def test_noise_differs_by_seed_step_and_micro_batch():
    seeds = {noise_seed(s, t, m) for s in range(4) for t in range(10) for m in range(8)}
    assert len(seeds) == 4 * 10 * 8
    assert all(0 <= seed < 2**63 for seed in seeds)
