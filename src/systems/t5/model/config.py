"""Config of a T5 encoder-decoder: pretrained, from a folder or the hub cache, or T5 v1.1 or T5 with random weights."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, model_validator

from src.errors import ConfigError
from src.experiments.config import Config as StrictConfig
from src.experiments.config import Places
from src.experiments.interfaces import Architecture, ModelConfig
from src.experiments.kinds import ENCODER_DECODER
from src.models import hf, prepared_tokenizer
from src.systems.t5.model import masks

if TYPE_CHECKING:
    from transformers import T5ForConditionalGeneration


CLASSES = {
    "t5": "T5ForConditionalGeneration",
    "mt5": "T5ForConditionalGeneration",
    "longt5": "LongT5ForConditionalGeneration",  # its encoder attends to neighbours (Guo et al. 2022, arXiv 2112.07916)
}
"""Supported families: `model_type` -> transformers' class."""


class Random(StrictConfig):
    """Sizes of a model with random weights. The vocabulary is the tokenizer's."""

    tokenizer: str = Field(min_length=1)
    """Name of a prepared tokenizer's folder."""
    vocabulary_multiple: int = Field(default=1, gt=0)
    """Round the embedding's number of rows up to a multiple of this. 128 turns T5's 32,100 into 32,128, which is faster
    on GPUs."""
    hidden_size: int = Field(gt=0)
    """Width of the residual stream."""
    feed_forward_size: int = Field(gt=0)
    """Width of the feed-forward layers."""
    num_layers: int = Field(gt=0)
    """Number of encoder layers."""
    num_decoder_layers: int | None = Field(default=None, gt=0)
    """Number of decoder layers; None for the number of encoder layers."""
    num_heads: int = Field(gt=0)
    """Attention heads."""
    head_size: int | None = Field(default=None, gt=0)
    """Width of one head; None for hidden_size / num_heads."""
    version: Literal["v1.1", "original"] = "v1.1"
    """v1.1: gated GELU, untied output matrix. original: ReLU, logits from the scaled embedding."""
    num_buckets: int = Field(default=32, gt=0)
    """Number of buckets of relative positions."""
    max_distance: int = Field(default=128, gt=0)
    """Larger distances share the last bucket."""

    @model_validator(mode="after")
    def _heads_share_the_width(self) -> "Random":
        if self.head_size is None and self.hidden_size % self.num_heads:
            raise ValueError(
                f"hidden_size {self.hidden_size} is not divisible by num_heads {self.num_heads}. Set head_size."
            )
        return self


class Config(ModelConfig):
    """Either pretrained weights at `path`, or `random` weights."""

    path: str | None = Field(default=None, min_length=1)
    """Hub id such as "google/flan-t5-xl", or a folder made by save_pretrained."""
    random: Random | None = None
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Type of the pretrained weights in memory; None for float32. In float16 T5's feed-forward layers can overflow."""
    revision: str | None = None
    """Branch, tag or commit of the hub id; None for main."""
    dropout_rate: float | None = Field(default=None, ge=0, lt=1)
    """None for the pretrained model's rate, or 0 for random weights."""

    @model_validator(mode="after")
    def _pretrained_or_random(self) -> "Config":
        if (self.path is None) == (self.random is None):
            raise ValueError("expected either path, for pretrained weights, or random, the sizes of a random model.")
        if self.random and (self.dtype or self.revision):
            ignored = "dtype" if self.dtype else "revision"
            raise ValueError(f"{ignored}: only for pretrained weights. Remove it.")
        return self

    def build(self, places: Places) -> "T5ForConditionalGeneration":
        """The model. Random weights are initialised from torch's global generator.

        Raises:
            UserError: the model at `path` or the tokenizer is missing or damaged, or the model is not a T5.
        """
        self.check(places)
        if self.random:
            model: Any = _build_random(self.random, self.dropout_rate or 0.0, places.data / self.random.tokenizer)
        else:
            architecture = self._hf_config().architecture(places)
            assert architecture, "check has seen it"
            model = self._hf_config().load(places, CLASSES[architecture.model_type])
            if self.dropout_rate is not None:
                _set_dropout(model, self.dropout_rate)
        masks.accept(model)
        return model

    def check(self, places: Places) -> None:
        if self.random:
            prepared_tokenizer.require(places.data / self.random.tokenizer)
            return
        self._hf_config().require_files(places)
        architecture = self._hf_config().architecture(places)
        if architecture is None or architecture.model_type not in CLASSES:
            raise ConfigError(
                f"{self.path}: expected a model of type {', '.join(CLASSES)}, "
                f"got {architecture.model_type if architecture else 'unknown'!r}."
            )

    def architecture(self, places: Places) -> Architecture | None:
        if self.random:
            sizes = self.random
            return Architecture(
                "t5", sizes.num_layers, sizes.hidden_size, sizes.num_heads, num_key_value_heads=sizes.num_heads
            )
        architecture = self._hf_config().architecture(places)
        return replace(architecture, max_positions=None) if architecture else None

    def fingerprint(self, places: Places) -> str | None:
        """Fingerprint of the pretrained weights; None for random weights."""
        return None if self.random else self._hf_config().fingerprint(places)

    def tokenizer_folder(self, places: Places) -> Path:
        return places.data / self.random.tokenizer if self.random else self._hf_config().folder(places)

    def kind(self, places: Places | None) -> str:
        return ENCODER_DECODER

    def _hf_config(self) -> hf.Config:
        return hf.Config(path=self.path or "", dtype=self.dtype or "float32", revision=self.revision)


def _build_random(sizes: Random, dropout_rate: float, folder: Path) -> "T5ForConditionalGeneration":
    """A model with T5's random initialisation (Raffel et al. 2020, arXiv 1910.10683).

    v1.1's output matrix has standard deviation hidden_size^-0.5, so that initial logits have variance 1 and the initial
    loss is the logarithm of the vocabulary size. With the embedding's standard deviation of 1, it would be ten times
    that.
    """
    import torch
    from transformers import T5Config, T5ForConditionalGeneration

    tokenizer = prepared_tokenizer.load(folder)
    original = sizes.version == "original"
    vocabulary = -(-len(tokenizer) // sizes.vocabulary_multiple) * sizes.vocabulary_multiple
    start = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    settings: dict[str, Any] = {
        "vocab_size": vocabulary,
        "d_model": sizes.hidden_size,
        "d_kv": sizes.head_size or sizes.hidden_size // sizes.num_heads,
        "d_ff": sizes.feed_forward_size,
        "num_layers": sizes.num_layers,
        "num_decoder_layers": sizes.num_decoder_layers,
        "num_heads": sizes.num_heads,
        "relative_attention_num_buckets": sizes.num_buckets,
        "relative_attention_max_distance": sizes.max_distance,
        "dropout_rate": dropout_rate,
        "feed_forward_proj": "relu" if original else "gated-gelu",
        "tie_word_embeddings": original,  # also scales the decoder's output
        "pad_token_id": start,
        "eos_token_id": tokenizer.eos_token_id,
        "decoder_start_token_id": start,
    }
    model = T5ForConditionalGeneration(T5Config(**settings))
    if not original:  # transformers ties it anyway
        model.lm_head.weight = torch.nn.Parameter(torch.randn(vocabulary, sizes.hidden_size) * sizes.hidden_size**-0.5)
        model.config.tie_word_embeddings = False
    model.name_or_path = str(folder)
    return model


def _set_dropout(model: "T5ForConditionalGeneration", rate: float) -> None:
    from torch import nn

    model.config.dropout_rate = rate
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = rate
        elif isinstance(getattr(module, "dropout", None), float):  # attention stores a number
            module.dropout = rate  # type: ignore[assignment]
