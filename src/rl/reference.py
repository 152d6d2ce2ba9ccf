"""The model that a policy is kept near: how likely it finds the tokens that the policy has sampled.

Only log-probabilities are kept, never logits.
"""

import copy
import os
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from src.errors import ConfigError
from src.interfaces import ModelConfig
from src.rewards.interface import RewardSetting
from src.rewards.remote import RemoteModel
from src.rewards.reward_model import find_served
from src.rl.experience import Reference
from src.rl.policy import score_tokens
from src.training.preferences.reference import adapters_off

SERVERS = "TRITON_HOST_REF"
"""Environment variable with the addresses of servers that have the reference."""
ReferenceKind = Literal["none", "copy", "adapters_off"]
"""copy: the policy as the training begins, beside it in memory. adapters_off: the policy without its adapters, which takes no memory."""


def build_reference(kind: ReferenceKind, policy: Any, config: ModelConfig, setting: RewardSetting, temperature: float) -> Reference | None:
    """Of a policy, made by `config`, with the weights that the training begins with; None for none.

    Raises:
        ConfigError: servers are named that cannot have it.
    """
    if kind == "none":
        return None
    if os.environ.get(SERVERS):
        if temperature != 1:
            raise ConfigError(f"{SERVERS}: servers answer at temperature 1, and data.sampling.temperature is {temperature:g}.")
        return _ask_servers(find_served(SERVERS, "the policy", config, setting)[0])
    if kind == "adapters_off":

        def without(model: Any, batch: Mapping[str, Tensor]) -> Tensor:
            with adapters_off(model):
                return score_tokens(model, batch, temperature).logps

        return without
    frozen = copy.deepcopy(policy).requires_grad_(False).eval().to(setting.device)
    return lambda _, batch: score_tokens(frozen, batch, temperature).logps


def _ask_servers(remote: RemoteModel) -> Reference:
    def ask(_: Any, batch: Mapping[str, Tensor]) -> Tensor:
        lengths, sampled = batch["attention_mask"].sum(dim=1).tolist(), batch["sampled"].sum(dim=1).tolist()
        ids = [row[:length] for row, length in zip(batch["input_ids"].tolist(), lengths, strict=True)]
        found = torch.zeros(batch["input_ids"].shape)
        for row, logps in enumerate(remote.logps(ids, sampled)):
            found[row, lengths[row] - sampled[row] : lengths[row]] = torch.tensor(logps)
        return found

    return ask
