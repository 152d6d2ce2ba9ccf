"""A decoder that reads images: transformers' Idefics3, whose frames pass through an encoder and a pixel shuffle."""

from types import MethodType
from typing import TYPE_CHECKING, Any

from pydantic import Field, model_validator

from src.config import Config as StrictConfig
from src.config import Places
from src.interfaces import Architecture, ModelConfig
from src.kinds import VISION_LANGUAGE
from src.models import tokenizer as prepared_tokenizer

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import Idefics3ForConditionalGeneration


class Vision(StrictConfig):
    """Sizes of an encoder of frames with random weights."""

    frame_size: int = Field(gt=0)
    """Pixels of a side of a frame."""
    patch_size: int = Field(gt=0)
    hidden_size: int = Field(gt=0)
    num_layers: int = Field(gt=0)
    num_heads: int = Field(gt=0)

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
    scale_factor: int = Field(default=2, gt=0)
    """Patches of a side that the pixel shuffle makes one token."""
    max_tiles: int = Field(default=1, gt=0)
    """Most rows, and columns, of tiles of an image."""
    hidden_size: int = Field(gt=0)
    num_layers: int = Field(gt=0)
    num_heads: int = Field(gt=0)
    max_positions: int = Field(gt=0)
    """Most tokens of a sequence."""

    @model_validator(mode="after")
    def _tokens_are_whole(self) -> "Config":
        if self.vision.frame_size // self.vision.patch_size % self.scale_factor:
            raise ValueError(f"scale_factor {self.scale_factor}: the patches of a side do not divide by it.")
        return self

    def kind(self, places: Places | None) -> str | None:
        return VISION_LANGUAGE

    def new_tokens(self) -> list[str]:
        tiles = [f"<row_{row}_col_{column}>" for row in range(1, self.max_tiles + 1) for column in range(1, self.max_tiles + 1)]
        return ["<fake_token_around_image>", "<image>", "<global-img>", *(tiles if self.max_tiles > 1 else [])]

    def build(self, places: Places) -> "Idefics3ForConditionalGeneration":
        """The model, its weights drawn from torch's global generator.

        Raises:
            DataError: the tokenizer is missing or damaged.
        """
        from transformers import Idefics3Config, Idefics3ForConditionalGeneration

        tokenizer = prepared_tokenizer.load(places.data / self.tokenizer, self.new_tokens())
        text: dict[str, Any] = {
            "model_type": "llama",
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
        config = Idefics3Config(
            vision_config=vision,
            text_config=text,
            scale_factor=self.scale_factor,
            image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
            tie_word_embeddings=False,
        )
        model = Idefics3ForConditionalGeneration(config)
        require_encoder_passes(model)
        model.name_or_path = str(places.data / self.tokenizer)
        return model

    def check(self, places: Places) -> None:
        prepared_tokenizer.require(places.data / self.tokenizer)

    def architecture(self, places: Places) -> Architecture:
        del places  # they are in the config
        sizes = (self.num_layers, self.hidden_size, self.num_heads)
        return Architecture("llama", *sizes, num_key_value_heads=self.num_heads, max_positions=self.max_positions)

    def frame_sizes(self, places: Places) -> tuple[int, int]:
        side = self.vision.frame_size // self.vision.patch_size // self.scale_factor
        return self.vision.frame_size, side * side

    def has_random_weights(self) -> bool:
        """Always."""
        return True


def require_encoder_passes(model: Any) -> None:
    """Have the features of frames that no token stands for take part in the result with weight 0.

    A micro-batch without an image then reads one frame that nobody sees: where a model is shared, all processes must make the same passes.
    """
    inner = model.model
    merge = inner.inputs_merger

    def inputs_merger(self: Any, input_ids: "Tensor", inputs_embeds: "Tensor", image_hidden_states: "Tensor") -> "Tensor":
        if input_ids is not None and not (input_ids == self.config.image_token_id).any():
            return inputs_embeds + (image_hidden_states.sum() * 0).to(inputs_embeds.dtype)
        return merge(input_ids, inputs_embeds, image_hidden_states)

    inner.inputs_merger = MethodType(inputs_merger, inner)
