"""Losses of a policy and of values on tokens that an earlier policy has sampled. All are sums: what they are divided by is `Normalisation`.

Shapes: B rollouts, T tokens of the longest. `sampled_BT` is true on the tokens that the policy has sampled; the others have no loss.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from src.rl.advantages import kl_terms

Normalisation = Literal["tokens", "rollouts", "room"]
"""tokens: the sampled tokens of the global batch (DAPO). rollouts: each has the mean over its own tokens (GRPO). room: the most tokens that
could have been sampled, which favours no length (Dr. GRPO, Liu et al. 2025, arXiv 2503.20783)."""
Ratio = Literal["token", "sequence"]


class PolicyLoss(NamedTuple):
    """What `policy_loss` finds: sums."""

    loss: Tensor
    clipped: Tensor
    """Sampled tokens whose ratio was cut: they have no gradient."""
    kl: Tensor
    """Nats of the policy from the reference, summed over the sampled tokens (k3); 0 without a reference."""


def policy_loss(  # noqa: PLR0913  each is named
    logps_BT: Tensor,
    sampled_logps_BT: Tensor,
    advantages_BT: Tensor,
    sampled_BT: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    ratio: Ratio = "token",
    normalisation: Normalisation = "tokens",
    reference_logps_BT: Tensor | None = None,
    kl_weight: float = 0.0,
) -> PolicyLoss:
    """Sum of -min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A) (PPO, Schulman et al. 2017, arXiv 1707.06347, equation 7).

    sampled_logps: under the policy that sampled. ratio "sequence": of the geometric mean over the tokens of a rollout (GSPO, Zheng et al.
    2025, arXiv 2507.18071, equation 7). clip_high above clip_low lets unlikely tokens grow (DAPO, Yu et al. 2025, arXiv 2503.14476, 3.1).
    kl_weight: of the divergence from the reference, added to the loss of each token (GRPO, arXiv 2402.03300, equation 3).
    The sum is over tokens; with "rollouts" over the means of each rollout.
    """
    moved = torch.where(sampled_BT, logps_BT - sampled_logps_BT, 0.0)
    lengths_B1 = sampled_BT.sum(dim=1, keepdim=True).clamp(min=1)
    if ratio == "sequence":
        moved = (moved.sum(dim=1, keepdim=True) / lengths_B1).expand_as(moved)
    ratios, advantages = moved.exp(), torch.where(sampled_BT, advantages_BT, 0.0)
    cut = ratios.clamp(1 - clip_low, 1 + clip_high)
    losses = -torch.min(ratios * advantages, cut * advantages)
    kl = torch.zeros_like(losses)
    if reference_logps_BT is not None:
        own, others = (torch.where(sampled_BT, each, 0.0) for each in (logps_BT, reference_logps_BT))  # before exp: its overflow is NaN
        kl = kl_terms(own, others, "k3")
        losses = losses + kl_weight * kl
    clipped = (cut * advantages < ratios * advantages) & sampled_BT
    return PolicyLoss(token_sum(losses, sampled_BT, normalisation), clipped.sum(), kl.detach().sum())


def token_sum(numbers_BT: Tensor, sampled_BT: Tensor, normalisation: Normalisation) -> Tensor:
    """Sum over sampled tokens, to be divided by `count`; with "rollouts" over the means of each rollout."""
    chosen = torch.where(sampled_BT, numbers_BT, 0.0)
    return (chosen / sampled_BT.sum(dim=1, keepdim=True).clamp(min=1) if normalisation == "rollouts" else chosen).sum()


def value_loss(values_BT: Tensor, old_values_BT: Tensor, returns_BT: Tensor, sampled_BT: Tensor, clip: float) -> Tensor:
    """Sum over sampled tokens of half the larger squared error: of the value, or of what is at most `clip` from the old one towards it."""
    near = old_values_BT + (values_BT - old_values_BT).clamp(-clip, clip)
    errors = 0.5 * torch.max((values_BT - returns_BT).square(), (near - returns_BT).square())
    return torch.where(sampled_BT, errors, 0.0).sum()


def count(sampled_BT: Tensor, normalisation: Normalisation, room: int) -> float:
    """What `policy_loss` of these rollouts is a sum over; those without a sampled token count nothing. room: most tokens of a rollout."""
    if normalisation == "tokens":
        return float(sampled_BT.sum())
    return float(sampled_BT.any(dim=1).sum()) * (room if normalisation == "room" else 1.0)
