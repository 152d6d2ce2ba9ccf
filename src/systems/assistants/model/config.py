"""Config of a reward model: a decoder that gives each sequence one number."""

from typing import TYPE_CHECKING, Literal

from pydantic import model_validator

from src.experiments.config import Places
from src.experiments.interfaces import ModelField, WrapperConfig
from src.experiments.kinds import DECODER, REWARD

if TYPE_CHECKING:
    from src.systems.assistants.model.layers import RewardModel


class Config(WrapperConfig):
    """Which decoder, and what of it the reward is read from."""

    base: ModelField
    """The decoder, such as ref(...) to a fine-tuned one.
    It is trained, too; with 'lora' around the reward model only adapters and head."""
    pooling: Literal["last", "mean"] = "last"
    """last: the hidden state of the last token. mean: the mean over all tokens."""

    @model_validator(mode="after")
    def _base_is_a_decoder(self) -> "Config":
        if self.base.name == "lora":
            raise ValueError("base: put 'lora' around 'reward'.")
        self.base.require_kind(DECODER, None, "base")
        return self

    def build(self, places: Places) -> "RewardModel":
        """The base without its output matrix, and a new head, drawn from torch's generator after the base's weights.

        Raises:
            UserError: whatever is wrong with the base, or it is no decoder.
        """
        from src.systems.assistants.model.layers import RewardModel

        self.check(places)
        return RewardModel(self.base.build(places), self.pooling)

    def check(self, places: Places) -> None:
        self.check_base(places, DECODER)

    def kind(self, places: Places | None) -> str:
        return REWARD
