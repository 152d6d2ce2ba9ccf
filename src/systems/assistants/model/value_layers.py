"""The module of a policy with values. Shapes: B sequences, T tokens of the longest, D hidden size."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils.generic import ModelOutput

from src.models.wrapper import Wrapper


@dataclass
class PolicyOutput(ModelOutput):
    """What a policy with values finds of sequences."""

    logits: Tensor | None = None
    """(B, T, V)."""
    state_values: Tensor | None = None
    """(B, T) float32: at each token that of the state behind it."""


class PolicyWithValues(Wrapper):
    """`base` is a transformers decoder, which generates and gives logits as if it stood alone."""

    def __init__(self, base: Any, critic: Any = None) -> None:
        """critic: of which the body is taken; None: values are read from the hidden states of `base`."""
        super().__init__()
        self.base, self.critic = base, None if critic is None else critic.base_model
        hidden = (critic or base).config.hidden_size
        last = nn.Linear(2 * hidden, 1)
        nn.init.zeros_(last.weight)  # all values begin at 0: a drawn head would be noise in the first advantages
        nn.init.zeros_(last.bias)
        self.values = nn.Sequential(nn.Linear(hidden, 2 * hidden), nn.ReLU(), last)

    def __getattr__(self, name: str) -> Any:
        """What it does not have is the policy's, such as `generate`."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("base"), name)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, **options: Any) -> PolicyOutput:
        """Logits of the policy, and values."""
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
