"""How well rewards agree with the ranks of replies."""

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple


class Agreement(NamedTuple):
    """Of the rewards of one conversation with its ranks."""

    accuracy: float
    """1 where a best reply has more than a worst one, else 0."""
    kendall: float
    """(pairs in the right order - pairs in the wrong one) / pairs whose ranks differ; equal rewards are neither."""
    spearman: float
    """Correlation of the places by reward and by rank, ties in the middle; 0 where all rewards are equal."""
    best_reward: float
    """Mean reward of the replies of the best rank."""
    worst_reward: float


def correlations(rewards: Sequence[float], conversations: Sequence[int], ranks: Sequence[int]) -> list[Agreement]:
    """Of each conversation that has replies of different ranks. Ranks: smaller is better."""
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
    """The place of each value among all of them; equal ones share the middle of theirs."""
    return [sum(other < value for other in values) + sum(other == value for other in values) / 2 for value in values]


def _correlation(xs: Sequence[float], ys: Sequence[float]) -> float:
    """Pearson's."""
    x_mean, y_mean = _mean(xs), _mean(ys)
    spread = math.sqrt(sum((x - x_mean) ** 2 for x in xs) * sum((y - y_mean) ** 2 for y in ys))
    return sum((x - x_mean) * (y - y_mean) for x, y in zip(xs, ys, strict=True)) / spread if spread else 0.0
