"""What a training takes of a device's memory, roughly, before anything of it is loaded."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from src.experiments.config import Places
from src.experiments.interfaces import ModelConfig
from src.models import hf, lora, trained_model

if TYPE_CHECKING:
    from torch import nn

_VALUES = 17
"""Numbers that a layer keeps of a token for the backward pass, in hidden sizes (Korthikanti et al. 2022, arXiv
2205.05198, section 4.1: 34 bytes in 16 bits), where attention keeps no scores."""
_LOGITS_BYTES = 12
"""Of each logit: as the model gives it, in float32, and its gradient."""
_MOMENTS = {"adamw": 2, "adamw_scale": 2, "adafactor": 0}
"""Numbers of the optimizer per trained one; adafactor's are few, as it keeps rows and columns of a matrix alone."""


class Estimate(NamedTuple):
    """Bytes in each process."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    """What the layers keep of a micro-batch for the backward pass."""
    checkpointed: int
    """The same with --gradient_checkpointing: the inputs of all layers, and one layer."""
    logits: int

    def lines(self) -> list[str]:
        """Of what is estimated, and of all together."""
        fixed = self.weights + self.gradients + self.optimizer + self.logits
        named = [
            ("weights", self.weights),
            ("gradients", self.gradients),
            ("optimizer", self.optimizer),
            ("logits", self.logits),
        ]
        told = ", ".join(f"{name} {format_bytes(value)}" for name, value in [*named, ("activations", self.activations)])
        less = f"with --gradient_checkpointing {format_bytes(fixed + self.checkpointed)}"
        return [f"memory of a process, roughly: {format_bytes(fixed + self.activations)} ({told}); {less}"]


class _Unloaded(hf.Config):
    """A model of the hub or a folder without its weights."""

    def build(self, places: Places) -> Any:
        import torch
        from transformers import AutoModelForCausalLM

        from src.models import prepared_tokenizer

        config = self.load_config(places)
        model: Any = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, self.dtype))
        model.name_or_path = str(self.tokenizer_folder(places) or self.folder(places))
        if self.extra_tokens or self.tokenizer:
            tokens = len(prepared_tokenizer.load(Path(model.name_or_path), self.extra_tokens or ()))
            model.resize_token_embeddings(max(tokens, config.vocab_size), mean_resizing=False)
        return model.requires_grad_(self.quantization is None)

    def check(self, places: Places) -> None:
        """Nothing: its weights need not be here."""


def without_weights(model: ModelConfig, places: Places, is_trained: bool = False) -> ModelConfig:
    """A config of the same model that loads nothing. is_trained: it was; then its adapters are a part of its matrices.

    Raises:
        ConfigError: a parent is not known.
    """
    if isinstance(model, trained_model.Config):
        return without_weights(model.parent(places), places, True)
    if isinstance(model, lora.Config) and is_trained:
        return without_weights(model.base, places, True)
    if type(model) is hf.Config:
        return _Unloaded.model_construct(**dict(model))
    base = getattr(model, "base", None)
    return (
        model.model_copy(update={"base": without_weights(base, places, is_trained)})
        if isinstance(base, ModelConfig)
        else model
    )


def build_empty(model: ModelConfig, places: Places) -> Any:
    """The model on torch's device "meta", which has shapes and no numbers. model: as `without_weights` gives it.

    Raises:
        UserError: a file that tells its sizes is missing.
    """
    import torch

    with torch.device("meta"):
        return model.build(places)


def estimate(model: "nn.Module", loop: Any, rows: int, tokens: int, bits: str | None = None) -> Estimate:
    """Of a training. loop: its `LoopConfig`. rows: of the largest micro-batch, each of so many `tokens`.
    bits: "8bit", "4bit" or None."""
    value_bytes = 4 if loop.precision == "float32" else 2
    config: Any = model.config
    weights = trained = 0
    for parameter in model.parameters():
        size = parameter.numel() * parameter.element_size()
        is_packed = bits and parameter.dim() == 2 and not parameter.requires_grad
        weights += parameter.numel() * (1 if bits == "8bit" else 0.5) if is_packed else size
        trained += size * parameter.requires_grad
    positions = rows * tokens
    layer = _VALUES * value_bytes * positions * config.hidden_size
    layers = config.num_hidden_layers
    has_logits = getattr(model, "get_output_embeddings", lambda: None)() is not None
    return Estimate(
        weights=int(weights),
        gradients=trained,
        optimizer=trained * _MOMENTS[loop.optimizer],
        activations=layers * layer,
        checkpointed=layers * value_bytes * positions * config.hidden_size + layer,
        logits=has_logits * positions * config.vocab_size * _LOGITS_BYTES,
    )


def format_bytes(count: float) -> str:
    """Such as 3.2 GB."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            return f"{count:.3g} {unit}" if count < 1000 else f"{count:,.0f} {unit}"
        count /= 1000
    raise AssertionError
