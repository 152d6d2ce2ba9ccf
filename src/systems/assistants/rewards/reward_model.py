"""A reward model from another experiment, in this process or on the servers in TRITON_HOST_RM.

Where it runs is not part of the experiment. A server reports the fingerprint of its model, and other models are
rejected.
"""

import math
import os
from collections.abc import Sequence
from typing import Any

from pydantic import Field, model_validator

from src.errors import ConfigError, RunError
from src.experiments.config import Places
from src.experiments.interfaces import ModelConfig, ModelField, WrapperConfig
from src.experiments.kinds import REWARD
from src.models import trained_model
from src.support.call_once import call_once
from src.systems.assistants.rewards.interface import RewardConfig, RewardSetting, Rollout, Scorer
from src.systems.assistants.rewards.remote import RemoteModel

SERVERS = "TRITON_HOST_RM"
"""Environment variable with the addresses of servers; for the format see `kserve.parse_addresses`."""


class Config(RewardConfig):
    """The reward model and how it reads rollouts."""

    model: ModelField
    """The reward model, for example ref(...) to an experiment of recipe 'reward'."""
    squash: float | None = Field(default=None, gt=0)
    """If set, the score is tanh(reward / squash), between -1 and 1, which limits outliers."""
    template: str | None = None
    """Template for a model with another vocabulary than the policy's: "oasst", "chatml" or "tokenizer". None: the model
    reads the policy's token ids."""

    @model_validator(mode="after")
    def _gives_rewards(self) -> "Config":
        self.model.require_kind(REWARD, None)
        return self

    def check(self, places: Places) -> None:
        call_once(self.model.check, places)
        self.model.check_kind(REWARD, places, "rewards.model")

    def longest_rollout(self, places: Places) -> int | None:
        return None if self.template else self.model.longest_sequence(places)

    def scorer(self, setting: RewardSetting) -> Scorer:
        """Raises ConfigError if the model has another vocabulary than the policy and there is no template."""
        if os.environ.get(SERVERS):
            remote_model, folder = find_served(SERVERS, "rewards.model", self.model, setting)
            tokenizer, ask = setting.load_tokenizer(folder, self.model.new_tokens()), remote_model.rewards
        else:
            model: Any = self.model.build(setting.places).to(setting.device).eval()
            tokenizer = setting.load_tokenizer(model.name_or_path, self.model.new_tokens())
            ask = _ask_here(model, self.model.longest_sequence(setting.places), setting)
        if self.template:
            write = setting.write_with(tokenizer, self.template)
        elif tokenizer.backend_tokenizer.to_str() == setting.tokenizer.backend_tokenizer.to_str():
            write = _own_ids
        else:
            raise ConfigError(
                "rewards: the reward model has another vocabulary than the policy. Set the reward's template."
            )
        return lambda rollouts: self._squash_all(ask([write(rollout) for rollout in rollouts]))

    def _squash_all(self, rewards: Sequence[float]) -> list[float]:
        return [math.tanh(reward / self.squash) if self.squash else reward for reward in rewards]


def find_served(variable: str, field: str, model: ModelConfig, setting: RewardSetting) -> tuple[RemoteModel, str]:
    """A client for a model on the servers in an environment variable, and the folder of its tokenizer.

    Raises:
        ConfigError: the model is not from an experiment, or an address is malformed.
    """
    inner = model
    while isinstance(inner, WrapperConfig):
        inner = inner.base
    identity, folder = model.identity(setting.places), model.tokenizer_folder(setting.places)
    if identity is None or folder is None or not isinstance(inner, trained_model.Config):
        raise ConfigError(
            f"{variable}: servers only have models of experiments, and {field} is not one. "
            "Use ref(...), or unset the variable."
        )
    return RemoteModel(os.environ[variable], identity, setting.wait), str(folder)


def _own_ids(rollout: Rollout) -> list[int]:
    return [*rollout.ids]


def _ask_here(model: Any, most: int | None, setting: RewardSetting) -> Any:
    import torch
    from torch.nn.utils.rnn import pad_sequence

    def rewards(ids: Sequence[Sequence[int]]) -> list[float]:
        rewards: list[float] = []
        longest = max(map(len, ids), default=0)
        if most and longest > most:
            raise RunError(
                f"rewards: a rollout has {longest} tokens, but the reward model has {most} positions. "
                "Lower data.max_new_tokens, or use a reward model that reads more."
            )
        for first in range(0, len(ids), setting.micro_batch):
            rows = [torch.tensor(row) for row in ids[first : first + setting.micro_batch]]
            lengths = torch.tensor([[len(row)] for row in rows])
            batch = pad_sequence(rows, batch_first=True)
            mask = torch.arange(batch.shape[1]) < lengths
            with torch.no_grad():
                rewards += model(input_ids=batch.to(setting.device), attention_mask=mask.to(setting.device)).tolist()
        return rewards

    return rewards
