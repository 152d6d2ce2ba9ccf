"""Config of a reward model: a decoder with a head that returns one number per sequence."""

from typing import TYPE_CHECKING, Literal

from pydantic import model_validator

from src.experiments.config import Places
from src.experiments.interfaces import ModelField, WrapperConfig
from src.experiments.kinds import DECODER, REWARD

if TYPE_CHECKING:
    from src.systems.assistants.model.layers import RewardModel


class Config(WrapperConfig):
    """Base and pooling of a reward model."""

    base: ModelField
    """The decoder, for example ref(...) to a fine-tuned one. It is trained too; with 'lora' around the reward model
    only the adapters and the head are."""
    pooling: Literal["last", "mean"] = "last"
    """last: the hidden state of the last token. mean: the mean over all tokens."""

    @model_validator(mode="after")
    def _base_is_a_decoder(self) -> "Config":
        if self.base.name == "lora":
            raise ValueError("base: 'lora' must wrap 'reward', not its base.")
        self.base.require_kind(DECODER, None, "base")
        return self

    def build(self, places: Places) -> "RewardModel":
        """The base without its output matrix, and a new head, initialised from torch's generator after the base.

        Raises:
            UserError: the base cannot be built, or is not a decoder.
        """
        from src.systems.assistants.model.layers import RewardModel

        self.check(places)
        return RewardModel(self.base.build(places), self.pooling)

    def check(self, places: Places) -> None:
        self.check_base(places, DECODER)

    def kind(self, places: Places | None) -> str:
        return REWARD
