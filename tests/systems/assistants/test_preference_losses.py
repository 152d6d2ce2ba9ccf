"""Losses of rankings and of pairs, against figures and formulas that were worked out elsewhere."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from src.systems.assistants.preferences.losses import (
    answer_logps,
    count_ranked,
    pair_loss,
    ranked_pairs,
    ranking_loss,
)

REWARDS = torch.tensor([2.0, 1.0, 0.5, 0.3, -0.2])
OF = torch.tensor([0, 0, 0, 1, 1])
RANKS = torch.tensor([0, 1, 2, 0, 1])


@pytest.mark.parametrize(
    ("by", "l2", "expected"),
    [("conversations", 0.001, 0.402738), ("conversations", 0.0, 0.401830), ("pairs", 0.0, 0.365707)],
)
def test_open_assistants_losses(by, l2: float, expected: float):
    """Three and two replies, best first."""
    result = ranking_loss(REWARDS, OF, RANKS, by=by, l2=l2) / count_ranked(OF, RANKS, by)
    assert float(result) == pytest.approx(expected, abs=5e-7)


def test_of_two_replies_it_is_the_loss_of_a_pair():
    """With the margin and the centring that others add to it."""
    chosen_logps, rejected_logps = torch.randn(7, generator=torch.Generator().manual_seed(0)), torch.zeros(7)
    rewards, of = torch.stack([chosen_logps, rejected_logps], dim=1).flatten(), torch.arange(7).repeat_interleave(2)
    ranks = torch.tensor([0, 1]).repeat(7)
    expected = (
        -torch.nn.functional.logsigmoid(chosen_logps - rejected_logps - 0.3)
        + 0.01 * (chosen_logps + rejected_logps) ** 2
    )
    for by in ("conversations", "pairs"):
        result = ranking_loss(rewards, of, ranks, by=by, margin=0.3, centring=0.01)
        assert torch.allclose(result, expected.sum())


def test_one_reply_and_ties_count_nothing():
    """B16: one reply gave not-a-number. Equal ranks are no preference."""
    one, tied = torch.tensor([0, 1, 1]), torch.tensor([0, 4, 4])
    rewards = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    loss = ranking_loss(rewards, one, tied)
    assert loss.item() == 0
    assert count_ranked(one, tied, "conversations") == count_ranked(one, tied, "pairs") == 0
    loss.backward()
    assert rewards.grad is not None
    assert rewards.grad.tolist() == [0, 0, 0]
    better, worse = ranked_pairs(torch.tensor([0, 0, 0]), torch.tensor([1, 0, 1]))
    assert (better.tolist(), worse.tolist()) == ([1, 1], [0, 2])


@settings(max_examples=50, deadline=None)
@given(
    st.lists(
        st.lists(st.tuples(st.integers(-50, 50), st.integers(0, 3)), min_size=1, max_size=5), min_size=1, max_size=6
    ),
    st.data(),
)
def test_a_sum_over_a_batch_is_that_over_its_parts(conversations: list[list[tuple[int, int]]], data: st.DataObject):
    """However the batch is cut, and in whatever order its replies are."""

    def sums(conversations: list[list[tuple[int, int]]], order: list[int] | None = None) -> tuple[float, int]:
        flat = [
            (reward / 10, number, rank)
            for number, pairs_of_one in enumerate(conversations)
            for reward, rank in pairs_of_one
        ]
        flat = [flat[i] for i in order] if order else flat
        rewards, of, ranks = (torch.tensor(values) for values in zip(*flat, strict=True))
        return float(ranking_loss(rewards, of, ranks, l2=0.1)), count_ranked(of, ranks, "conversations")

    cut = data.draw(st.integers(1, len(conversations)))
    whole = sums(conversations)
    parts = [sums(part) for part in (conversations[:cut], conversations[cut:]) if part]
    assert whole[0] == pytest.approx(sum(loss for loss, _ in parts), abs=1e-4)
    assert whole[1] == sum(count for _, count in parts)
    order = data.draw(st.permutations(range(sum(map(len, conversations)))))
    assert sums(conversations, order)[0] == pytest.approx(whole[0], abs=1e-4)


def by_hand(kind: str, h: float, beta: float, flip_rate: float) -> float:
    def log_sigmoid(x: float) -> float:
        return -math.log1p(math.exp(-x))

    if kind == "ipo":
        return (h - 1 / (2 * beta)) ** 2
    log_right, log_wrong = log_sigmoid(beta * h), log_sigmoid(-beta * h)
    if kind == "robust":
        return (-(1 - flip_rate) * log_right + flip_rate * log_wrong) / (1 - 2 * flip_rate)
    return -(1 - flip_rate) * log_right - flip_rate * log_wrong


@pytest.mark.parametrize("kind", ["sigmoid", "ipo", "robust"])
@pytest.mark.parametrize("flip_rate", [0.0, 0.2])
def test_losses_of_pairs_are_those_of_the_papers(kind, flip_rate: float):
    chosen_logps, rejected_logps = [0.5, -2.0, 3.0], [-0.5, 1.0, 3.0]
    result = pair_loss(
        torch.tensor(chosen_logps), torch.tensor(rejected_logps), kind=kind, beta=0.3, flip_rate=flip_rate
    )
    expected = sum(by_hand(kind, c - r, 0.3, flip_rate) for c, r in zip(chosen_logps, rejected_logps, strict=True))
    assert float(result) == pytest.approx(expected, rel=1e-6)


def test_logps_only_of_learned_tokens():
    logits = torch.randn(2, 4, 5, generator=torch.Generator().manual_seed(0))
    ids = torch.tensor([[1, 2, 3, 4], [4, 3, 2, 1]])
    mask = torch.tensor([[False, False, True, True], [False, True, False, False]])
    result = answer_logps(logits, ids, mask)
    logps = logits.log_softmax(-1)
    assert result.logps.tolist() == pytest.approx([float(logps[0, 1, 3] + logps[0, 2, 4]), float(logps[1, 0, 3])])
    assert result.tokens.tolist() == [2, 1]
    with pytest.raises(ValueError, match="the first token"):
        answer_logps(logits, ids, ~mask)


def test_the_hinge_loss_of_pairs():
    """max(0, 1 - beta h), as TRL 1.16.0 has it."""
    chosen_logps, rejected_logps = torch.tensor([3.0, 30.0, -2.0]), torch.tensor([1.0, 2.0, 2.0])
    assert pair_loss(chosen_logps, rejected_logps, kind="hinge", beta=0.1).item() == pytest.approx(0.8 + 0.0 + 1.4)


@pytest.mark.parametrize("by", ["conversations", "pairs"])
def test_the_margin_of_a_pair_is_the_difference_of_its_scores(by):
    rewards, scores = torch.tensor([1.0, 0.5, 2.0, 2.5]), torch.tensor([9.0, 4.0, 0.25, 0.0])
    of, ranks = torch.tensor([0, 0, 1, 1]), torch.tensor([0, 1, 0, 1])
    expected = -torch.nn.functional.logsigmoid(torch.tensor([0.5 - 5.0, -0.5 - 0.25])).sum()
    torch.testing.assert_close(ranking_loss(rewards, of, ranks, by=by, margin=scores), expected)
    assert ranking_loss(rewards, of, ranks, by=by, margin=0.0) != expected
