"""Floating-point operations of models, computed from their configs.

An addition and a multiplication are two operations. Only matrix products count, which are more than 99 % of a language
model's work; norms, activation functions, softmax and embedding look-ups do not. Attention counts in full, causal or
not, since the products are computed. The backward pass takes twice the forward pass: once for the inputs, once for the
weights (Kaplan et al. 2020, section 2.1; PaLM, Chowdhery et al. 2022, appendix B). A frozen matrix takes only the
former, and neither if no trained weight is below it.

Shapes: B samples, T tokens, D tokens of a decoder, P positions that its cross-attention reads.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from torch import nn


class Passes(NamedTuple):
    """Multipliers on forward matmul FLOPs."""

    matrices: int
    """Inputs times weights."""
    attention: int
    """Queries times keys, and weights times values."""


FORWARD, TRAINED, FROZEN = Passes(1, 1), Passes(3, 3), Passes(2, 3)
"""FORWARD: no gradients. FROZEN: gradients pass through to trained weights below."""


class Stack(NamedTuple):
    """Layers of one kind."""

    layers: int
    weights: int
    """Number of weights in the matrices of one layer."""
    width: int
    """Total width of all heads."""

    def flops(self, B: int, T: int, passes: Passes) -> int:
        """FLOPs for B sequences of T tokens, with full attention."""
        return (
            B
            * self.layers
            * (passes.matrices * 2 * T * self.weights + passes.attention * attention_flops(T, T, self.width))
        )


def attention_flops(queries: int, keys: int, width: int) -> int:
    """FLOPs of queries times keys and weights times values in a forward pass. width: total width of all heads."""
    return 2 * 2 * queries * keys * width


def decoder_stack(config: Any) -> Stack:
    """The layers of a decoder of a transformers `config`. Raises KeyError for a family that is not in the table."""
    return _DECODERS[config.model_type](config)


def head_weights(config: Any) -> int:
    """Number of weights in the matrix of the logits."""
    return config.hidden_size * config.vocab_size


def _gpt2(config: Any) -> Stack:
    width, inner = config.n_embd, config.n_inner or 4 * config.n_embd
    return Stack(config.n_layer, width * (4 * width + 2 * inner), width)


def _gpt_neo(config: Any) -> Stack:
    width = config.hidden_size
    return Stack(config.num_layers, width * (4 * width + 2 * (config.intermediate_size or 4 * width)), width)


def _opt(config: Any) -> Stack:
    width = config.hidden_size
    return Stack(config.num_hidden_layers, width * (4 * width + 2 * config.ffn_dim), width)


def _bloom(config: Any) -> Stack:
    return Stack(config.n_layer, 12 * config.hidden_size**2, config.hidden_size)


def _falcon(config: Any) -> Stack:
    width, heads = config.hidden_size, config.num_attention_heads
    key_heads = config.num_kv_heads if config.new_decoder_architecture else 1 if config.multi_query else heads
    weights = width * (2 * width + 2 * key_heads * width // heads + 2 * config.ffn_hidden_size)
    return Stack(config.num_hidden_layers, weights, width)


def _gpt_bigcode(config: Any) -> Stack:
    width, inner = config.n_embd, config.n_inner or 4 * config.n_embd
    shared = config.n_embd // config.n_head if config.multi_query else config.n_embd
    return Stack(config.n_layer, width * (2 * width + 2 * shared + 2 * inner), width)


def _gpt_neox(config: Any) -> Stack:
    width = config.hidden_size
    return Stack(config.num_hidden_layers, width * (4 * width + 2 * config.intermediate_size), width)


def _llama(config: Any) -> Stack:
    """Grouped keys and values, gated MLP. A sliding window is counted as full attention."""
    return _grouped_query_stack(config, 3)


def _starcoder2(config: Any) -> Stack:
    """Grouped keys and values, plain MLP."""
    return _grouped_query_stack(config, 2)


def _grouped_query_stack(config: Any, matrices_of_mlp: int) -> Stack:
    width = config.hidden_size
    head = getattr(config, "head_dim", None) or width // config.num_attention_heads
    queries, keys = config.num_attention_heads * head, config.num_key_value_heads * head
    return Stack(
        config.num_hidden_layers, width * (2 * queries + 2 * keys + matrices_of_mlp * config.intermediate_size), queries
    )


_LLAMA_LIKE = (
    *("cohere", "gemma", "gemma2", "gemma3_text", "granite", "llama"),
    *("mistral", "olmo2", "phi3", "qwen2", "qwen3", "smollm3", "stablelm"),
)
_DECODERS: dict[str, Callable[[Any], Stack]] = {
    "bloom": _bloom,
    "falcon": _falcon,
    "gpt_bigcode": _gpt_bigcode,
    "gpt_neo": _gpt_neo,
    "gpt_neox": _gpt_neox,
    "opt": _opt,
    "phi": _starcoder2,
    "starcoder2": _starcoder2,
    **dict.fromkeys(("codegen", "gpt2", "gptj"), _gpt2),
    **dict.fromkeys(_LLAMA_LIKE, _llama),
}
KNOWN_FAMILIES = {*_DECODERS, "t5", "mt5", "idefics2", "idefics3", "smolvlm"}
"""The model_type of families with known FLOPs. Models that read images compute them in their `training_flops`."""


def t5_flops(config: Any, passages: tuple[int, int], answers: tuple[int, int], P: int, passes: Passes) -> int:
    """FLOPs of a T5. passages: (number, tokens) of encoder inputs; answers: (number, tokens) of decoder inputs.
    P: encoder positions that each answer attends to.

    Logits are computed for all tokens of the answers.
    """
    inner, width = config.num_heads * config.d_kv, config.d_model
    weights = 4 * width * inner + (3 if config.is_gated_act else 2) * width * config.d_ff
    B, D = answers
    cross_attention = passes.matrices * 2 * (D + P) * 2 * width * inner + passes.attention * attention_flops(
        D, P, inner
    )
    return (
        Stack(config.num_layers, weights, inner).flops(*passages, passes)
        + Stack(config.num_decoder_layers, weights, inner).flops(B, D, passes)
        + B * (config.num_decoder_layers * cross_attention + passes.matrices * 2 * D * head_weights(config))
    )


def forward_flops(config: Any, B: int, T: int, decoder_tokens: int = 0, passes: Passes = FORWARD) -> int:
    """FLOPs of a forward pass (or of `passes`) over B sequences of T tokens, for a transformers `config`.

    decoder_tokens: for an encoder-decoder; its encoder reads the T tokens.

    Raises:
        KeyError: the family is not in `KNOWN_FAMILIES`.
    """
    if config.model_type in ("t5", "mt5"):
        return t5_flops(config, (B, T), (B, decoder_tokens), T, passes)
    return decoder_stack(config).flops(B, T, passes) + passes.matrices * 2 * B * T * head_weights(config)


class Adapters(NamedTuple):
    """Number of weights in trained low-rank adapters, by the tokens that they process."""

    inputs: int = 0
    decoder: int = 0
    """Adapters on the decoder tokens of an encoder-decoder."""
    token_rows: bool = False
    """Whether rows of the embedding and of the output matrix are trained, which computes gradients of all rows."""

    def flops(self, input_tokens: int, decoder_tokens: int, passes: Passes = TRAINED) -> int:
        """FLOPs of the adapters only."""
        return passes.matrices * 2 * (input_tokens * self.inputs + decoder_tokens * self.decoder)

    def head_flops(self, config: Any, tokens: int) -> int:
        """FLOPs of the gradients of the output matrix for `tokens` logits."""
        return self.token_rows * 2 * tokens * head_weights(config)


def adapter_weights(model: "nn.Module") -> Adapters | None:
    """The adapters of a model of which only adapters are trained; zeros if the full model is trained.
    None if another part is frozen."""
    trained = [(name, parameter.numel()) for name, parameter in model.named_parameters() if parameter.requires_grad]
    if len(trained) == sum(1 for _ in model.parameters()):
        return Adapters()
    rows = [name for name, _ in trained if ".trainable_tokens_delta." in name]
    trained = [(name, count) for name, count in trained if name not in rows]
    if not trained or not all(".lora_" in name for name, _ in trained):
        return None
    later = [count for name, count in trained if name.startswith("decoder.") and not _reads_encoder(name)]
    return Adapters(sum(count for _, count in trained) - sum(later), sum(later), bool(rows))


def _reads_encoder(name: str) -> bool:
    return ".EncDecAttention.k." in name or ".EncDecAttention.v." in name


def training_flops(config: Any, B: int, T: int, decoder_tokens: int = 0, adapters: Adapters = Adapters()) -> int:  # noqa: B008  no list
    """FLOPs of a forward and a backward pass: for all weights, or through frozen weights to `adapters`.

    The lowest layer of a frozen model counts in full, although matrices below its lowest adapter need no gradients.
    """
    passes = FROZEN if any(adapters) else TRAINED
    return (
        forward_flops(config, B, T, decoder_tokens, passes)
        + adapters.flops(B * T, B * decoder_tokens)
        + adapters.head_flops(config, B * (decoder_tokens or T))
    )
