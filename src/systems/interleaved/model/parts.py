"""Code shared by all vision-language models: tokens, configs, the encoder pass, and frozen parts."""

from collections.abc import Mapping, Sequence
from types import MethodType
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, model_validator

from src.experiments.config import Config as StrictConfig
from src.systems.interleaved.model import flops, processor

if TYPE_CHECKING:
    from torch import Tensor

FAMILIES = ("idefics2", "idefics3", "smolvlm")
"""Supported families, as transformers' `model_type`."""
IMAGE = "<image>"
Part = Literal["vision", "connector", "embeddings", "text"]
"""Parts of a model: frame encoder; connector from patches to tokens; token embeddings and output projection; decoder
layers."""


class Vision(StrictConfig):
    """Sizes of a frame encoder with random weights."""

    frame_size: int = Field(gt=0)
    """Pixels per side of a frame."""
    patch_size: int = Field(gt=0)
    """Pixels per side of a patch."""
    hidden_size: int = Field(gt=0)
    """Width of the encoder."""
    num_layers: int = Field(gt=0)
    """Transformer layers."""
    num_heads: int = Field(gt=0)
    """Attention heads."""

    @model_validator(mode="after")
    def _check_sizes(self) -> "Vision":
        if self.frame_size % self.patch_size:
            raise ValueError(
                f"frame_size: expected a multiple of patch_size, {self.patch_size}, got {self.frame_size}."
            )
        if self.hidden_size % self.num_heads:
            raise ValueError(f"hidden_size: expected a multiple of num_heads {self.num_heads}, got {self.hidden_size}.")
        return self

    @property
    def patches(self) -> int:
        """Patches per side of a frame."""
        return self.frame_size // self.patch_size

    def sizes(self) -> dict[str, int]:
        """Fields of transformers' vision config."""
        return {
            "hidden_size": self.hidden_size,
            "intermediate_size": 4 * self.hidden_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "image_size": self.frame_size,
            "patch_size": self.patch_size,
        }


class Resampler(StrictConfig):
    """Sizes of Idefics2's perceiver, whose queries attend to patches (Laurençon et al. 2024, arXiv 2405.02246)."""

    tokens: int = Field(gt=0)
    """Tokens per frame."""
    num_layers: int = Field(gt=0)
    """Transformer layers."""
    num_heads: int = Field(gt=0)
    """Attention heads."""


def style_of(resampler: Resampler | None) -> str:
    """Family of the model, by transformers' name."""
    return "idefics2" if resampler else "idefics3"


def image_tokens(max_tiles: int, resampler: Resampler | None) -> list[str]:
    """Control tokens for images. With a resampler (Idefics2) there are no tile tokens and no global token."""
    tiles = [f"<row_{row}_col_{column}>" for row in range(1, max_tiles + 1) for column in range(1, max_tiles + 1)]
    tile_tokens = [] if resampler else ["<global-img>", *(tiles if max_tiles > 1 else [])]
    return ["<fake_token_around_image>", IMAGE, *tile_tokens]


def require_connector(
    scale_factor: int | None, resampler: Resampler | None, patches: int, max_tiles: int, hidden_size: int
) -> None:
    """Raises ValueError if the connector does not fit the frames. patches: per side of a frame."""
    if resampler is None:
        if patches % (scale_factor or 2):
            raise ValueError(
                f"scale_factor: expected a divisor of the {patches} patches per side of a frame, "
                f"got {scale_factor or 2}."
            )
        return
    if scale_factor is not None:
        raise ValueError(
            f"scale_factor: {scale_factor} is only for the pixel shuffle, but there is a resampler. "
            "Remove one of the two."
        )
    if max_tiles > 1:
        raise ValueError(
            f"max_tiles: {max_tiles}, but with a resampler (Idefics2) images are not cut into tiles. Remove it."
        )
    if hidden_size % resampler.num_heads:
        raise ValueError(
            f"resampler.num_heads: expected a divisor of hidden_size, {hidden_size}, got {resampler.num_heads}."
        )


def tokens_of_frame(scale_factor: int | None, resampler: Resampler | None, patches: int) -> int:
    """Tokens per frame. patches: per side of a frame."""
    return resampler.tokens if resampler else (patches // (scale_factor or 2)) ** 2


def build_random(
    vision: Mapping[str, Any],
    text: Mapping[str, Any],
    scale_factor: int | None,
    resampler: Resampler | None,
    image_id: int,
    tied: bool,
) -> Any:
    """Create an Idefics3 with random weights, or an Idefics2 if there is a resampler.
    vision, text: transformers configs as dicts."""
    from transformers import (
        Idefics2Config,
        Idefics2ForConditionalGeneration,
        Idefics3Config,
        Idefics3ForConditionalGeneration,
    )

    kwargs: dict[str, Any] = {
        "vision_config": dict(vision),
        "text_config": dict(text),
        "image_token_id": image_id,
        "tie_word_embeddings": tied,
    }
    if resampler is None:
        return Idefics3ForConditionalGeneration(Idefics3Config(**kwargs, scale_factor=scale_factor or 2))
    width = text["hidden_size"]
    perceiver = {
        "hidden_size": width,
        "rms_norm_eps": text.get("rms_norm_eps", 1e-6),
        "resampler_n_latents": resampler.tokens,
        "resampler_depth": resampler.num_layers,
        "resampler_n_heads": resampler.num_heads,
        "resampler_head_dim": width // resampler.num_heads,
        "num_key_value_heads": resampler.num_heads,
    }
    return Idefics2ForConditionalGeneration(Idefics2Config(**kwargs, perceiver_config=perceiver))


def complete(model: Any, frozen: Sequence[Part] = ()) -> Any:
    """Change a transformers model in place: always run its encoder, freeze parts, and report its FLOPs."""
    _require_encoder_passes(model.model)
    for part in frozen:
        for _, parameter in flops.parameters_by_part(model)[part]:
            parameter.requires_grad_(False)
    model.training_flops = MethodType(flops.training_flops, model)
    model.write_processor = processor.save
    return model


def _require_encoder_passes(inner: Any) -> None:
    """Run the encoder even if a micro-batch has no image tokens; the features then have weight 0.

    With a sharded model all processes must make the same passes, so such a micro-batch encodes one dummy frame.
    """
    if hasattr(inner, "get_placeholder_mask"):  # SmolVLM
        find = inner.get_placeholder_mask

        def get_placeholder_mask(
            self: Any, input_ids: "Tensor | None", inputs_embeds: "Tensor", image_features: "Tensor"
        ) -> "Tensor":
            if input_ids is None:
                return find(input_ids, inputs_embeds=inputs_embeds, image_features=image_features)
            mask = _find_images(inner, input_ids, image_features)
            return input_ids.new_zeros(1, 1, 1).bool() if mask is None else mask[..., None]

        inner.get_placeholder_mask = MethodType(get_placeholder_mask, inner)
        return
    merge = inner.inputs_merger

    def inputs_merger(
        self: Any, input_ids: "Tensor | None", inputs_embeds: "Tensor", image_hidden_states: "Tensor"
    ) -> "Tensor":
        if input_ids is None:
            return merge(input_ids, inputs_embeds, image_hidden_states)
        mask, states = _find_images(inner, input_ids, image_hidden_states), image_hidden_states.to(inputs_embeds.dtype)
        if mask is None:
            return inputs_embeds + states.sum() * 0
        rows = inputs_embeds.flatten(0, 1).index_put((mask.flatten(),), states.reshape(-1, states.shape[-1]))
        return rows.view_as(inputs_embeds)

    inner.inputs_merger = MethodType(inputs_merger, inner)


def _find_images(inner: Any, input_ids: "Tensor", states: "Tensor") -> "Tensor | None":
    """(B, T) bool mask of image tokens; None without image tokens.

    Raises:
        ValueError: the number of image tokens differs from the number of vectors in `states`, (..., D).
    """
    mask = input_ids == inner.config.image_token_id
    count, num_states = int(mask.sum()), states.shape[:-1].numel()
    if count and count != num_states:
        raise ValueError(f"Image features and image tokens do not match, tokens: {count}, features: {num_states}")
    return mask if count else None
