"""A vision-language model from an image encoder, pretrained or new, a pretrained decoder, and a new connector."""

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, model_validator

from src.errors import CheckpointError, ConfigError
from src.experiments.config import Places
from src.experiments.interfaces import Architecture, ModelConfig
from src.experiments.kinds import VISION_LANGUAGE, FrameFormat
from src.models import hf, prepared_tokenizer
from src.support.call_once import call_once
from src.systems.interleaved.model import parts

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ENCODERS = ("siglip", "siglip_vision_model")
DECODERS = ("llama", "mistral", "qwen2")
_VISION_SIZES = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("image_size", "patch_size", "hidden_act", "layer_norm_eps"),
)


class Config(ModelConfig):
    """An encoder, a pretrained decoder and a new connector. Image tokens are added to the decoder's tokenizer."""

    vision: Annotated[str, Field(min_length=1)] | parts.Vision
    """Hub id such as "google/siglip-base-patch16-512", or a save_pretrained folder: below `--data_path`, or a path. Or
    the sizes of an encoder with random weights."""
    text: str = Field(min_length=1)
    """The decoder: hub id or folder, such as "HuggingFaceTB/SmolLM2-135M"."""
    scale_factor: int | None = Field(default=None, gt=0)
    """Idefics3's pixel shuffle merges a square of this many patches per side into one token. None: 2 without a
    resampler."""
    resampler: parts.Resampler | None = None
    """Replaces the pixel shuffle, which makes the model an Idefics2."""
    max_tiles: int = Field(default=1, gt=0)
    """Maximum rows and maximum columns of tiles per image."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Data type of the weights in memory."""
    frozen: list[parts.Part] = []
    """Parts that are not trained."""

    @model_validator(mode="after")
    def _new_weights_are_learned(self) -> "Config":
        for part, weights in (("connector", "its weights"), ("embeddings", "the embeddings of image tokens")):
            if part in self.frozen:
                raise ValueError(f"frozen: {part!r}: {weights} are new, so they must be trained. Remove {part!r}.")
        if "vision" in self.frozen and isinstance(self.vision, parts.Vision):
            raise ValueError("frozen: 'vision': its weights are random, so they must be trained. Remove 'vision'.")
        return self

    def build(self, places: Places) -> "PreTrainedModel":
        """Load the pretrained parts. The new weights are drawn from torch's global generator.

        Raises:
            ConfigError: a part is not on this machine, or its model family is not supported.
            CheckpointError: the weights of a part are incomplete or damaged.
        """
        self.check(places)
        sizes, pretrained = self._load_encoder(places)
        text: Any = self._text().load(places, "AutoModelForCausalLM")
        folder = self._text().folder(places)
        prepared_tokenizer.grow_embeddings(text, folder, self.new_tokens())
        image_id = prepared_tokenizer.load(folder, self.new_tokens()).convert_tokens_to_ids(parts.IMAGE)
        tied = bool(text.config.tie_word_embeddings)
        model = parts.build_random(sizes, text.config.to_dict(), self.scale_factor, self.resampler, image_id, tied).to(
            text.dtype
        )
        for part, weights in (
            (model.model.vision_model, pretrained or model.model.vision_model.state_dict()),
            (model.model.text_model, text.base_model.state_dict()),
        ):
            missing, unexpected = part.load_state_dict(weights, strict=False)
            if missing or unexpected:
                raise CheckpointError(
                    f"{self.vision}, {self.text}: weights are missing or unexpected: "
                    f"{', '.join([*missing, *unexpected][:3])}. Check that each config.json describes its weights."
                )
        model.lm_head.load_state_dict(text.lm_head.state_dict())
        model.generation_config.update(
            **{name: getattr(text.generation_config, name) for name in ("bos_token_id", "eos_token_id")}
        )
        model.name_or_path = str(folder)
        return parts.complete(model, self.frozen)

    def _load_encoder(self, places: Places) -> tuple[dict[str, Any], dict[str, Any]]:
        """Sizes of the encoder, and its weights if it is pretrained."""
        if isinstance(self.vision, parts.Vision):
            return self.vision.sizes(), {}
        vision: Any = self._encoder(self.vision).load(places, "AutoModel")
        vision = getattr(vision, "vision_model", vision)
        # Drop the pooling head, which is not used.
        weights = {name: tensor for name, tensor in vision.state_dict().items() if not name.startswith("head.")}
        return {name: getattr(vision.config, name) for name in _VISION_SIZES}, weights

    def check(self, places: Places) -> None:
        pretrained: list[tuple[str, hf.Config, tuple[str, ...]]] = [("text", self._text(), DECODERS)]
        if isinstance(self.vision, str):
            pretrained.append(("vision", self._encoder(self.vision), ENCODERS))
        for field, model, supported_types in pretrained:
            model.require_files(places)
            model_type = model.read_config(places)["model_type"]
            if model_type not in supported_types:
                raise ConfigError(
                    f"model.{field}: {model.path} is a {model_type!r}; expected one of {', '.join(supported_types)}."
                )
        _, patches = self._frame(places)
        sizes = self.architecture(places)
        try:
            parts.require_connector(
                self.scale_factor, self.resampler, patches, self.max_tiles, sizes.hidden_size if sizes else 0
            )
        except ValueError as error:
            raise ConfigError(f"model.{error}") from None

    def new_tokens(self) -> list[str]:
        return parts.image_tokens(self.max_tiles, self.resampler)

    def tokenizer_folder(self, places: Places) -> Path:
        return self._text().folder(places)

    def architecture(self, places: Places) -> Architecture | None:
        return self._text().architecture(places)

    def fingerprint(self, places: Places) -> str:
        """Digest of the pretrained parts, and of the sizes of a new encoder."""
        vision = self.vision
        digest = self._encoder(vision).fingerprint(places) if isinstance(vision, str) else vision.model_dump_json()
        return hashlib.sha256((digest + self._text().fingerprint(places)).encode()).hexdigest()

    def kind(self, places: Places | None) -> str:
        return VISION_LANGUAGE

    def frame_format(self, places: Places) -> FrameFormat:
        size, patches = self._frame(places)
        tokens = parts.tokens_of_frame(self.scale_factor, self.resampler, patches)
        return FrameFormat(size, tokens, parts.style_of(self.resampler), self.max_tiles)

    def cache_bytes(self, places: Places, value_bytes: int) -> dict[str, int] | None:
        return self._text().cache_bytes(places, value_bytes)

    def _frame(self, places: Places) -> tuple[int, int]:
        """Pixels and patches along one side of a frame."""
        if isinstance(self.vision, parts.Vision):
            return self.vision.frame_size, self.vision.patches
        config = call_once(self._encoder(self.vision).load_config, places)
        config = getattr(config, "vision_config", config)
        return config.image_size, config.image_size // config.patch_size

    def _encoder(self, path: str) -> hf.Config:
        return hf.Config(path=path, dtype=self.dtype)

    def _text(self) -> hf.Config:
        return hf.Config(path=self.text, dtype=self.dtype)
