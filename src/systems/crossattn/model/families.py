"""Decoder families that support cross-attention blocks, and the settings of the blocks for one base."""

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Family:
    """A decoder family: the path of its layers and the names of its config fields."""

    layers: str
    """Attribute path of the list of decoder layers."""
    gated: bool
    """True: blocks with RMSNorm, rotary positions, grouped keys and values, gated MLP.
    False: LayerNorm, biases, plain MLP."""
    norm_eps: str | float
    """Config field, or the value if the config has no such field."""
    activation: str
    """Config field, or the name of the activation if the config has no such field."""
    residual_dropout: str | None
    """Config field of the dropout after attention and MLP; None if there is no such field."""
    attention_dropout: str


_LLAMA = Family("model.layers", True, "rms_norm_eps", "hidden_act", None, "attention_dropout")
_GEMMA = replace(_LLAMA, activation="hidden_activation")
_GPT = Family("transformer.h", False, "layer_norm_epsilon", "activation_function", "resid_pdrop", "attn_pdrop")
FAMILIES = {
    "bloom": Family("transformer.h", False, "layer_norm_epsilon", "gelu", "hidden_dropout", "attention_dropout"),
    "cohere": replace(_LLAMA, norm_eps="layer_norm_eps"),
    "falcon": Family("transformer.h", False, "layer_norm_epsilon", "activation", "hidden_dropout", "attention_dropout"),
    "gemma": _LLAMA,
    "gemma2": _GEMMA,
    "gemma3_text": _GEMMA,
    "gpt2": _GPT,
    "gpt_bigcode": _GPT,
    "gpt_neo": replace(_GPT, residual_dropout="resid_dropout", attention_dropout="attention_dropout"),
    "gpt_neox": Family("gpt_neox.layers", False, "layer_norm_eps", "hidden_act", "hidden_dropout", "attention_dropout"),
    "gpt_oss": _LLAMA,
    "gptj": _GPT,
    "granite": _LLAMA,
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "mixtral": _LLAMA,
    "olmo2": _LLAMA,
    "opt": Family("model.decoder.layers", False, 1e-5, "activation_function", "dropout", "attention_dropout"),
    "phi": Family("model.layers", False, "layer_norm_eps", "hidden_act", "resid_pdrop", "attention_dropout"),
    "phi3": replace(_LLAMA, residual_dropout="resid_pdrop"),
    "qwen2": _LLAMA,
    "qwen3": _LLAMA,
    "qwen3_moe": _LLAMA,
    "qwen3_next": _LLAMA,
    "smollm3": _LLAMA,
    "stablelm": replace(_LLAMA, norm_eps="layer_norm_eps", residual_dropout="hidden_dropout"),
    "starcoder2": Family("model.layers", False, "norm_epsilon", "hidden_act", "residual_dropout", "attention_dropout"),
}
"""Families by the base's `model_type`.
To add a family, add a row here and a line in tests/systems/crossattn/model/test_families.py."""


@dataclass(frozen=True)
class Plan:
    """Settings of the blocks for one base."""

    family: Family
    layer_indices: list[int]
    """Decoder layers that get a block, from the top."""
    hidden_size: int
    num_heads: int
    num_key_value_heads: int
    feed_forward_size: int
