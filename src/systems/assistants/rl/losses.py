"""Losses of a policy and of values on tokens that an earlier policy has sampled.
All losses are sums; `Normalisation` defines the divisor.

Shapes: B rollouts, T tokens of the longest. `sampled_BT` is True on sampled tokens. Other tokens have no loss.
"""

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from src.systems.assistants.rl.advantages import kl_terms

Normalisation = Literal["tokens", "rollouts", "room"]
"""Divisor of the loss. tokens: the number of sampled tokens in the global batch (DAPO). rollouts: take the mean over
the tokens of each rollout, then over rollouts (GRPO). room: the maximum number of tokens of a rollout, so that no
length is favoured (Dr. GRPO, Liu et al. 2025, arXiv 2503.20783)."""
_LARGEST_LOG_RATIO = 20.0
"""Limit of the log-ratio that weights a divergence, as in verl. Larger values could overflow."""
Ratio = Literal["token", "sequence", "sequence_sum"]


class PolicyLoss(NamedTuple):
    """The sums that `policy_loss` returns."""

    loss: Tensor
    clipped: Tensor
    """Number of sampled tokens with a clipped ratio; they have no gradient."""
    kl: Tensor
    """KL divergence from the reference in nats (k3), summed over the sampled tokens; 0 without a reference."""


def policy_loss(  # noqa: PLR0913  most are keywords
    logps_BT: Tensor,
    sampled_logps_BT: Tensor,
    advantages_BT: Tensor,
    sampled_BT: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    ratio: Ratio = "token",
    normalisation: Normalisation = "tokens",
    dual_clip: float | None = None,
    reference_logps_BT: Tensor | None = None,
    kl_weight: float = 0.0,
    corrected_kl: bool = False,
) -> PolicyLoss:
    """Sum of -min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A) (PPO, arXiv 1707.06347, equation 7).

    sampled_logps_BT: log-probabilities under the policy that sampled. ratio "sequence": geometric mean over the tokens
    of a rollout (GSPO, Zheng et al. 2025, arXiv 2507.18071, equation 7); "sequence_sum": product over its tokens (RLOO,
    Ahmadian et al. 2024, arXiv 2402.14740). clip_high above clip_low lets the probability of unlikely tokens grow
    faster (DAPO, Yu et al. 2025, arXiv 2503.14476, section 3.1). dual_clip: maximum ratio for negative advantages;
    without it the loss of an unlikely token is unbounded (Ye et al. 2020, arXiv 1912.09729, equation 2). kl_weight:
    weight of the divergence from the reference, added to each token's loss (GRPO, arXiv 2402.03300, equation 3).
    corrected_kl: weight each token's divergence by its ratio, so that its mean over the earlier policy's tokens is
    unbiased (DeepSeek-V3.2, arXiv 2512.02556, section 3.1). For normalisation see `token_sum`.
    """
    log_ratios = torch.where(sampled_BT, logps_BT - sampled_logps_BT, 0.0)
    lengths_B1 = sampled_BT.sum(dim=1, keepdim=True).clamp(min=1)
    if ratio != "token":
        log_ratios = log_ratios.sum(dim=1, keepdim=True)
        log_ratios = (log_ratios / lengths_B1 if ratio == "sequence" else log_ratios).expand_as(sampled_BT)
    advantages = torch.where(sampled_BT, advantages_BT, 0.0)
    largest = torch.where(
        advantages < 0, math.inf if dual_clip is None else math.log(dual_clip), math.log1p(clip_high) + 1
    )
    ratios = torch.minimum(
        log_ratios, largest
    ).exp()  # for positive advantages this has no effect but to avoid a gradient of 0 * inf
    cut = ratios.clamp(1 - clip_low, 1 + clip_high)
    losses = -torch.min(ratios * advantages, cut * advantages)
    kl = torch.zeros_like(losses)
    if reference_logps_BT is not None:
        # mask before exp, as an overflow would give NaN
        current, reference = (torch.where(sampled_BT, each, 0.0) for each in (logps_BT, reference_logps_BT))
        kl = kl_terms(current, reference, "k3") * (
            log_ratios.clamp(max=_LARGEST_LOG_RATIO).exp() if corrected_kl else 1.0
        )
        losses = losses + kl_weight * kl
    clipped = ((cut * advantages < ratios * advantages) | (log_ratios > largest)) & sampled_BT
    return PolicyLoss(token_sum(losses, sampled_BT, normalisation), clipped.sum(), kl.detach().sum())


def token_sum(numbers_BT: Tensor, sampled_BT: Tensor, normalisation: Normalisation) -> Tensor:
    """Sum over sampled tokens, to be divided by `count`. With "rollouts": sum over the means of each rollout."""
    masked_numbers = torch.where(sampled_BT, numbers_BT, 0.0)
    return (
        masked_numbers / sampled_BT.sum(dim=1, keepdim=True).clamp(min=1)
        if normalisation == "rollouts"
        else masked_numbers
    ).sum()


def value_loss(values_BT: Tensor, old_values_BT: Tensor, returns_BT: Tensor, sampled_BT: Tensor, clip: float) -> Tensor:
    """Clipped value loss, summed over sampled tokens: half the larger squared error of the value and of the value
    clipped to within `clip` of the old value."""
    near = old_values_BT + (values_BT - old_values_BT).clamp(-clip, clip)
    errors = 0.5 * torch.max((values_BT - returns_BT).square(), (near - returns_BT).square())
    return torch.where(sampled_BT, errors, 0.0).sum()


def count(sampled_BT: Tensor, normalisation: Normalisation, room: int) -> float:
    """The divisor of `policy_loss`. Rollouts without sampled tokens do not count.
    room: maximum number of tokens of a rollout."""
    if normalisation == "tokens":
        return float(sampled_BT.sum())
    return float(sampled_BT.any(dim=1).sum()) * (room if normalisation == "room" else 1.0)
