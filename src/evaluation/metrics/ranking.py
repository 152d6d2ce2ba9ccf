"""Agreement of rewards with the ranks of replies."""

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple


class Agreement(NamedTuple):
    """Agreement of rewards and ranks in one conversation."""

    accuracy: float
    """1 if the best replies have a higher mean reward than the worst, else 0."""
    kendall: float
    """(concordant - discordant pairs) / pairs with different ranks; pairs with equal rewards are neither."""
    spearman: float
    """Correlation of the positions by reward and by rank, with mean positions for ties; 0 if all rewards are equal."""
    best_reward: float
    """Mean reward of the replies of the best rank."""
    worst_reward: float


def correlations(rewards: Sequence[float], conversations: Sequence[int], ranks: Sequence[int]) -> list[Agreement]:
    """Agreement in each conversation that has replies of different ranks. ranks: smaller is better."""
    replies_by_conversation = defaultdict[int, list[tuple[float, int]]](list)
    for reward, conversation, rank in zip(rewards, conversations, ranks, strict=True):
        replies_by_conversation[conversation].append((reward, rank))
    return [
        _agreement(replies) for replies in replies_by_conversation.values() if len({rank for _, rank in replies}) > 1
    ]


def _agreement(replies: Sequence[tuple[float, int]]) -> Agreement:
    rewards, ranks = [reward for reward, _ in replies], [rank for _, rank in replies]
    best = _mean([reward for reward, rank in replies if rank == min(ranks)])
    worst = _mean([reward for reward, rank in replies if rank == max(ranks)])
    pairs = [(a - b, y - x) for i, (a, x) in enumerate(replies) for b, y in replies[:i] if x != y]
    kendall = _mean([float((by_reward * by_rank > 0) - (by_reward * by_rank < 0)) for by_reward, by_rank in pairs])
    spearman = _correlation(_places(rewards), _places([-float(rank) for rank in ranks]))
    return Agreement(float(best > worst), kendall, spearman, best, worst)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _places(values: Sequence[float]) -> list[float]:
    """Position of each value among all values; equal values share their mean position."""
    return [sum(other < value for other in values) + sum(other == value for other in values) / 2 for value in values]


def _correlation(xs: Sequence[float], ys: Sequence[float]) -> float:
    """Pearson correlation; 0 if one side is constant."""
    x_mean, y_mean = _mean(xs), _mean(ys)
    spread = math.sqrt(sum((x - x_mean) ** 2 for x in xs) * sum((y - y_mean) ** 2 for y in ys))
    return sum((x - x_mean) * (y - y_mean) for x, y in zip(xs, ys, strict=True)) / spread if spread else 0.0
