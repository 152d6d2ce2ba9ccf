"""Advantages and losses of policies: fixtures worked out by hand, properties, and what TRL's GRPOTrainer computes of
the same numbers."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, tensor

from src.systems.assistants.rl.advantages import (
    Moments,
    generalized_advantages,
    group_advantages,
    kl_terms,
    next_kl_weight,
    token_rewards,
    whiten,
)
from src.systems.assistants.rl.losses import Normalisation, Ratio, count, policy_loss, value_loss
from tests.core.training.whole.test_originals import originals

ALL = torch.ones(1, 3, dtype=torch.bool)


@pytest.mark.parametrize(
    ("gamma", "lam", "advantages"),
    [
        (1.0, 0.95, [0.05, -1, -2]),  # deltas 1, 0.9, -2
        (0.9, 0.5, [0.665, -0.3, -2]),  # deltas 0.8, 0.6, -2
    ],
)
def test_advantages_worked_out_by_hand(gamma: float, lam: float, advantages: list[float]):
    """Values 1, 2, 3; rewards 0, -0.1, 1."""
    result = generalized_advantages(tensor([[1.0, 2, 3]]), tensor([[0.0, -0.1, 1]]), ALL, gamma, lam)
    assert result.advantages[0].tolist() == pytest.approx(advantages)
    assert result.returns[0].tolist() == pytest.approx(
        [value + v for value, v in zip(advantages, (1, 2, 3), strict=True)]
    )


def test_losses_worked_out_by_hand():
    policy = policy_loss(
        tensor([[-1, -0.5, -2]]), tensor([[-1.2, -0.6, -1]]), tensor([[1, -1, 0.5]]), ALL, clip_low=0.4, clip_high=0.4
    )  # fmt: skip
    values = value_loss(tensor([[0.5, 1, 2]]), tensor([[0.4, 2, 1]]), torch.ones(1, 3), ALL, 0.4)
    assert policy.loss.item() / 3 == pytest.approx(-0.100057, abs=1e-6)
    assert values.item() / 3 == pytest.approx(0.268333, abs=1e-6)


@pytest.mark.parametrize(("kl", "expected"), [(12, 0.100036), (5.4, 0.099982), (0, 0.099964)])
def test_the_weight_of_the_kl_follows_it(kl: float, expected: float):
    assert next_kl_weight(0.1, kl, 18, target=6, horizon=10_000) == pytest.approx(expected, abs=1e-6)


ROLLOUTS = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 6), st.integers(0, 3)), min_size=1, max_size=5)
"""Of each rollout the tokens of its prompt, of its answer and of padding behind it."""


def masks(rollouts: list[tuple[int, int, int]]) -> Tensor:
    longest = max(map(sum, rollouts)) or 1
    return tensor([[prompt <= t < prompt + answer for t in range(longest)] for prompt, answer, _ in rollouts])


@given(rollouts=ROLLOUTS, seed=st.integers(0, 2**31))
@settings(max_examples=100, deadline=None)
def test_the_score_is_on_the_last_sampled_token_of_each_rollout(rollouts: list[tuple[int, int, int]], seed: int):
    """Whatever stands before and behind it. The reference wrote it up to two places too late, on padding (B30)."""
    sampled = masks(rollouts)
    draw = torch.Generator().manual_seed(seed)
    kl, scores = torch.randn(sampled.shape, generator=draw), torch.randn(len(rollouts), generator=draw)
    result = token_rewards(scores, kl, sampled, 0.1)
    for row, (prompt, answer, _) in enumerate(rollouts):
        expected = torch.zeros(sampled.shape[1])
        expected[prompt : prompt + answer] = -0.1 * kl[row, prompt : prompt + answer]
        if answer:
            expected[prompt + answer - 1] += scores[row]
        assert torch.allclose(result[row], expected)


@given(
    rollouts=ROLLOUTS,
    seed=st.integers(0, 2**31),
    gamma=st.sampled_from([0.9, 1.0]),
    lam=st.sampled_from([0.0, 0.95, 1.0]),
)
@settings(max_examples=100, deadline=None)
def test_padding_and_prompts_move_no_advantage(
    rollouts: list[tuple[int, int, int]], seed: int, gamma: float, lam: float
):
    """Each rollout alone, its sampled tokens alone, gives the same."""
    sampled = masks(rollouts)
    draw = torch.Generator().manual_seed(seed)
    values, rewards = (torch.randn(sampled.shape, generator=draw) for _ in range(2))
    result = generalized_advantages(values, rewards, sampled, gamma, lam)
    assert not result.advantages[~sampled].any()
    assert not result.returns[~sampled].any()
    for row in range(len(rollouts)):
        mask = sampled[row]
        if mask.any():
            alone = generalized_advantages(
                values[row, mask][None], rewards[row, mask][None], mask[mask][None], gamma, lam
            )
            assert torch.allclose(result.advantages[row, mask], alone.advantages[0], atol=1e-6)
            assert torch.allclose(result.returns[row, mask], alone.returns[0], atol=1e-6)


@given(rollouts=ROLLOUTS, cut=st.integers(0, 5), seed=st.integers(0, 2**31))
@settings(max_examples=100, deadline=None)
def test_advantages_are_whitened_over_the_sampled_tokens_of_all_processes(
    rollouts: list[tuple[int, int, int]], cut: int, seed: int
):
    sampled = masks(rollouts)
    numbers = torch.randn(sampled.shape, generator=torch.Generator().manual_seed(seed)).double() * 3 + 1
    parts = [slice(0, cut), slice(cut, None)]
    moments = Moments(0, 0.0, 0.0)
    for part in parts:
        moments += Moments.measure(numbers[part], sampled[part])
    result = torch.cat([whiten(numbers[part], sampled[part], moments) for part in parts])
    assert not result[~sampled].any()
    if sampled.sum() > 1:
        assert result[sampled].mean().item() == pytest.approx(0, abs=1e-6)
        assert result[sampled].std().item() == pytest.approx(1, abs=1e-6)


def test_the_kl_estimates_have_the_divergence_as_their_mean():
    policy, reference = torch.randn(2, 50, generator=torch.Generator().manual_seed(0), dtype=torch.float64).log_softmax(
        -1
    )
    divergence = (policy.exp() * (policy - reference)).sum()
    for estimate in ("k1", "k3"):
        assert torch.allclose((policy.exp() * kl_terms(policy, reference, estimate)).sum(), divergence)
    assert (kl_terms(policy, reference, "k3") >= 0).all()


def test_groups_are_compared_with_themselves():
    result, differ = group_advantages(tensor([1.0, 0, 0, 1, 5, 5, 5, 5]), 4, divide_by_std=False)
    assert result.tolist() == [0.5, -0.5, -0.5, 0.5, 0, 0, 0, 0]
    assert differ.tolist() == [True] * 4 + [False] * 4
    scaled, _ = group_advantages(tensor([1.0, 0, 0, 1]), 4)
    assert scaled.tolist() == pytest.approx([0.5 / (3**-0.5 + 1e-4) * sign for sign in (1, -1, -1, 1)])
    others, _ = group_advantages(tensor([3.0, 0, 0]), 3, "others", divide_by_std=False)
    assert others.tolist() == pytest.approx([3, -1.5, -1.5])
    for scores, size in (([1.0, 2], 1), ([1.0, 2, 3], 2)):
        with pytest.raises(ValueError, match="expected groups of at least 2"):
            group_advantages(tensor(scores), size)


@pytest.mark.parametrize("cut", [1, 3, 4])
@pytest.mark.parametrize("normalisation", ["tokens", "rollouts", "room"])
def test_a_gradient_does_not_depend_on_how_rollouts_are_cut_into_micro_batches(cut: int, normalisation: Normalisation):
    draw = torch.Generator().manual_seed(1)
    logps, old, advantages = (torch.randn(5, 6, generator=draw, dtype=torch.float64) for _ in range(3))
    sampled = torch.rand(5, 6, generator=draw) < 0.6
    gradients = []
    for parts in ([slice(None)], [slice(0, cut), slice(cut, None)]):
        inputs = logps.clone().requires_grad_()
        for p in parts:
            policy_loss(
                inputs[p], old[p], advantages[p], sampled[p], clip_low=0.2, clip_high=0.3, normalisation=normalisation
            ).loss.backward()  # fmt: skip
        whole = sum(count(sampled[p], normalisation, 6) for p in parts)
        assert inputs.grad is not None
        gradients.append(inputs.grad / whole)
    assert torch.allclose(*gradients)
    assert not gradients[0][~sampled].any()


def test_losses_of_groups_are_those_of_trl():
    """The loss of GRPOTrainer on given log-probabilities, by its options; tests/core/training/whole/test_originals.py
    tells how they were made."""
    numbers: Any = originals()["trl_grpo"]
    inputs = {name: tensor(numbers[name]) for name in ("logps", "old", "reference", "advantages")}
    sampled = tensor(numbers["mask"]).bool()
    for case in numbers["losses"]:
        normalisation: Normalisation = {"grpo": "rollouts", "dr_grpo": "room", "bnpo": "tokens"}[case["loss_type"]]  # type: ignore[assignment]
        ratio: Ratio = case["level"]
        result = policy_loss(
            inputs["logps"], inputs["old"], inputs["advantages"][:, None].expand_as(inputs["logps"]), sampled,
            clip_low=case["low"], clip_high=case["high"], ratio=ratio, normalisation=normalisation,
            reference_logps_BT=inputs["reference"], kl_weight=case["beta"],
        )  # fmt: skip
        assert result.loss.item() / count(sampled, normalisation, numbers["room"]) == pytest.approx(
            case["wanted"], abs=1e-6
        )


def test_tokens_not_sampled_have_no_gradient_however_unlikely():
    """A token of a prompt may have a log-probability below -88, whose exp overflows in k3."""
    logps = torch.tensor([[0.0, -100.0, -1.0]], requires_grad=True)
    sampled = torch.tensor([[False, False, True]])
    reference = torch.tensor([[0.0, 0.0, -1.5]])
    result = policy_loss(
        logps,
        logps.detach(),
        torch.ones(1, 3),
        sampled,
        clip_low=0.2,
        clip_high=0.2,
        reference_logps_BT=reference,
        kl_weight=0.1,
    )
    result.loss.backward()
    assert logps.grad is not None
    assert logps.grad.isfinite().all()
    assert logps.grad[0, 1] == 0


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_a_log_ratio_of_200_has_a_finite_loss_and_gradient_with_dual_clip(advantage: float):
    """Ye et al. 2020, equation 2: max(min(r A, clip(r) A), c A) where A < 0."""
    logps = torch.tensor([[200.0, 0.1]], requires_grad=True)
    sampled, advantages = torch.ones(1, 2, dtype=torch.bool), torch.full((1, 2), advantage)
    result = policy_loss(logps, torch.zeros(1, 2), advantages, sampled, clip_low=0.2, clip_high=0.2, dual_clip=3.0)
    first = -1.2 if advantage > 0 else 3.0
    assert result.loss.item() == pytest.approx(first - advantage * math.exp(0.1))
    assert result.clipped.item() == 1
    result.loss.backward()
    assert logps.grad is not None
    assert logps.grad[0].tolist() == pytest.approx([0.0, -advantage * math.exp(0.1)])
    logps.grad = None
    divergence = {"reference_logps_BT": torch.zeros(1, 2), "kl_weight": 0.1, "corrected_kl": True}
    options: Any = {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 3.0, **divergence}
    result = policy_loss(logps, torch.zeros(1, 2), advantages, sampled, **options)
    result.loss.backward()
    assert math.isfinite(result.loss.item())
    assert logps.grad.isfinite().all()


def test_without_dual_clip_the_loss_of_a_negative_advantage_is_infinite():
    result = policy_loss(
        torch.tensor([[200.0]]),
        torch.zeros(1, 1),
        -torch.ones(1, 1),
        torch.ones(1, 1, dtype=torch.bool),
        clip_low=0.2,
        clip_high=0.2,
    )
    assert result.loss.item() == math.inf


def test_losses_equal_those_of_trl_with_random_numbers():
    """TRL 1.16.0: GRPOConfig.delta and use_bias_correction_kl, and RLOOTrainer's ratio of the product over the tokens,
    written out."""
    noise = torch.Generator().manual_seed(0)
    logps, old, reference = (torch.randn(6, 5, generator=noise) for _ in range(3))
    advantages, sampled = torch.randn(6, generator=noise), torch.rand(6, 5, generator=noise) < 0.7
    sampled[:, 0] = True
    both: Any = {"clip_low": 0.2, "clip_high": 0.28}
    spread = advantages[:, None].expand_as(logps)

    ratio = (logps - old).exp()
    kl = ((reference - logps).exp() - (reference - logps) - 1) * ratio
    token = -torch.min(ratio.clamp(max=2.0) * spread, ratio.clamp(0.8, 1.28) * spread) + 0.04 * kl
    result = policy_loss(
        logps,
        old,
        spread,
        sampled,
        **both,
        dual_clip=2.0,
        reference_logps_BT=reference,
        kl_weight=0.04,
        corrected_kl=True,
    )
    torch.testing.assert_close(result.loss, token[sampled].sum())

    product = ((logps - old) * sampled).sum(dim=1).exp()
    sequence = -torch.min(product * advantages, product.clamp(0.8, 1.28) * advantages)
    result = policy_loss(logps, old, spread, sampled, **both, ratio="sequence_sum", normalisation="rollouts")
    torch.testing.assert_close(result.loss, sequence.sum())


def test_the_corrected_kl_has_no_bias_under_the_earlier_policy():
    """Its mean over tokens of the earlier policy is the divergence of the current one; without the ratio it is another
    number."""
    old, new, reference = (
        torch.tensor(each).softmax(0).double() for each in ([0.0, 0.0, 0.0], [1.0, 0.0, -1.0], [0.5, 0.5, -0.5])
    )
    true = (new * (new / reference).log()).sum()
    means = []
    for is_corrected in (True, False):
        result = policy_loss(
            new.log()[:, None], old.log()[:, None], torch.zeros(3, 1), torch.ones(3, 1, dtype=torch.bool),
            clip_low=0.2, clip_high=0.2, reference_logps_BT=reference.log()[:, None],
            kl_weight=1.0, corrected_kl=is_corrected,
        )  # fmt: skip
        means.append(result.loss.item() / 3)  # the earlier policy draws each token equally often
    assert means[0] == pytest.approx(true.item(), abs=1e-6)
    assert abs(means[1] - true.item()) > 0.01
