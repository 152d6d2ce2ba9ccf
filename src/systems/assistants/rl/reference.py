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
from src.experiments.interfaces import ModelConfig
from src.systems.assistants.preferences.reference import adapters_off
from src.systems.assistants.rewards.interface import RewardSetting
from src.systems.assistants.rewards.remote import RemoteModel
from src.systems.assistants.rewards.reward_model import find_served
from src.systems.assistants.rl.experience import Reference
from src.systems.assistants.rl.policy import score_tokens

SERVERS = "TRITON_HOST_REF"
"""Environment variable with the addresses of servers that have the reference."""
ReferenceKind = Literal["none", "copy", "adapters_off"]
"""copy: the policy as the training begins, beside it in memory.
adapters_off: the policy without its adapters, which takes no memory."""


def find_reference_server(config: ModelConfig, setting: RewardSetting, temperature: float) -> RemoteModel | None:
    """The policy that `config` makes, on the servers that the environment names; None where it names none.

    Raises:
        ConfigError: servers are named that cannot have it.
    """
    if not os.environ.get(SERVERS):
        return None
    if temperature != 1:
        raise ConfigError(
            f"{SERVERS}: servers answer at temperature 1, and data.sampling.temperature is {temperature:g}."
        )
    return find_served(SERVERS, "the policy", config, setting)[0]


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
