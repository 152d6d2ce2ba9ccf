"""A pretrained vision-language model from a folder or the Hugging Face cache: SmolVLM, Idefics3 or Idefics2."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, field_validator

from src.errors import ConfigError
from src.experiments.config import Places
from src.experiments.interfaces import Architecture, ModelConfig
from src.experiments.kinds import VISION_LANGUAGE, FrameFormat
from src.models import hf
from src.support.call_once import call_once
from src.systems.interleaved.model.parts import FAMILIES, Part, complete

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Config(ModelConfig):
    """A pretrained model and its frozen parts."""

    path: str = Field(min_length=1)
    """Hub id such as "HuggingFaceTB/SmolVLM-256M-Instruct", or a folder made by save_pretrained:
    below `--data_path`, or a path."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Data type of the weights in memory."""
    revision: str | None = None
    """Branch, tag or commit of the hub id; None for main."""
    frozen: list[Part] = []
    """Parts that are not trained."""
    attention: Literal["sdpa", "eager"] | None = None
    """Attention of every part, as in model 'hf'. Other implementations ignore the positions that separate documents."""

    @field_validator("frozen")
    @classmethod
    def _something_learns(cls, frozen: list[Part]) -> list[Part]:
        if len(set(frozen)) == 4:
            raise ValueError("every part is frozen, so nothing would be learned. Remove one.")
        return frozen

    def build(self, places: Places) -> "PreTrainedModel":
        """Load the model with its weights.

        Raises:
            ConfigError: it is not on this machine, or its family is not supported.
            CheckpointError: its weights are incomplete or damaged.
        """
        self.check(places)
        return complete(self._hf_config().load(places, "AutoModelForImageTextToText"), self.frozen)

    def check(self, places: Places) -> None:
        self._hf_config().require_files(places)
        model_type = self._hf_config().read_config(places)["model_type"]
        if model_type not in FAMILIES:
            raise ConfigError(
                f"{self.path}: a model of type {model_type!r}; expected one that reads images: {', '.join(FAMILIES)}."
            )

    def architecture(self, places: Places) -> Architecture | None:
        return self._hf_config().architecture(places)

    def tokenizer_folder(self, places: Places) -> Path:
        return self._hf_config().folder(places)

    def fingerprint(self, places: Places) -> str:
        return self._hf_config().fingerprint(places)

    def kind(self, places: Places | None) -> str:
        return VISION_LANGUAGE

    def frame_format(self, places: Places) -> FrameFormat:
        config = call_once(self._hf_config().load_config, places)
        vision = config.vision_config
        if config.model_type == "idefics2":
            return FrameFormat(vision.image_size, config.perceiver_config.resampler_n_latents, "idefics2")
        tokens = (vision.image_size // vision.patch_size // config.scale_factor) ** 2
        return FrameFormat(vision.image_size, tokens, "idefics3")

    def cache_bytes(self, places: Places, value_bytes: int) -> dict[str, int] | None:
        return self._hf_config().cache_bytes(places, value_bytes)

    def _hf_config(self) -> Any:
        return hf.Config(path=self.path, dtype=self.dtype, revision=self.revision, attention=self.attention)
