"""Preference losses on the rewards of ranked replies, and on the log-probabilities of pairs of replies.

All losses are sums, to be divided by the count of the global batch. Shapes: R replies, K replies of one conversation, P
pairs.
"""

from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

RankingLoss = Literal["conversations", "pairs"]
PairLoss = Literal["sigmoid", "ipo", "robust", "hinge", "apo_zero", "apo_down"]


def ranked_pairs(conversations_R: Tensor, ranks_R: Tensor) -> tuple[Tensor, Tensor]:
    """Indices (P,) of the better and (P,) of the worse reply of all pairs of replies of the same conversation with
    different ranks: K (K - 1) / 2 pairs for K untied replies.

    conversations_R: int64, the conversation of each reply. ranks_R: int64, smaller is better, equal ranks are a tie.
    """
    same_RR = conversations_R[:, None] == conversations_R[None]
    better, worse = (same_RR & (ranks_R[:, None] < ranks_R[None])).nonzero(as_tuple=True)
    return better, worse


def count_ranked(conversations_R: Tensor, ranks_R: Tensor, by: RankingLoss) -> int:
    """Number of terms that `ranking_loss` sums: conversations with an untied pair, or untied pairs."""
    better, _ = ranked_pairs(conversations_R, ranks_R)
    return len(better) if by == "pairs" else len(conversations_R[better].unique())


def ranking_loss(  # noqa: PLR0913  all but three are keywords
    rewards_R: Tensor,
    conversations_R: Tensor,
    ranks_R: Tensor,
    *,
    by: RankingLoss = "conversations",
    l2: float = 0.0,
    margin: float | Tensor = 0.0,
    centring: float = 0.0,
) -> Tensor:
    """Sum of -log sigmoid(r_better - r_worse - margin), the Bradley-Terry loss (arXiv 2203.02155, equation 1).

    by "conversations": the mean over the pairs of each conversation, summed over conversations, so that conversations
    with many replies do not weigh more ("RMLoss" of Open-Assistant). by "pairs": the sum over all pairs ("RMCLSLoss",
    a cross entropy with two classes). Ties and single replies make no pair.

    l2: weight of (r_better^2 + r_worse^2) / 2. margin: see Touvron et al. 2023 (arXiv 2307.09288, equation 2); one
    number for all pairs, or scores (R,), where a pair's margin is the difference of its scores. centring: weight of
    (r_better + r_worse)^2, which pulls rewards to 0 (Eisenstein et al. 2023, arXiv 2312.09244).
    """
    better, worse = ranked_pairs(conversations_R, ranks_R)
    better_P, worse_P = (rewards_R[each].float() for each in (better, worse))
    if isinstance(margin, Tensor):
        margin = margin[better].float() - margin[worse].float()
    loss_P = -F.logsigmoid(better_P - worse_P - margin)
    if l2:
        loss_P = loss_P + l2 * 0.5 * (better_P.square() + worse_P.square())
    if centring:
        loss_P = loss_P + centring * (better_P + worse_P).square()
    if by == "conversations":
        own_P = conversations_R[better]
        loss_P = loss_P / torch.bincount(own_P)[own_P]
    return loss_P.sum() + 0.0 * rewards_R.float().sum()  # every process needs a gradient, even without a pair


class AnswerSums(NamedTuple):
    """Sums over the learned tokens of each row, (R,) each."""

    logps: Tensor
    """Summed log-probabilities, in nats, float32."""
    tokens: Tensor
    """Number of learned tokens."""


def answer_logps(logits_RTV: Tensor, input_ids: Tensor, loss_mask: Tensor) -> AnswerSums:
    """Log-probabilities of each row's tokens where `loss_mask` is True, from logits at the positions before them.

    Raises:
        ValueError: the mask includes the first token of a sequence.
    """
    if bool(loss_mask[:, 0].any()):
        raise ValueError("loss_mask: the first token of a sequence has no context, so it cannot be learned")
    mask = loss_mask[:, 1:]
    losses = F.cross_entropy(
        logits_RTV[:, :-1].float().flatten(0, 1), input_ids[:, 1:].flatten(), reduction="none"
    ).view(mask.shape)
    return AnswerSums(-(losses * mask).sum(dim=1), mask.sum(dim=1))


def pair_loss(
    chosen_P: Tensor,
    rejected_P: Tensor,
    *,
    kind: PairLoss = "sigmoid",
    beta: float = 0.1,
    flip_rate: float = 0.0,
    margin: float = 0.0,
) -> Tensor:
    """Sum over pairs of a direct preference optimisation loss. chosen_P, rejected_P: log pi(y|x) - log pi_ref(y|x) of
    each reply, summed over its tokens, or their mean. flip_rate: assumed share of wrong labels. margin: subtracted
    from beta h of "sigmoid".

    With h = chosen - rejected and s = log sigmoid:
    sigmoid: -(1 - flip_rate) s(beta h) - flip_rate s(-beta h): Rafailov et al. 2023 (arXiv 2305.18290, equation 7);
    with flip_rate above 0 the conservative form (Mitchell 2023).
    robust: [-(1 - flip_rate) s(beta h) + flip_rate s(-beta h)] / (1 - 2 flip_rate): Chowdhury et al. 2024 (arXiv
    2403.00409).
    ipo: (h - 1 / (2 beta))^2: Azar et al. 2023 (arXiv 2310.12036, equation 17).
    hinge: max(0, 1 - beta h): Zhao et al. 2023 (arXiv 2305.10425, equation 10), with log-ratios in place of
    log-probabilities.
    apo_zero: sigmoid(-beta chosen) + sigmoid(beta rejected); apo_down: sigmoid(beta chosen) + sigmoid(-beta h):
    D'Oosterlinck et al. 2024 (arXiv 2408.06266, equations 7 and 8).
    """
    chosen_P, rejected_P = chosen_P.float(), rejected_P.float()
    ratio_P = chosen_P - rejected_P
    if kind == "ipo":
        return (ratio_P - 1 / (2 * beta)).square().sum()
    if kind == "hinge":
        return F.relu(1 - beta * ratio_P).sum()
    if kind == "apo_zero":
        return (torch.sigmoid(-beta * chosen_P) + torch.sigmoid(beta * rejected_P)).sum()
    if kind == "apo_down":
        return (torch.sigmoid(beta * chosen_P) + torch.sigmoid(-beta * ratio_P)).sum()
    right, wrong = -F.logsigmoid(beta * ratio_P - margin), -F.logsigmoid(margin - beta * ratio_P)
    if kind == "robust":
        return (((1 - flip_rate) * right - flip_rate * wrong) / (1 - 2 * flip_rate)).sum()
    return ((1 - flip_rate) * right + flip_rate * wrong).sum()


def reference_points(ratios_M: Tensor, groups_M: Tensor, groups: int) -> Tensor:
    """KTO's reference point of each group, (groups,) float32: an estimate of the KL divergence from the reference, the
    mean log-ratio of the group's M mismatched replies, at least 0 (Ethayarajh et al. 2024, arXiv 2402.01306, section
    4.1). groups_M: int64, the group of each."""
    sums = ratios_M.new_zeros(groups).index_add(0, groups_M, ratios_M)
    return (sums / torch.bincount(groups_M, minlength=groups).clamp(min=1)).clamp(min=0)


def unpaired_loss(
    ratios_R: Tensor,
    points_R: Tensor | float,
    desirable_R: Tensor,
    *,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Tensor:
    """Sum over replies of weight * sigmoid(-beta (r - z)) for desirable and weight * sigmoid(beta (r - z)) for
    undesirable replies: KTO (arXiv 2402.01306, equation 7). ratios_R: r, the log-ratio of each reply, summed over its
    tokens. points_R: z, from `reference_points` and without gradient. With z = 0 this is the unpaired form of apo_zero
    (arXiv 2408.06266)."""
    signs_R = torch.where(desirable_R, 1.0, -1.0)
    weights_R = torch.where(desirable_R, desirable_weight, undesirable_weight)
    return (weights_R * torch.sigmoid(-beta * signs_R * (ratios_R.float() - points_R))).sum()
