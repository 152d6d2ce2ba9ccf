"""Read and write cross-attention blocks in XC-Cache's layout.

A folder has config.json and the weights in safetensors or PyTorch files. Only the weights `cross_attn_layers.<i>.…` are
read; a shared block is repeated for each layer. The blocks' settings in config.json must equal the experiment's. For
the names see ServiceNow/xc-cache, xc_cache/models/cross_attn. XC-Cache's code only loads Llama-style blocks with
LayerNorm (`norm: layer`).
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from src.errors import CheckpointError
from src.files import read_json, sha256, write_json
from src.support.weights import summarize_names

if TYPE_CHECKING:
    from torch import Tensor

    from src.systems.crossattn.model.layers import CrossAttentionLM

_PREFIX = "cross_attn_layers"
_SHARED = {"norm1": "ln_1", "norm2": "ln_2"}
_GPT = {
    **_SHARED,
    "attention.v": "crossattention.v_attn",
    "attention.out": "crossattention.c_proj",
    "mlp.up": "mlp.c_fc",
    "mlp.down": "mlp.c_proj",
}
_GPT_SEPARATE = {**_GPT, "attention.q": "crossattention.q_attn", "attention.k": "crossattention.k_attn"}
_GPT_SHARED = {**_GPT, "attention.q": "crossattention.q_k_attn"}
_LLAMA = {
    **_SHARED,
    **{
        f"attention.{ours}": f"crossattention.{theirs}_proj"
        for ours, theirs in {"q": "q", "k": "k", "v": "v", "out": "o"}.items()
    },
    **{f"mlp.{name}": f"mlp.{name}_proj" for name in ("gate", "up", "down")},
}
_PATTERNS = ("model*.safetensors", "pytorch_model*.bin")


def names(model: "CrossAttentionLM") -> dict[str, list[str]]:
    """XC-Cache's names of each block weight, by our name; several names for a shared block."""
    block = model.unique_blocks()[0]
    gated, together = block.mlp.gate is not None, block.attention.k is None
    table = _LLAMA if gated else _GPT_SHARED if together else _GPT_SEPARATE
    # XC-Cache's Llama-style blocks always have two matrices; with shared projections both are equal.
    twin = {table["attention.q"]: table["attention.k"]} if gated and together else {}
    names_by_weight = {}
    for key in model.blocks.state_dict():
        place, _, rest = key.partition(".")
        part, _, kind = rest.rpartition(".")
        indices = model.layer_indices if place == "shared" else [int(place)]
        parts = [table[part], *([twin[table[part]]] if table[part] in twin else [])]
        names_by_weight[f"blocks.{key}"] = [f"{_PREFIX}.{i}.{name}.{kind}" for i in indices for name in parts]
    return names_by_weight


def require(folder: Path) -> list[Path]:
    """The weight files in `folder`.

    Raises:
        CheckpointError: there are no weight files.
    """
    paths = next((sorted(folder.glob(pattern)) for pattern in _PATTERNS if any(folder.glob(pattern))), [])
    if not paths:
        raise CheckpointError(f"{folder}: no weights. Expected {' or '.join(_PATTERNS)}, written by XC-Cache.")
    return paths


def fingerprint(folder: Path, base: str | None) -> str:
    """Digest of the weights in `folder` and of those of the base."""
    return hashlib.sha256(json.dumps([base, *(sha256(path) for path in require(folder))]).encode()).hexdigest()


def load(model: "CrossAttentionLM", folder: Path) -> None:
    """Load the blocks in `folder` into `model`, in place.

    Raises:
        CheckpointError: the files are damaged, or do not fit the blocks of `model`. Then `model` is unchanged.
    """
    import torch

    from src.support.deferred import pause_recording

    _check_config(model, folder)
    saved: dict[str, Tensor] = {}
    for path in require(folder):
        with pause_recording():
            saved |= _read_blocks(path)
    names_by_weight, weights = names(model), model.state_dict()
    expected = {theirs for several in names_by_weight.values() for theirs in several}
    if saved.keys() != expected:
        absent, extra = summarize_names(expected - saved.keys()), summarize_names(saved.keys() - expected)
        raise CheckpointError(
            f"{folder}: for different blocks. Missing: {absent}; unexpected: {extra}. "
            "Compare its config.json with the experiment's model."
        )
    for ours, several in names_by_weight.items():
        for theirs in several:
            if saved[theirs].shape != weights[ours].shape:
                raise CheckpointError(
                    f"{folder}: for different blocks. {theirs}: expected the shape {list(weights[ours].shape)}, got "
                    f"{list(saved[theirs].shape)}. Compare its config.json with the experiment's model."
                )
            if not torch.equal(saved[theirs], saved[several[0]]):
                raise CheckpointError(
                    f"{folder}: {several[0]} and {theirs} differ, but shared_weights or shared_projections ties them. "
                    "Set the option to false."
                )
    with torch.no_grad():
        for ours, several in names_by_weight.items():
            weights[ours].copy_(saved[several[0]])


def _check_config(model: "CrossAttentionLM", folder: Path) -> None:
    """Require that the blocks' settings in config.json equal those of `model`."""
    path = folder / "config.json"
    saved_config = read_json(path, CheckpointError) if path.is_file() else {}
    ours = _settings(model)
    ignored = {"cross_attn_dropout_prob"}  # dropout is a setting of the training
    if model.unique_blocks()[0].mlp.gate is not None:
        ignored |= {"cross_attn_shared_projections"}
    if model.config.model_type == "mistral":
        ignored |= {f"cross_attn_{name}" for name in ("num_attention_heads", "num_key_value_heads", "attention_bias")}
    wrong = [
        f"{name}: expected {value!r}, as in the experiment, got {saved_config[name]!r}"
        for name, value in ours.items()
        if name not in ignored and saved_config.get(name) not in (None, value)
    ]
    if wrong:
        raise CheckpointError(f"{path}: for different blocks: {'; '.join(wrong)}. Change the experiment's model.")


def save(model: "CrossAttentionLM", folder: Path, base: str, with_base: bool = False) -> None:
    """Write the blocks of `model` and a config.json into the existing `folder`.

    base: hub id or folder of the base, from which XC-Cache builds its model. with_base: write the base's weights too,
    which XC-Cache's checkpoint loader needs, under the base's names but with "transformer." instead of "model.".
    """
    from safetensors.torch import save_file

    weights = model.state_dict()
    tensors = {theirs: weights[ours] for ours, several in names(model).items() for theirs in several}
    if with_base:
        base_weights = model.base.state_dict()
        tensors |= {
            f"transformer.{name.removeprefix('model.')}" if name.startswith("model.") else name: base_weights[name]
            for name in base_weights
        }
    save_file(
        {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()},
        folder / "model.safetensors",
    )
    write_json(folder / "config.json", {**model.config.to_dict(), **_settings(model), "_name_or_path": base})


def unlike_reference(model: "CrossAttentionLM") -> list[str]:
    """Features of these blocks that XC-Cache's code does not support, so that it cannot load them."""
    block, base = model.unique_blocks()[0], model.config
    attention, width = block.attention, block.attention.heads * block.attention.head_size
    differences = {
        f"bases of type {base.model_type!r}": base.model_type not in ("gpt_bigcode", "llama", "mistral"),
        "RMSNorm in blocks": not hasattr(block.norm1, "bias"),
        "Mistral blocks with other heads than the base's": base.model_type == "mistral"
        and (width, attention.heads, attention.v.out_features // attention.head_size)
        != (base.hidden_size, base.num_attention_heads, base.num_key_value_heads),
        "feed_forward_size": base.model_type != "mistral" and block.mlp.up.out_features != 4 * width,
    }
    return [feature for feature, is_different in differences.items() if is_different]


def _settings(model: "CrossAttentionLM") -> dict[str, Any]:
    """The blocks' sizes, as XC-Cache writes them into config.json.

    XC-Cache's Mistral blocks have the base's heads, and use only the MLP's width from this configuration.
    """
    config, block = model.settings, model.unique_blocks()[0]
    attention, of_base = block.attention, model.config.model_type == "mistral"
    return {
        "n_cross_attn_layers": config.num_layers,
        "cross_attn_layers_stride": config.stride,
        "cross_attn_shared_weights": config.shared_weights,
        "cross_attn_dropout_prob": config.context_dropout_rate,
        "cross_attn_final_layer": config.final_layer,
        "cross_attn_shared_projections": config.shared_projections,
        "cross_attn_hidden_size": block.mlp.up.out_features // 4 if of_base else attention.heads * attention.head_size,
        "cross_attn_num_attention_heads": attention.heads,
        "cross_attn_num_key_value_heads": attention.v.out_features // attention.head_size,
        "cross_attn_attention_bias": config.attention_bias,
        "cross_attn_skip_connections": config.skip_connections,
    }


def _read_blocks(path: Path) -> "Mapping[str, Tensor]":
    """The blocks' weights in one file."""
    import pickle

    import torch
    from safetensors import SafetensorError, safe_open

    try:
        if path.suffix == ".safetensors":
            with safe_open(path, framework="pt") as file:
                return {name: file.get_tensor(name) for name in file.keys() if name.startswith(f"{_PREFIX}.")}  # noqa: SIM118  not a dict
        loaded = torch.load(path, map_location="cpu", weights_only=True)
        return {name: tensor for name, tensor in loaded.items() if name.startswith(f"{_PREFIX}.")}
    except (SafetensorError, pickle.UnpicklingError, EOFError, RuntimeError) as error:
        raise CheckpointError(
            f"{path}: cannot be read ({str(error).splitlines()[0][:200]}). Download it again."
        ) from None
