"""The module of a policy with values. Shapes: B sequences, T tokens of the longest, D hidden size."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils.generic import ModelOutput

from src.models.wrapper import Wrapper


@dataclass
class PolicyOutput(ModelOutput):
    """Output of a policy with values."""

    logits: Tensor | None = None
    """(B, T, V)."""
    state_values: Tensor | None = None
    """(B, T) float32: value of the state after each token."""


class PolicyWithValues(Wrapper):
    """A transformers decoder, `base`, with a value head. Logits and generation are those of `base`."""

    def __init__(self, base: Any, critic: Any = None) -> None:
        """critic: a decoder for the values, without its head; None to read values from the hidden states of `base`."""
        super().__init__()
        self.base, self.critic = base, None if critic is None else critic.base_model
        hidden = (critic or base).config.hidden_size
        last = nn.Linear(2 * hidden, 1)
        nn.init.zeros_(last.weight)  # initial values are 0: a random head would add noise to the first advantages
        nn.init.zeros_(last.bias)
        self.values = nn.Sequential(nn.Linear(hidden, 2 * hidden), nn.ReLU(), last)

    def __getattr__(self, name: str) -> Any:
        """Delegate missing attributes, such as `generate`, to the policy."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("base"), name)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, **options: Any) -> PolicyOutput:
        """Logits of the policy and values."""
        shared = self.critic is None
        outputs = self.base(input_ids=input_ids, attention_mask=attention_mask, output_hidden_states=shared, **options)
        if self.critic is not None:
            hidden_BTD = self.critic(
                input_ids=input_ids, attention_mask=attention_mask, use_cache=False
            ).last_hidden_state
        else:
            hidden_BTD = outputs.hidden_states[-1]
        with torch.autocast(hidden_BTD.device.type, enabled=False):
            return PolicyOutput(outputs.logits, self.values(hidden_BTD.float()).squeeze(-1))
