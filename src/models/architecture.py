"""What can be said of a decoder before any weight is loaded: its family and its sizes."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from src.config import Places
from src.registry import Part


@dataclass(frozen=True)
class Architecture:
    """Sizes of a decoder-only transformer."""

    model_type: str
    """The family, by transformers' name."""
    num_layers: int
    hidden_size: int
    num_heads: int
    num_key_value_heads: int


_SPELLINGS = {
    "model_type": ("model_type",),
    "num_layers": ("num_hidden_layers", "n_layer", "num_layers"),
    "hidden_size": ("hidden_size", "n_embd", "d_model"),
    "num_heads": ("num_attention_heads", "n_head", "num_heads"),
}


def from_dict(raw: Mapping[str, Any]) -> Architecture | None:
    """Read the content of a Hugging Face config.json, in any of the spellings of its families; None where a size is not in it."""
    found: dict[str, Any] = {}
    for size, keys in _SPELLINGS.items():
        found[size] = next((raw[key] for key in keys if raw.get(key) is not None), None)
    if None in found.values():
        return None
    return Architecture(**found, num_key_value_heads=raw.get("num_key_value_heads") or found["num_heads"])


def of(model: Part, places: Places) -> Architecture | None:
    """Ask a model part; None where only loading it would tell."""
    ask = model.function("architecture")
    return ask(places) if ask else None


def depth(architecture: Architecture | None) -> int | None:
    """Number of decoder layers, None where it is not known."""
    return architecture.num_layers if architecture else None
