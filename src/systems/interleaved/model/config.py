"""A decoder that reads images, with random weights: transformers' Idefics3, or with a resampler Idefics2."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field, model_validator

from src.experiments.config import Config as StrictConfig
from src.experiments.config import Places
from src.experiments.interfaces import Architecture, ModelConfig
from src.experiments.kinds import VISION_LANGUAGE
from src.models import prepared_tokenizer
from src.systems.interleaved.model import parts

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Vision(StrictConfig):
    """Sizes of an encoder of frames with random weights."""

    frame_size: int = Field(gt=0)
    """Pixels of a side of a frame."""
    patch_size: int = Field(gt=0)
    """Pixels per side of a patch."""
    hidden_size: int = Field(gt=0)
    """Width of the encoder."""
    num_layers: int = Field(gt=0)
    """Transformer layers."""
    num_heads: int = Field(gt=0)
    """Attention heads."""

    @model_validator(mode="after")
    def _frames_are_whole_patches(self) -> "Vision":
        if self.frame_size % self.patch_size:
            raise ValueError(f"frame_size {self.frame_size} does not divide by patch_size {self.patch_size}.")
        return self


class Config(ModelConfig):
    """Sizes of a model with random weights. The vocabulary is the tokenizer's, and the tokens of images."""

    tokenizer: str = Field(min_length=1)
    """Name of a prepared tokenizer's folder."""
    vision: Vision
    scale_factor: int | None = Field(default=None, gt=0)
    """Patches of a side that the pixel shuffle of Idefics3 makes one token; None: 2, where there is no resampler."""
    resampler: parts.Resampler | None = None
    """Instead of the pixel shuffle: the model is then an Idefics2."""
    max_tiles: int = Field(default=1, gt=0)
    """Maximum rows and maximum columns of tiles per image."""
    hidden_size: int = Field(gt=0)
    """Width of the language part."""
    num_layers: int = Field(gt=0)
    """Layers of the language part."""
    num_heads: int = Field(gt=0)
    """Attention heads of the language part."""
    max_positions: int = Field(gt=0)
    """Maximum tokens of a sequence."""

    @model_validator(mode="after")
    def _tokens_are_whole(self) -> "Config":
        patches = self.vision.frame_size // self.vision.patch_size
        parts.require_connector(self.scale_factor, self.resampler, patches, self.max_tiles, self.hidden_size)
        return self

    def kind(self, places: Places | None) -> str | None:
        return VISION_LANGUAGE

    def new_tokens(self) -> list[str]:
        return parts.image_tokens(self.max_tiles, self.resampler)

    def build(self, places: Places) -> "PreTrainedModel":
        """The model, its weights drawn from torch's global generator.

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
        vision = {
            "hidden_size": self.vision.hidden_size,
            "intermediate_size": 4 * self.vision.hidden_size,
            "num_hidden_layers": self.vision.num_layers,
            "num_attention_heads": self.vision.num_heads,
            "image_size": self.vision.frame_size,
            "patch_size": self.vision.patch_size,
        }
        image_id = tokenizer.convert_tokens_to_ids(parts.IMAGE)
        model = parts.build_random(vision, text, self.scale_factor, self.resampler, image_id, tied=False)
        model.name_or_path = str(places.data / self.tokenizer)
        return parts.complete(model)

    def check(self, places: Places) -> None:
        prepared_tokenizer.require(places.data / self.tokenizer)

    def architecture(self, places: Places) -> Architecture:
        del places  # they are in the config
        sizes = (self.num_layers, self.hidden_size, self.num_heads)
        return Architecture(
            self._family(), *sizes, num_key_value_heads=self.num_heads, max_positions=self.max_positions
        )

    def frame_sizes(self, places: Places) -> tuple[int, int]:
        patches = self.vision.frame_size // self.vision.patch_size
        return self.vision.frame_size, parts.tokens_of_frame(self.scale_factor, self.resampler, patches)

    def tokenizer_folder(self, places: Places) -> Path:
        return places.data / self.tokenizer

    def has_random_weights(self) -> bool:
        """Always."""
        return True

    def _family(self) -> str:
        """Model type of the decoder."""
        return "mistral" if self.resampler else "llama"
