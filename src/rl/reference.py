"""The model that a policy is kept near: how likely it finds the tokens that the policy has sampled.

Only log-probabilities are kept, never logits.
"""

import copy
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from src.rl.experience import Reference
from src.rl.policy import score_tokens
from src.training.preferences.reference import adapters_off

ReferenceKind = Literal["none", "copy", "adapters_off"]
"""copy: the policy as the training begins, beside it in memory. adapters_off: the policy without its adapters, which takes no memory."""


def build_reference(kind: ReferenceKind, policy: Any, device: torch.device, temperature: float) -> Reference | None:
    """Of a policy with the weights that the training begins with; None for none."""
    if kind == "none":
        return None
    if kind == "adapters_off":

        def without(model: Any, batch: Mapping[str, Tensor]) -> Tensor:
            with adapters_off(model):
                return score_tokens(model, batch, temperature).logps

        return without
    frozen = copy.deepcopy(policy).requires_grad_(False).eval().to(device)
    return lambda _, batch: score_tokens(frozen, batch, temperature).logps


def ask_reference(remote: Any) -> Reference:
    """Of a model that a server runs. remote: a `rewards.remote.RemoteModel`."""

    def ask(_: Any, batch: Mapping[str, Tensor]) -> Tensor:
        lengths, sampled = batch["attention_mask"].sum(dim=1).tolist(), batch["sampled"].sum(dim=1).tolist()
        ids = [row[:length] for row, length in zip(batch["input_ids"].tolist(), lengths, strict=True)]
        found = torch.zeros(batch["input_ids"].shape)
        for row, logps in enumerate(remote.logps(ids, sampled)):
            found[row, lengths[row] - sampled[row] : lengths[row]] = torch.tensor(logps)
        return found

    return ask
