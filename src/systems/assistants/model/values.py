"""A policy with values: a decoder that also predicts the return after each token, for PPO.

Shapes: B sequences, T tokens of the longest, D hidden size, V tokens of the vocabulary.
"""

from typing import TYPE_CHECKING

from pydantic import model_validator

from src.experiments.config import Places
from src.experiments.interfaces import ModelField, WrapperConfig
from src.experiments.kinds import DECODER
from src.support.call_once import call_once

if TYPE_CHECKING:
    from src.systems.assistants.model.value_layers import PolicyWithValues


class Config(WrapperConfig):
    """A policy and the source of its values."""

    base: ModelField
    """The policy, for example ref(...) to a fine-tuned decoder, optionally wrapped in 'lora'."""
    critic: ModelField | None = None
    """A separate decoder for the values; None to read values from the policy's hidden states."""

    @model_validator(mode="after")
    def _both_are_decoders(self) -> "Config":
        self.base.require_kind(DECODER, None, "base")
        if self.base.name == "with_values":
            raise ValueError("base: already 'with_values'. Use its base.")
        if self.critic:
            self.critic.require_kind(DECODER, None, "critic")
        if self.critic and self.critic.is_frozen():
            raise ValueError(
                "critic: quantized weights cannot be trained. Wrap the critic in 'lora', or remove quantization."
            )
        return self

    def build(self, places: Places) -> "PolicyWithValues":
        """The policy, the critic and a new head, initialised from torch's global generator in this order.

        Raises:
            UserError: the policy or the critic cannot be built.
        """
        from src.systems.assistants.model.value_layers import PolicyWithValues

        self.check(places)
        return PolicyWithValues(self.base.build(places), self.critic.build(places) if self.critic else None)

    def check(self, places: Places) -> None:
        self.check_base(places, DECODER)
        if self.critic:
            call_once(self.critic.check, places)
            self.critic.check_kind(DECODER, places, "model.critic")

    def trained_type(self, places: Places) -> str | None:
        types = [part.trained_type(places) for part in (self.base, self.critic) if part]
        return next((each for each in types if each != "float32"), "float32")
