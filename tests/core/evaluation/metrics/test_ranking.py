"""Agreement of rewards with ranks: against scipy, and where it has no value."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from src.evaluation.metrics.ranking import correlations


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(-20, 20), min_size=2, max_size=6, unique=True))
def test_it_is_scipys(rewards: list[int]):
    (agreement,) = correlations(rewards, [3] * len(rewards), range(len(rewards)))
    places = [-rank for rank in range(len(rewards))]
    assert agreement.kendall == pytest.approx(float(stats.kendalltau(rewards, places).statistic))
    assert agreement.spearman == pytest.approx(float(stats.spearmanr(rewards, places).statistic))


def test_ties_and_single_replies():
    """B16: a single reply has no agreement, and is left out; tied replies are no pair."""
    assert correlations([1.0, 2.0, 3.0], [0, 1, 1], [0, 5, 5]) == []
    (tied,) = correlations([3.0, 1.0, 2.0], [0, 0, 0], [0, 1, 1])
    assert (tied.accuracy, tied.kendall, tied.best_reward, tied.worst_reward) == (1, 1, 3, 1.5)
    (equal,) = correlations([1.0, 1.0], [0, 0], [0, 1])
    assert (equal.accuracy, equal.kendall, equal.spearman) == (0, 0, 0)


def test_perfect_and_reversed():
    (right,) = correlations([3, 2, 1], [0] * 3, [0, 1, 2])
    (wrong,) = correlations([1, 2, 3], [0] * 3, [0, 1, 2])
    assert right[:3] == (1, 1, 1)
    assert wrong[:3] == (0, -1, -1)
