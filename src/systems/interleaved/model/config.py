"""A vision-language model with random weights: transformers' Idefics3, or Idefics2 with a resampler."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field, model_validator

from src.experiments.config import Places
from src.experiments.interfaces import Architecture, ModelConfig
from src.experiments.kinds import VISION_LANGUAGE, FrameFormat
from src.models import prepared_tokenizer
from src.systems.interleaved.model import parts

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Config(ModelConfig):
    """Sizes of a model with random weights. The vocabulary is the tokenizer's plus the image tokens."""

    tokenizer: str = Field(min_length=1)
    """Folder of a prepared tokenizer, below `--data_path`."""
    vision: parts.Vision
    scale_factor: int | None = Field(default=None, gt=0)
    """Idefics3's pixel shuffle merges a square of this many patches per side into one token. None: 2 without a
    resampler."""
    resampler: parts.Resampler | None = None
    """Replaces the pixel shuffle, which makes the model an Idefics2."""
    max_tiles: int = Field(default=1, gt=0)
    """Maximum rows and maximum columns of tiles per image."""
    hidden_size: int = Field(gt=0)
    """Width of the decoder."""
    num_layers: int = Field(gt=0)
    """Layers of the decoder."""
    num_heads: int = Field(gt=0)
    """Attention heads of the decoder."""
    max_positions: int = Field(gt=0)
    """Maximum sequence length in tokens."""

    @model_validator(mode="after")
    def _check_sizes(self) -> "Config":
        if self.hidden_size % (2 * self.num_heads):
            raise ValueError(
                f"hidden_size: expected a multiple of 2 x num_heads, {2 * self.num_heads}, for rotary positions, "
                f"got {self.hidden_size}."
            )
        parts.require_connector(
            self.scale_factor, self.resampler, self.vision.patches, self.max_tiles, self.hidden_size
        )
        return self

    def kind(self, places: Places | None) -> str | None:
        return VISION_LANGUAGE

    def new_tokens(self) -> list[str]:
        return parts.image_tokens(self.max_tiles, self.resampler)

    def build(self, places: Places) -> "PreTrainedModel":
        """Create the model; its weights are drawn from torch's global generator.

        Raises:
            DataError: the tokenizer is missing or damaged.
        """
        tokenizer = prepared_tokenizer.load(places.data / self.tokenizer, self.new_tokens())
        text: dict[str, Any] = {
            "model_type": self._family(),
            "vocab_size": len(tokenizer),
            "hidden_size": self.hidden_size,
            "intermediate_size": 4 * self.hidden_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_heads,
            "max_position_embeddings": self.max_positions,
            "bos_token_id": tokenizer.bos_token_id,
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
        }
        image_id = tokenizer.convert_tokens_to_ids(parts.IMAGE)
        model = parts.build_random(self.vision.sizes(), text, self.scale_factor, self.resampler, image_id, tied=False)
        model.name_or_path = str(places.data / self.tokenizer)
        return parts.complete(model)

    def check(self, places: Places) -> None:
        prepared_tokenizer.require(places.data / self.tokenizer)

    def architecture(self, places: Places) -> Architecture:
        del places  # the sizes are in the config
        sizes = (self.num_layers, self.hidden_size, self.num_heads)
        return Architecture(
            self._family(), *sizes, num_key_value_heads=self.num_heads, max_positions=self.max_positions
        )

    def frame_format(self, places: Places) -> FrameFormat:
        tokens = parts.tokens_of_frame(self.scale_factor, self.resampler, self.vision.patches)
        return FrameFormat(self.vision.frame_size, tokens, parts.style_of(self.resampler), self.max_tiles)

    def tokenizer_folder(self, places: Places) -> Path:
        return places.data / self.tokenizer

    def has_random_weights(self) -> bool:
        """Return True."""
        return True

    def _family(self) -> str:
        """Model type of the decoder."""
        return "mistral" if self.resampler else "llama"
