"""Family and sizes of a model, from its config, without loading weights."""

from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any

from src.experiments.interfaces import Architecture

_MAX_POSITIONS = ("max_position_embeddings", "n_positions")
_SPELLINGS = {
    "model_type": ("model_type",),
    "num_layers": ("num_hidden_layers", "n_layer", "num_layers"),
    "hidden_size": ("hidden_size", "n_embd", "d_model"),
    "num_heads": ("num_attention_heads", "n_head", "num_heads"),
}


def from_dict(raw: Mapping[str, Any]) -> Architecture | None:
    """Read the content of a Hugging Face config.json of any family; None if a size is missing.

    For a model that also reads images, the sizes are those of its text model.

    Raises:
        ValueError: a size is not a positive int, or the family is not a str. The message names the key.
    """
    raw = raw["text_config"] if isinstance(raw.get("text_config"), dict) else raw
    for key in (*chain.from_iterable(_SPELLINGS.values()), "num_key_value_heads", "head_dim", *_MAX_POSITIONS):
        _check(key, raw.get(key))
    sizes: dict[str, Any] = {size: _first_given(raw, keys) for size, keys in _SPELLINGS.items()}
    if None in sizes.values():
        return None
    heads = raw.get("num_key_value_heads") or (1 if raw.get("multi_query") else sizes["num_heads"])
    return Architecture(
        **sizes,
        num_key_value_heads=heads,
        max_positions=_first_given(raw, _MAX_POSITIONS),
        head_size=raw.get("head_dim"),
    )


def _check(key: str, value: Any) -> None:
    if value is None:
        return
    if key == "model_type" and not isinstance(value, str):
        raise ValueError(f"{key}: expected str, got {value!r} ({type(value).__name__}).")
    if key != "model_type" and (type(value) is not int or value < 1):
        raise ValueError(f"{key}: expected an int > 0, got {value!r} ({type(value).__name__}).")


def _first_given(raw: Mapping[str, Any], keys: Iterable[str]) -> Any:
    return next((raw[key] for key in keys if raw.get(key) is not None), None)
