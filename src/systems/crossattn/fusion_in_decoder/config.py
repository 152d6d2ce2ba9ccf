"""Config of Fusion-in-Decoder, and the checks that do not need torch.

Izacard & Grave, "Leveraging Passage Retrieval with Generative Models for Open Domain Question Answering" (EACL 2021,
arXiv 2007.01282).
"""

from typing import TYPE_CHECKING

from pydantic import model_validator

from src.experiments.config import Places
from src.experiments.interfaces import ModelField, WrapperConfig
from src.experiments.kinds import ENCODER_DECODER, FUSION_IN_DECODER

if TYPE_CHECKING:
    from src.systems.crossattn.fusion_in_decoder.layers import FusionInDecoder


class Config(WrapperConfig):
    """The encoder-decoder that encodes the passages and writes the answer."""

    base: ModelField
    """A T5, or an experiment with a T5."""

    @model_validator(mode="after")
    def _base_is_an_encoder_decoder(self) -> "Config":
        if self.base.name == "lora":
            raise ValueError("base: 'lora' must wrap 'fusion_in_decoder', not its base.")
        self.base.require_kind(ENCODER_DECODER, None, "base")
        return self

    def build(self, places: Places) -> "FusionInDecoder":
        """Fusion-in-Decoder around the base. It adds no weights.

        Raises:
            UserError: the base cannot be built.
        """
        from src.systems.crossattn.fusion_in_decoder.layers import FusionInDecoder

        return FusionInDecoder(self.base.build(places))

    def check(self, places: Places) -> None:
        self.check_base(places, ENCODER_DECODER, "fusion_in_decoder.base")

    def kind(self, places: Places | None) -> str:
        return FUSION_IN_DECODER
