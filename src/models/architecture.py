"""What can be said of a decoder before any weight is loaded: its family and its sizes."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Architecture:
    """Sizes of a decoder-only transformer."""

    model_type: str
    """The family, by transformers' name."""
    num_layers: int
    hidden_size: int
    num_heads: int
    num_key_value_heads: int
    max_positions: int | None = None
    """Most tokens of a sequence, where it is known."""


_MAX_POSITIONS = ("max_position_embeddings", "n_positions")
_SPELLINGS = {
    "model_type": ("model_type",),
    "num_layers": ("num_hidden_layers", "n_layer", "num_layers"),
    "hidden_size": ("hidden_size", "n_embd", "d_model"),
    "num_heads": ("num_attention_heads", "n_head", "num_heads"),
}


def from_dict(raw: Mapping[str, Any]) -> Architecture | None:
    """Read the content of a Hugging Face config.json, in any of the spellings of its families; None where a size is not in it."""
    found: dict[str, Any] = {size: _first(raw, keys) for size, keys in _SPELLINGS.items()}
    if None in found.values():
        return None
    heads = raw.get("num_key_value_heads") or found["num_heads"]
    return Architecture(**found, num_key_value_heads=heads, max_positions=_first(raw, _MAX_POSITIONS))


def _first(raw: Mapping[str, Any], keys: Iterable[str]) -> Any:
    return next((raw[key] for key in keys if raw.get(key) is not None), None)
