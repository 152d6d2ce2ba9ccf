"""The reference of a policy's KL penalty: log-probabilities of sampled tokens.

Logits are never stored or sent.
"""

import copy
import os
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from src.errors import ConfigError
from src.experiments.interfaces import ModelConfig
from src.support.deferred import copy_frozen
from src.support.weights import is_unfilled
from src.systems.assistants.preferences.reference import adapters_off
from src.systems.assistants.rewards.interface import RewardSetting
from src.systems.assistants.rewards.remote import RemoteModel
from src.systems.assistants.rewards.reward_model import find_served
from src.systems.assistants.rl.experience import Reference
from src.systems.assistants.rl.policy import score_tokens
from src.training.parallel.fsdp import shard_model

SERVERS = "TRITON_HOST_REF"
"""Environment variable with the addresses of the reference's servers."""
ReferenceKind = Literal["none", "copy", "adapters_off"]
"""copy: a second copy of the initial policy in memory. adapters_off: the policy without its adapters, which takes no
memory."""


def find_reference_server(config: ModelConfig, setting: RewardSetting, temperature: float) -> RemoteModel | None:
    """A client for the initial policy on the servers in `SERVERS`; None if the variable is not set.

    Raises:
        ConfigError: servers cannot have this policy, or an address is malformed.
    """
    if not os.environ.get(SERVERS):
        return None
    if temperature != 1:
        raise ConfigError(
            f"{SERVERS}: servers only support temperature 1, but data.sampling.temperature is {temperature:g}. "
            "Set it to 1, or unset the variable."
        )
    return find_served(SERVERS, "the policy", config, setting)[0]


def build_reference(
    kind: ReferenceKind, policy: Any, model: Any, device: torch.device, temperature: float, precision: str
) -> Reference | None:
    """The reference of a policy with initial weights; None for kind "none". Collective.

    policy: a part of `model`. If it was built without weights, the copy is sharded with weights of `precision`.
    """
    if kind == "none":
        return None
    if kind == "adapters_off":

        def without(model: Any, batch: Mapping[str, Tensor]) -> Tensor:
            with adapters_off(model):
                return score_tokens(model, batch, temperature).logps

        return without
    if is_unfilled(policy):
        frozen = shard_model(copy_frozen(policy, model), device, precision == "bfloat16", frozen=True)
    else:
        frozen = copy.deepcopy(policy).requires_grad_(False).eval().to(device)
    return lambda _, batch: score_tokens(frozen, batch, temperature).logps
