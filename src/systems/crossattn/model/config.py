"""Config of a frozen decoder with new layers that read encoded contexts, and the checks that do not need torch.

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
    from src.systems.crossattn.model.layers import CrossAttentionLM


class Config(WrapperConfig):
    """Placement and sizes of the cross-attention blocks."""

    num_layers: int = Field(ge=1)
    """Number of blocks."""
    stride: int = Field(ge=1)
    """Number of decoder layers from one block to the next, from the top."""
    base: ModelField
    """The decoder, frozen. It also encodes the contexts."""
    shared_weights: bool = False
    """Whether all blocks share their weights."""
    final_layer: bool = False
    """Whether blocks run after their decoder layer, instead of before it."""
    shared_projections: bool = False
    """Whether queries and keys share one matrix."""
    hidden_size: int | None = Field(default=None, gt=0)
    """Total width of the heads; None for the base's hidden size."""
    num_heads: int | None = Field(default=None, gt=0)
    """None for the base's number."""
    num_key_value_heads: int | None = Field(default=None, gt=0)
    """Only for Llama style. None for the base's number."""
    attention_bias: bool = False
    """Only for Llama style: whether the attention's projections have biases. GPT style always has biases."""
    skip_connections: bool = False
    """Whether to add a block's input to its output once more."""
    norm: Literal["layer", "rms"] | None = None
    """None for the family's norm, which is RMSNorm in Llama style. XC-Cache's published Llama-style blocks have
    LayerNorm."""
    feed_forward_size: int | None = Field(default=None, gt=0)
    """Width of a block's MLP; None for four times the total width of the heads."""
    context_dropout_rate: float = Field(default=0.0, ge=0, lt=1)
    """Share of the context positions that are hidden from each block in training."""
    train_all_params: bool = False
    """Whether to train the base too, as decoder. Contexts are encoded by the current base without gradients."""
    cache_contexts: bool = False
    """Whether each process encodes each context once and caches its states in host memory, for data that is read many
    times. A token takes as many values as the base's hidden size. Contexts are encoded one at a time, so that resuming
    is bit-exact."""
    weights: str | None = Field(default=None, min_length=1)
    """Folder of a model in XC-Cache's layout, for the blocks' initial weights; None for random weights."""

    @model_validator(mode="after")
    def _base_has_nothing_to_learn(self) -> "Config":
        if self.base.name == "lora":
            raise ValueError(
                "base: it is frozen, so new adapters in it would not be trained. Wrap 'cross_attention' in 'lora', "
                "or use the 'experiment' that trained the adapters as base."
            )
        if self.base.new_tokens() and not self.train_all_params:
            raise ValueError("base: it is frozen, so its extra_tokens would not be trained. Remove them.")
        if self.train_all_params and self.base.is_frozen():
            raise ValueError("train_all_params: quantized weights cannot be trained. Remove one of the two.")
        if self.train_all_params and self.cache_contexts:
            raise ValueError(
                "cache_contexts: the base is trained (train_all_params), so its states change. Remove one of the two."
            )
        return self

    def build(self, places: Places) -> "CrossAttentionLM":
        """The base with its blocks. New weights are initialised from torch's global generator, after the base's.

        Raises:
            ConfigError: the family of the base is unknown, or the blocks do not fit it.
            CheckpointError: `weights` are missing, damaged, or for different blocks.
        """
        from src.systems.crossattn.model import export, xc_cache_weights
        from src.systems.crossattn.model.layers import CrossAttentionLM

        model = CrossAttentionLM(self, self.base.build(places))
        model.exporter = export.write
        if self.weights is not None and not places.on_paper:
            xc_cache_weights.load(model, Path(self.weights))
        return model

    def check(self, places: Places) -> None:
        from src.systems.crossattn.model import xc_cache_weights

        call_once(self.base.check, places)
        if self.base.has_random_weights() and not self.train_all_params:
            raise ConfigError(
                "cross_attention.base: its weights are random and frozen, so they would never be trained or saved. "
                "Train it first and use ref(...) to that experiment, or set train_all_params."
            )
        if self.weights is not None:
            xc_cache_weights.require(Path(self.weights))
        sizes = self.architecture(places)
        if sizes:
            self.plan(sizes)

    def fingerprint(self, places: Places) -> str | None:
        """Digest of all weights that `build` loads: the base's and `weights`; None if it loads no weights."""
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
        """Fill in the settings that default to the base's.

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
    """Indices of the `num_layers` decoder layers that get a block: the last, then every `stride`-th below it.

    Raises:
        ConfigError: num_layers * stride is more than num_decoder_layers.
    """
    if num_layers < 1 or stride < 1:
        raise ConfigError(
            f"cross_attention: expected num_layers and stride of at least 1, got {num_layers} and {stride}."
        )
    if num_layers * stride > num_decoder_layers:
        limits = {"num_layers": num_decoder_layers // stride, "stride": num_decoder_layers // num_layers}
        fits = [f"{name} up to {most}" for name, most in limits.items() if most]
        advice = (
            f"Use {' or '.join(fits)}." if fits else f"Lower both: their product can be at most {num_decoder_layers}."
        )
        raise ConfigError(
            f"cross_attention: num_layers {num_layers} x stride {stride} needs {num_layers * stride} decoder layers, "
            f"but the base has {num_decoder_layers}. {advice}"
        )
    return [num_decoder_layers - 1 - stride * i for i in range(num_layers)]


def _check_heads(plan_of_blocks: Plan, shared_projections: bool) -> None:
    hidden, heads, groups = plan_of_blocks.hidden_size, plan_of_blocks.num_heads, plan_of_blocks.num_key_value_heads
    if hidden % heads:
        raise ConfigError(
            f"cross_attention: hidden_size {hidden} is not divisible by num_heads {heads}. Change num_heads."
        )
    if plan_of_blocks.family.gated and hidden // heads % 2:
        raise ConfigError(
            f"cross_attention: rotary positions need an even head size, got {hidden} / {heads} = {hidden // heads}. "
            "Change num_heads."
        )
    if heads % groups:
        raise ConfigError(
            f"cross_attention: num_heads {heads} is not divisible by num_key_value_heads {groups}. Change one of them."
        )
    if shared_projections and groups != heads:
        raise ConfigError(
            f"cross_attention: shared_projections needs as many key heads as query heads, got {groups}. "
            f"Set num_key_value_heads to {heads}."
        )
