"""Config of a frozen decoder with new layers that read encoded contexts, and all checks that need no torch.

The method is "XC-Cache: Cross-Attending to Cached Context for Efficient LLM Inference" (EMNLP Findings 2024).
"""

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import Field, model_validator

from src.errors import ConfigError
from src.experiments.config import Places, unknown_text
from src.experiments.interfaces import Architecture, ModelField, WrapperConfig
from src.experiments.kinds import CROSS_ATTENTION
from src.models import kv_cache_size
from src.support.call_once import call_once
from src.systems.crossattn.model.families import FAMILIES, Plan

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from src.systems.crossattn.model.layers import CrossAttentionLM


class Config(WrapperConfig):
    """Where the blocks go and how they look."""

    num_layers: int = Field(ge=1)
    """Blocks."""
    stride: int = Field(ge=1)
    """Decoder layers from one block to the next, counted from the top."""
    base: ModelField
    """The decoder, frozen; it encodes the contexts too."""
    shared_weights: bool = False
    """One block for all the places."""
    final_layer: bool = False
    """Run a block after its decoder layer, rather than before it."""
    shared_projections: bool = False
    """One matrix for queries and keys."""
    hidden_size: int | None = Field(default=None, gt=0)
    """Width of all heads together; None: the base's hidden size."""
    num_heads: int | None = Field(default=None, gt=0)
    """None: the base's."""
    num_key_value_heads: int | None = Field(default=None, gt=0)
    """Llama style only. None: the base's."""
    attention_bias: bool = False
    """Llama style only: biases in the attention's projections. GPT style always has them."""
    skip_connections: bool = False
    """The input of a block is added to its output once more."""
    norm: Literal["layer", "rms"] | None = None
    """None: that of the family, RMSNorm in Llama style. XC-Cache's Llama-style blocks, as published, have LayerNorm."""
    feed_forward_size: int | None = Field(default=None, gt=0)
    """Width of a block's MLP. None: four times the width of the heads together."""
    context_dropout_rate: float = Field(default=0.0, ge=0, lt=1)
    """Share of the context positions that each block cannot read at a training step."""
    train_all_params: bool = False
    """Train the base too, as decoder. Contexts are encoded by the current base without gradients."""
    cache_contexts: bool = False
    """Encode each context once in a process, and keep its states in host memory: for data that are read many times. A
    token takes as many values as the base is wide. Contexts are then encoded one by one, so that a restart, which
    encodes again, changes no bit."""
    weights: str | None = Field(default=None, min_length=1)
    """Folder of a model in the layout of XC-Cache, for the initial weights of the blocks. None: random."""

    @model_validator(mode="after")
    def _base_has_nothing_to_learn(self) -> "Config":
        if self.base.name == "lora":
            raise ValueError(
                "base: it is frozen, so new adapters in it would be ignored. Put 'lora' around 'cross_attention', "
                "or take the 'experiment' that trained the adapters as base."
            )
        if self.base.new_tokens() and not self.train_all_params:
            raise ValueError(
                "base: it has extra_tokens, and it is frozen, so they would not be learned. Leave them out."
            )
        if self.train_all_params and self.base.is_frozen():
            raise ValueError("train_all_params: the base is quantized, and cannot learn. Leave one of the two out.")
        if self.train_all_params and self.cache_contexts:
            raise ValueError(
                "cache_contexts: the base learns (train_all_params), so its states change. Leave one of the two out."
            )
        return self

    def build(self, places: Places) -> "CrossAttentionLM":
        """The base with its blocks. New weights are drawn from torch's global generator, after the base's.

        Raises:
            ConfigError: the base is of no known family, or the blocks do not fit it.
            CheckpointError: `weights` are missing, damaged or of other blocks.
        """
        return self._add_blocks(self.base.build(places), places)

    def build_unfilled(self, places: Places) -> "CrossAttentionLM":
        return self._add_blocks(self.base.build_unfilled(places), places)

    def _add_blocks(self, base: "PreTrainedModel", places: Places) -> "CrossAttentionLM":
        from src.systems.crossattn.model import export, xc_cache_weights
        from src.systems.crossattn.model.layers import CrossAttentionLM

        model = CrossAttentionLM(self, base)
        model.exporter = export.write
        if self.weights is not None and not places.on_paper:
            xc_cache_weights.load(model, Path(self.weights))
        return model

    def check(self, places: Places) -> None:
        from src.systems.crossattn.model import xc_cache_weights

        call_once(self.base.check, places)
        if self.base.has_random_weights() and not self.train_all_params:
            raise ConfigError(
                "cross_attention.base: its weights are drawn at random, and frozen they never learn and are "
                "in no checkpoint. Train it first and write ref(...) of that experiment, or set train_all_params."
            )
        if self.weights is not None:
            xc_cache_weights.require(Path(self.weights))
        sizes = self.architecture(places)
        if sizes:
            self.plan(sizes)

    def fingerprint(self, places: Places) -> str | None:
        """Digest of all weights that `build` loads: the base's, and `weights`; None without any."""
        from src.systems.crossattn.model import xc_cache_weights

        digest = self.base.fingerprint(places)
        return digest if self.weights is None else xc_cache_weights.fingerprint(Path(self.weights), digest)

    def cache_bytes(self, places: Places, value_bytes: int) -> dict[str, int] | None:
        sizes = self.architecture(places)
        if sizes is None:
            return None
        plan_of_blocks = self.plan(sizes)
        block = 2 * plan_of_blocks.num_key_value_heads * (plan_of_blocks.hidden_size // plan_of_blocks.num_heads)
        return kv_cache_size.cross_attention_bytes(
            sizes, 1 if self.shared_weights else self.num_layers, block, value_bytes
        )

    def trained_type(self, places: Places) -> str | None:
        return self.base.trained_type(places) if self.train_all_params else "float32"

    def kind(self, places: Places | None) -> str:
        return CROSS_ATTENTION

    def is_frozen(self) -> bool:
        return False

    def plan(self, base: Architecture) -> "Plan":
        """Fill in the settings that the config leaves to the base.

        Raises:
            ConfigError: the family is unknown, the blocks do not fit, or a setting would be ignored.
        """
        if base.model_type not in FAMILIES:
            raise ConfigError(f"cross_attention: {unknown_text('family of the base', base.model_type, FAMILIES)}")
        family = FAMILIES[base.model_type]
        if not family.gated and (self.num_key_value_heads is not None or self.attention_bias):
            field = "num_key_value_heads" if self.num_key_value_heads is not None else "attention_bias"
            raise ConfigError(
                f"cross_attention: {field} is for Llama-style bases; "
                f"on {base.model_type!r} it would be ignored. Remove it."
            )
        hidden, heads = self.hidden_size or base.hidden_size, self.num_heads or base.num_heads
        groups = (self.num_key_value_heads or base.num_key_value_heads) if family.gated else heads
        indices = layer_indices(base.num_layers, self.num_layers, self.stride)
        plan_of_blocks = Plan(family, indices, hidden, heads, groups, self.feed_forward_size or 4 * hidden)
        _check_heads(plan_of_blocks, self.shared_projections)
        return plan_of_blocks


def layer_indices(num_decoder_layers: int, num_layers: int, stride: int) -> list[int]:
    """Indices of the decoder layers that get a block: the last, then every `stride`-th below it, `num_layers` of them.

    Raises:
        ConfigError: num_layers * stride is more than num_decoder_layers.
    """
    if num_layers < 1 or stride < 1:
        raise ConfigError(f"cross_attention: num_layers {num_layers} and stride {stride} must be at least 1.")
    if num_layers * stride > num_decoder_layers:
        limits = {"num_layers": num_decoder_layers // stride, "stride": num_decoder_layers // num_layers}
        fits = [f"{name} up to {most}" for name, most in limits.items() if most]
        advice = (
            f"Fits: {' or '.join(fits)}."
            if fits
            else f"Both must be smaller: their product can be {num_decoder_layers} at most."
        )
        raise ConfigError(
            f"cross_attention: num_layers {num_layers} x stride {stride} needs {num_layers * stride} decoder layers, "
            f"the base has {num_decoder_layers}. {advice}"
        )
    return [num_decoder_layers - 1 - stride * i for i in range(num_layers)]


def _check_heads(plan_of_blocks: Plan, shared_projections: bool) -> None:
    hidden, heads, groups = plan_of_blocks.hidden_size, plan_of_blocks.num_heads, plan_of_blocks.num_key_value_heads
    if hidden % heads:
        raise ConfigError(f"cross_attention: hidden_size {hidden} does not divide by num_heads {heads}.")
    if plan_of_blocks.family.gated and hidden // heads % 2:
        raise ConfigError(
            f"cross_attention: rotary positions need an even width per head, {hidden} / {heads} is {hidden // heads}."
        )
    if heads % groups:
        raise ConfigError(f"cross_attention: num_heads {heads} does not divide by num_key_value_heads {groups}.")
    if shared_projections and groups != heads:
        raise ConfigError(
            f"cross_attention: shared_projections needs as many key heads as query heads: set num_key_value_heads to "
            f"{heads}, got {groups}."
        )
