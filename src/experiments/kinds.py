"""Kinds of models by their inputs, sizes of a transformer, and the model names that an experiment can use for each."""

from dataclasses import dataclass
from pathlib import Path

DECODER, CROSS_ATTENTION, ENCODER_DECODER, FUSION_IN_DECODER = (
    "decoder",
    "cross_attention",
    "encoder_decoder",
    "fusion_in_decoder",
)
VISION_LANGUAGE, REWARD = "vision_language", "reward"
KINDS = {
    DECODER: "a decoder, such as 'hf' or 'gpt_bigcode'",
    CROSS_ATTENTION: "'cross_attention' around a decoder",
    ENCODER_DECODER: "an encoder-decoder, such as 't5'",
    FUSION_IN_DECODER: "'fusion_in_decoder' around an encoder-decoder",
    REWARD: "'reward' around a decoder",
    VISION_LANGUAGE: "a decoder that reads images, such as 'vision_language'",
}


@dataclass(frozen=True)
class TokenizerSource:
    """Where the tokenizer of a model comes from, known before any weight is loaded."""

    folder: Path
    """A folder of save_pretrained."""
    new_tokens: tuple[str, ...] = ()
    """Control tokens that the model adds to it."""


@dataclass(frozen=True)
class FrameFormat:
    """How a model reads images, known before any weight is loaded."""

    pixels: int
    """Per side of a frame."""
    tokens: int
    """Per frame."""
    style: str
    """"idefics3", or "idefics2": without tile tokens."""
    max_tiles: int | None = None
    """Maximum rows and columns of tiles per image; None if unknown."""


@dataclass(frozen=True)
class Architecture:
    """Sizes of a transformer, known before any weight is loaded."""

    model_type: str
    """The family, by transformers' name."""
    num_layers: int
    hidden_size: int
    num_heads: int
    num_key_value_heads: int
    max_positions: int | None = None
    """Maximum tokens of a sequence, if known."""
    head_size: int | None = None
    """Width of a head, if given; else hidden size / heads."""
    attention: str | None = None
    """Implementation of attention that an experiment sets; None: transformers' choice."""
