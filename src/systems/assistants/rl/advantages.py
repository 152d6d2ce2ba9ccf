"""From the scores of rollouts to advantages: what each sampled token did better than was to be expected.

Shapes: B rollouts, T tokens of the longest, prompts and padding included. `sampled_BT` is true on the tokens that the
policy has sampled: only they have rewards, values and advantages; everywhere else all results are 0, whatever stands
there.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

KLEstimate = Literal["k1", "k3"]
Baseline = Literal["group", "others"]


def kl_terms(logps_BT: Tensor, reference_logps_BT: Tensor, estimate: KLEstimate = "k1") -> Tensor:
    """(B, T) each sampled token's estimate of the divergence from the reference, in nats; its mean is unbiased.

    With r = log p_reference - log p: k1 is -r, k3 is exp(r) - 1 - r, never negative and of less variance (Schulman
    2020, "Approximating KL divergence"; http://joschu.net/blog/kl-approx.html).
    """
    r = reference_logps_BT - logps_BT
    return -r if estimate == "k1" else r.exp() - 1 - r


def token_rewards(scores_B: Tensor, kl_BT: Tensor, sampled_BT: Tensor, kl_weight: float) -> Tensor:
    """(B, T) rewards: -kl_weight * KL on each sampled token, and the score of the whole on the last one (Ziegler et al.
    2019, arXiv 1909.08593, section 2.1).

    A rollout without a sampled token has none: its score is lost.
    """
    rewards_BT = torch.where(sampled_BT, -kl_weight * kl_BT, 0.0)
    places_T = torch.arange(1, sampled_BT.shape[1] + 1, device=sampled_BT.device)
    last_B = (sampled_BT * places_T).argmax(dim=1)
    is_last_BT = (places_T - 1 == last_B[:, None]) & sampled_BT
    return rewards_BT + torch.where(is_last_BT, scores_B[:, None], 0.0)


class Estimates(NamedTuple):
    """What `generalized_advantages` finds, (B, T) each."""

    advantages: Tensor
    returns: Tensor
    """What the values should have been."""


def generalized_advantages(
    values_BT: Tensor, rewards_BT: Tensor, sampled_BT: Tensor, gamma: float, lam: float
) -> Estimates:
    """Generalised advantage estimation (Schulman et al. 2016, arXiv 1506.02438, equation 16) between sampled tokens.

    delta_t = r_t + gamma * V_next - V_t and A_t = delta_t + gamma * lam * A_next, where `next` is the next sampled
    token of the rollout, and V and A behind the last one are 0; returns are A + V. So neither padding nor what others
    say between samples moves a value.
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
    """Sums over numbers, which may be added over processes."""

    count: float
    total: float
    squares: float

    @classmethod
    def measure(cls, numbers: Tensor, mask: Tensor) -> "Moments":
        """Of the numbers where `chosen` is true."""
        values = numbers[mask].double()
        return cls(values.numel(), values.sum().item(), values.square().sum().item())

    def __add__(self, other: "Moments") -> "Moments":
        return Moments(self.count + other.count, self.total + other.total, self.squares + other.squares)

    @property
    def mean(self) -> float:
        return self.total / self.count if self.count else 0.0

    @property
    def deviation(self) -> float:
        """Of a sample: with count - 1."""
        return (max(0.0, self.squares - self.count * self.mean**2) / (self.count - 1)) ** 0.5 if self.count > 1 else 0.0


def whiten(advantages_BT: Tensor, sampled_BT: Tensor, moments: Moments) -> Tensor:
    """(B, T) advantages of mean 0 and deviation 1 over the sampled tokens of `moments`, maybe of all processes."""
    scaled = (advantages_BT.double() - moments.mean) / (moments.deviation + 1e-8)
    return torch.where(sampled_BT, scaled, 0.0).to(advantages_BT.dtype)


def group_advantages(
    scores_B: Tensor, group_size: int, baseline: Baseline = "group", by_deviation: bool = True
) -> tuple[Tensor, Tensor]:
    """((B,) advantages, (B,) whether the rollout's group has scores that differ).
    Rollouts of one prompt stand together, `group_size` each.

    group: what each is better than the mean of its group, divided by the deviation (with G - 1) where `by_deviation`
    says so (GRPO, Shao et al. 2024, arXiv 2402.03300, section 4.1; without: Liu et al. 2025, arXiv 2503.20783). others:
    than the mean of the others (RLOO, Ahmadian et al. 2024, arXiv 2402.14740). A group whose scores are all equal
    teaches nothing: its advantages are 0.

    Raises:
        ValueError: groups of one, or a part of a group.
    """
    if group_size < 2 or len(scores_B) % group_size:
        raise ValueError(f"expected groups of at least 2, got {len(scores_B)} rollouts in groups of {group_size}.")
    scores = scores_B.double().view(-1, group_size)
    advantages = scores - scores.mean(dim=1, keepdim=True)
    differ = (scores != scores[:, :1]).any(dim=1, keepdim=True).expand_as(scores)
    if baseline == "others":
        advantages = advantages * (group_size / (group_size - 1))
    if by_deviation:
        advantages = advantages / (scores.std(dim=1, keepdim=True) + 1e-4)
    return torch.where(differ, advantages, 0.0).flatten().to(scores_B.dtype), differ.flatten()


def next_kl_weight(weight: float, kl: float, rollouts: int, target: float, horizon: int) -> float:
    """The weight of the KL after an iteration, so that it comes near `target` nats in about `horizon` rollouts.

    Ziegler et al. 2019 (arXiv 1909.08593), section 2.2.
    """
    error = min(max(kl / target - 1, -0.2), 0.2)
    return weight * (1 + error * rollouts / horizon)
