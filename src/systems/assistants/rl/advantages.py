"""Advantages of sampled tokens, computed from the scores of rollouts.

Shapes: B rollouts, T tokens of the longest, prompts and padding included. `sampled_BT` is True on the tokens that the
policy has sampled. Only these have rewards, values and advantages; all results are 0 elsewhere, whatever the inputs.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

KLEstimate = Literal["k1", "k3"]
Baseline = Literal["group", "others"]


def kl_terms(logps_BT: Tensor, reference_logps_BT: Tensor, estimate: KLEstimate = "k1") -> Tensor:
    """(B, T) unbiased estimates of the KL divergence from the reference at each sampled token, in nats.

    With r = log p_reference - log p: k1 is -r; k3 is exp(r) - 1 - r, which is never negative and has less variance
    (Schulman 2020, "Approximating KL divergence"; http://joschu.net/blog/kl-approx.html).
    """
    r = reference_logps_BT - logps_BT
    return -r if estimate == "k1" else r.exp() - 1 - r


def token_rewards(scores_B: Tensor, kl_BT: Tensor, sampled_BT: Tensor, kl_weight: float) -> Tensor:
    """(B, T) rewards: -kl_weight * KL on each sampled token, plus the rollout's score on the last one (Ziegler et al.
    2019, arXiv 1909.08593, section 2.1).

    The score of a rollout without sampled tokens is dropped.
    """
    rewards_BT = torch.where(sampled_BT, -kl_weight * kl_BT, 0.0)
    places_T = torch.arange(1, sampled_BT.shape[1] + 1, device=sampled_BT.device)
    last_B = (sampled_BT * places_T).argmax(dim=1)
    is_last_BT = (places_T - 1 == last_B[:, None]) & sampled_BT
    return rewards_BT + torch.where(is_last_BT, scores_B[:, None], 0.0)


class Estimates(NamedTuple):
    """The result of `generalized_advantages`, (B, T) each."""

    advantages: Tensor
    returns: Tensor
    """Targets of the values."""


def generalized_advantages(
    values_BT: Tensor, rewards_BT: Tensor, sampled_BT: Tensor, gamma: float, lam: float
) -> Estimates:
    """Generalised advantage estimation (Schulman et al. 2016, arXiv 1506.02438, equation 16) over sampled tokens.

    delta_t = r_t + gamma * V_next - V_t and A_t = delta_t + gamma * lam * A_next, where `next` is the next sampled
    token of the rollout, and V and A after the last one are 0. Returns are A + V. Tokens that were not sampled, such as
    padding, have no effect.
    """
    values, rewards, sampled = values_BT.double(), rewards_BT.double(), sampled_BT.double()
    advantages, after, value_after = (
        torch.zeros_like(values),
        torch.zeros_like(values[:, 0]),
        torch.zeros_like(values[:, 0]),
    )
    for t in reversed(range(values.shape[1])):
        here = rewards[:, t] + gamma * value_after - values[:, t] + gamma * lam * after
        after = torch.where(sampled_BT[:, t], here, after)
        value_after = torch.where(sampled_BT[:, t], values[:, t], value_after)
        advantages[:, t] = here
    masked_advantages = advantages * sampled
    return Estimates(masked_advantages.to(values_BT.dtype), (masked_advantages + values * sampled).to(values_BT.dtype))


@dataclass(frozen=True)
class Moments:
    """Count, sum and sum of squares of numbers. Moments of several processes can be added."""

    count: float
    total: float
    squares: float

    @classmethod
    def measure(cls, numbers: Tensor, mask: Tensor) -> "Moments":
        """Moments of the numbers where `mask` is True."""
        values = numbers[mask].double()
        return cls(values.numel(), values.sum().item(), values.square().sum().item())

    def __add__(self, other: "Moments") -> "Moments":
        return Moments(self.count + other.count, self.total + other.total, self.squares + other.squares)

    @property
    def mean(self) -> float:
        return self.total / self.count if self.count else 0.0

    @property
    def deviation(self) -> float:
        """Sample standard deviation, with count - 1."""
        return (max(0.0, self.squares - self.count * self.mean**2) / (self.count - 1)) ** 0.5 if self.count > 1 else 0.0


def whiten(advantages_BT: Tensor, sampled_BT: Tensor, moments: Moments) -> Tensor:
    """(B, T) advantages, normalised by `moments` to mean 0 and standard deviation 1."""
    scaled = (advantages_BT.double() - moments.mean) / (moments.deviation + 1e-8)
    return torch.where(sampled_BT, scaled, 0.0).to(advantages_BT.dtype)


def group_advantages(
    scores_B: Tensor, group_size: int, baseline: Baseline = "group", divide_by_std: bool = True
) -> tuple[Tensor, Tensor]:
    """((B,) advantages, (B,) whether the scores in the rollout's group differ).
    The `group_size` rollouts of a prompt are consecutive.

    An advantage is the score minus a baseline. "group": the mean of the group (GRPO, Shao et al. 2024, arXiv
    2402.03300, section 4.1). "others": the mean of the rest of the group (RLOO, Ahmadian et al. 2024, arXiv
    2402.14740). divide_by_std: divide by the sample standard deviation of the group; without: Liu et al. 2025 (arXiv
    2503.20783). If all scores of a group are equal, its advantages are 0.

    Raises:
        ValueError: `group_size` is below 2, or a group is incomplete.
    """
    if group_size < 2 or len(scores_B) % group_size:
        raise ValueError(f"expected groups of at least 2, got {len(scores_B)} rollouts in groups of {group_size}.")
    scores = scores_B.double().view(-1, group_size)
    advantages = scores - scores.mean(dim=1, keepdim=True)
    differ = (scores != scores[:, :1]).any(dim=1, keepdim=True).expand_as(scores)
    if baseline == "others":
        advantages = advantages * (group_size / (group_size - 1))
    if divide_by_std:
        advantages = advantages / (scores.std(dim=1, keepdim=True) + 1e-4)
    return torch.where(differ, advantages, 0.0).flatten().to(scores_B.dtype), differ.flatten()


def next_kl_weight(weight: float, kl: float, rollouts: int, target: float, horizon: int) -> float:
    """Adapt the KL weight after an iteration, so that the KL reaches `target` nats in about `horizon` rollouts.

    Ziegler et al. 2019 (arXiv 1909.08593), section 2.2.
    """
    error = min(max(kl / target - 1, -0.2), 0.2)
    return weight * (1 + error * rollouts / horizon)
