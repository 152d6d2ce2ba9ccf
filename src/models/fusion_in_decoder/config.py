"""Fusion-in-Decoder: the config, and all that can be refused before torch is loaded.

Izacard & Grave, "Leveraging Passage Retrieval with Generative Models for Open Domain Question Answering" (EACL 2021, arXiv 2007.01282).
"""

from typing import TYPE_CHECKING

from pydantic import model_validator

import src.config
from src.config import Places
from src.errors import ConfigError
from src.models.architecture import Architecture
from src.registry import ENCODER_DECODER, FUSION_IN_DECODER, Model, require_kind

if TYPE_CHECKING:
    from src.models.fusion_in_decoder.layers import FusionInDecoder


class Config(src.config.Config):
    """What encodes the passages and writes the answer."""

    base: Model
    """A T5, or an experiment that trained one."""

    @model_validator(mode="after")
    def _base_is_an_encoder_decoder(self) -> "Config":
        if self.base.name == "lora":
            raise ValueError("base: put 'lora' around 'fusion_in_decoder'.")
        require_kind(self.base, ENCODER_DECODER, None, "base")
        return self


def build(config: Config, places: Places) -> "FusionInDecoder":
    """The base, whole, as Fusion-in-Decoder. It adds no weights.

    Raises:
        UserError: whatever is wrong with the base.
    """
    from src.models.fusion_in_decoder.layers import FusionInDecoder

    return FusionInDecoder(config.base(places))


def check(config: Config, places: Places) -> None:
    """Check the base.

    Raises:
        ConfigError: it is no encoder-decoder.
        UserError: whatever is wrong with it.
    """
    config.base.ask("check", places)
    try:
        require_kind(config.base, ENCODER_DECODER, places, "fusion_in_decoder.base")
    except ValueError as error:
        raise ConfigError(str(error)) from None


def architecture(config: Config, places: Places) -> Architecture | None:
    """The base's."""
    return config.base.ask("architecture", places)


def fingerprint(config: Config, places: Places) -> str | None:
    """The base's: of pretrained weights, None where it loads none."""
    return config.base.ask("fingerprint", places)


def kind(config: Config, places: Places | None) -> str:
    """What it is, for recipes that take one kind."""
    del config, places
    return FUSION_IN_DECODER
