"""Regularise a decoder: residual dropout after attention and feed-forward modules, and frozen layers.

Neither changes a weight's name: a checkpoint has the trained weights, and an exported model has all weights and no
hooks.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, model_validator

from src.errors import ConfigError
from src.experiments.config import Places
from src.experiments.interfaces import ModelField, WrapperConfig
from src.experiments.kinds import DECODER

if TYPE_CHECKING:
    from torch import nn

_ATTENTION = ("attention", "attn", "self_attention", "self_attn")
_FEED_FORWARD = ("mlp", "feed_forward", "fc2")


class Config(WrapperConfig):
    """A decoder and its regularisation."""

    base: ModelField
    """The model to regularize."""
    residual_dropout: float = Field(default=0.0, ge=0, lt=1)
    """Training dropout on the outputs of each layer's attention and feed-forward modules."""
    dropout_by_layer: Literal["same", "growing"] = "same"
    """growing: layer i of L, counted from 0, has i / (L - 1) of the rate (LIMA, arXiv 2305.11206, section 3)."""
    frozen_layers: int = Field(default=0, ge=0)
    """Number of frozen layers, from the first."""
    frozen_embeddings: bool = False
    """Whether to freeze the token and position embeddings, and with tied weights the output matrix."""

    @model_validator(mode="after")
    def _something_is_kept(self) -> "Config":
        if self.base.name == "lora":
            raise ValueError("base: 'lora' must wrap 'regularized', not its base.")
        self.base.require_kind(DECODER, None, "base")
        if not (self.residual_dropout or self.frozen_layers or self.frozen_embeddings):
            raise ValueError("expected residual_dropout, frozen_layers or frozen_embeddings. Set one, or use the base.")
        if self.dropout_by_layer == "growing" and not self.residual_dropout:
            raise ValueError("dropout_by_layer: 'growing' needs residual_dropout. Set it, or remove dropout_by_layer.")
        if (self.frozen_layers or self.frozen_embeddings) and self.base.has_random_weights():
            raise ValueError(
                "base: its weights are random, so frozen layers would never be trained. Use a trained model."
            )
        if self.frozen_embeddings and self.base.new_tokens():
            raise ValueError(
                "frozen_embeddings: the base has extra_tokens, which would not be learned. Remove one of the two."
            )
        return self

    def build(self, places: Places) -> "nn.Module":
        """The base with dropout hooks and frozen parameters.

        Raises:
            ConfigError: all layers would be frozen, or the names of the base's modules are unknown.
            UserError: the base cannot be built.
        """
        self.check(places)
        model = self.base.build(places)
        layers = _layers(model)
        self._require_layers(len(layers))
        for layer in layers[: self.frozen_layers]:
            layer.requires_grad_(False)
        if self.frozen_embeddings:
            for module in _embeddings(model):
                module.requires_grad_(False)
        if self.residual_dropout:
            for rate, layer in zip(self.dropout_rates(len(layers)), layers, strict=True):
                _add_dropout(layer, rate)
        return model

    def dropout_rates(self, num_layers: int) -> list[float]:
        """One rate per layer."""
        if self.dropout_by_layer == "same" or num_layers == 1:
            return [self.residual_dropout] * num_layers
        return [self.residual_dropout * i / (num_layers - 1) for i in range(num_layers)]

    def check(self, places: Places) -> None:
        self.check_base(places, DECODER)
        if self.frozen_embeddings and self.base.new_token_ids(places):
            raise ConfigError(
                "model.frozen_embeddings: the base's tokenizer has new tokens, which would not be learned. "
                "Remove one of the two."
            )
        sizes = self.architecture(places)
        if sizes:
            self._require_layers(sizes.num_layers)

    def _require_layers(self, num_layers: int) -> None:
        if self.frozen_layers >= num_layers:
            raise ConfigError(
                f"model.frozen_layers: {self.frozen_layers} of {num_layers} layers leave none to train. "
                "Use a smaller number."
            )


def _layers(decoder: Any) -> "list[nn.Module]":
    """The layers of a transformers model, in order."""
    from torch import nn

    num_layers = decoder.config.num_hidden_layers
    candidates = [
        part for part in decoder.base_model.modules() if isinstance(part, nn.ModuleList) and len(part) == num_layers
    ]
    if not candidates:
        raise ConfigError(f"model.base: cannot find the layers of {decoder.config.model_type!r}. Use another base.")
    return list(candidates[0])


def _embeddings(decoder: Any) -> "Iterator[nn.Module]":
    """The embeddings of tokens and of learned positions: all embeddings outside of the layers."""
    from torch import nn

    inner = {id(part) for layer in _layers(decoder) for part in layer.modules()}
    return (part for part in decoder.base_model.modules() if isinstance(part, nn.Embedding) and id(part) not in inner)


def _add_dropout(layer: "nn.Module", rate: float) -> None:
    from torch.nn import functional

    def drop(module: "nn.Module", _: Any, output: Any) -> Any:
        first, rest = (output[0], output[1:]) if isinstance(output, tuple) else (output, None)
        dropped = functional.dropout(first, rate, module.training)
        return dropped if rest is None else (dropped, *rest)

    for names in (_ATTENTION, _FEED_FORWARD):
        parts = [part for name, part in layer.named_children() if name in names]
        if len(parts) != 1:
            child_names = ", ".join(name for name, _ in layer.named_children())
            raise ConfigError(
                f"model.residual_dropout: the base's layers have the modules {child_names}; expected exactly one of "
                f"{', '.join(names)}."
            )
        parts[0].register_forward_hook(drop)
