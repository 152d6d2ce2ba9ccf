"""Floating-point operations of a model, computed from its config, and MFU.

An addition and a multiplication are two operations. Matrix products count, which are more than 99 % of a language model's work; norms,
activation functions, softmax and look-ups do not. Attention counts whole, causal or not, as the products are computed. Backward takes twice
the forward: once for the inputs, once for the weights (Kaplan et al. 2020, section 2.1; PaLM, Chowdhery et al. 2022, appendix B).
"""

import logging
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

log = logging.getLogger(__name__)
PEAKS = {
    "B200": 2250e12,
    "H200 NVL": 835e12,
    "H200": 989e12,
    "H100 NVL": 835e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "H800": 989e12,
    "GH200": 989e12,
    "A100": 312e12,
    "A800": 312e12,
    "A30": 165e12,
    "A40": 149.7e12,
    "A10": 125e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
    "V100-PCIE": 112e12,
    "V100": 125e12,
    "T4": 65e12,
}
"""Operations per second of dense matrices in bfloat16, or in float16 on V100 and T4, by a part of the device's name; the first that fits.

From NVIDIA's data sheets of each product, nvidia.com/en-us/data-center/<product>; where those give the rate with sparsity, half of it.
"""
_BFLOAT16_SINCE = ("V100", "T4")  # these have none


def peak_flops(device_name: str, precision: str) -> float | None:
    """Operations per second that the device can reach in "bfloat16" or "float16"; None for another precision or an unknown device."""
    if precision not in ("bfloat16", "float16"):
        return None
    words = device_name.replace("-", " ").split()
    for name, rate in PEAKS.items():
        parts = name.replace("-", " ").split()
        if all(part in words for part in parts):
            return None if precision == "bfloat16" and parts[0] in _BFLOAT16_SINCE else rate
    return None


def mfu(flops_per_second: float, peak_per_device: float, num_devices: int) -> float:
    """Model FLOPs utilisation (PaLM, appendix B): the model's own operations as a share of all devices' peak."""
    return flops_per_second / (peak_per_device * num_devices)


def batch_flops(model: nn.Module) -> Callable[[Mapping[str, Tensor]], int] | None:
    """A function from a batch to the operations of one training pass over it, padding included and recomputation left out.

    None, said in the log, for a model that is none of transformers' known families as it comes, or of which a part is frozen.
    """
    config = getattr(model, "config", None)
    kind = getattr(config, "model_type", None)
    if not type(model).__module__.startswith("transformers.") or kind not in _FORWARD:
        log.info("%s: its operations are not known, so no MFU is reported.", type(model).__name__)
        return None
    if not all(parameter.requires_grad for parameter in model.parameters()):
        log.info("%s: a part of it is frozen, so no MFU is reported.", type(model).__name__)
        return None
    return lambda batch: training_flops(forward_flops(config, *_lengths(batch)))


def _lengths(batch: Mapping[str, Tensor]) -> tuple[int, int, int]:
    """Samples, tokens, and tokens of the decoder of an encoder-decoder, else 0."""
    B, T = batch["input_ids"].shape
    decoder = next((batch[name].shape[1] for name in ("decoder_input_ids", "labels") if name in batch), 0)
    return B, T, decoder


def training_flops(forward_flops: int, trained: bool = True, checkpointing: bool = False) -> int:
    """One forward pass, two for the backward pass if `trained`, one more where gradient checkpointing computes it again."""
    return forward_flops * (1 + 2 * trained + checkpointing)


def forward_flops(config: Any, B: int, T: int, decoder_tokens: int = 0) -> int:
    """Operations of the forward pass over B sequences of T tokens by a model of a transformers `config`.

    decoder_tokens: of an encoder-decoder, whose encoder reads the T.

    Raises:
        KeyError: a family that is not in this table.
    """
    return B * _FORWARD[config.model_type](config, T, decoder_tokens)


def _attention(T: int, keys: int, width: int) -> int:
    """Queries times keys, and weights times values. width: of all heads together."""
    return 2 * 2 * T * keys * width


def _gpt_bigcode(config: Any, T: int, _: int) -> int:
    width, inner = config.n_embd, config.n_inner or 4 * config.n_embd
    shared = config.n_embd // config.n_head if config.multi_query else config.n_embd
    layer = 2 * T * width * (width + 2 * shared + width + 2 * inner) + _attention(T, T, width)
    return config.n_layer * layer + 2 * T * width * config.vocab_size


def _gpt2(config: Any, T: int, _: int) -> int:
    width, inner = config.n_embd, config.n_inner or 4 * config.n_embd
    layer = 2 * T * width * (4 * width + 2 * inner) + _attention(T, T, width)
    return config.n_layer * layer + 2 * T * width * config.vocab_size


def _llama(config: Any, T: int, _: int) -> int:
    """Grouped keys and values, gated MLP. Also Mistral and Qwen2; a sliding window is counted as full attention."""
    width = config.hidden_size
    head = getattr(config, "head_dim", None) or width // config.num_attention_heads
    queries, keys = config.num_attention_heads * head, config.num_key_value_heads * head
    layer = 2 * T * width * (2 * queries + 2 * keys + 3 * config.intermediate_size) + _attention(T, T, queries)
    return config.num_hidden_layers * layer + 2 * T * width * config.vocab_size


def _gpt_neox(config: Any, T: int, _: int) -> int:
    width = config.hidden_size
    layer = 2 * T * width * (4 * width + 2 * config.intermediate_size) + _attention(T, T, width)
    return config.num_hidden_layers * layer + 2 * T * width * config.vocab_size


def _t5(config: Any, T: int, decoder_tokens: int) -> int:
    width, inner = config.d_model, config.num_heads * config.d_kv
    feed = (3 if config.is_gated_act else 2) * width * config.d_ff
    encoder = 2 * T * (4 * width * inner + feed) + _attention(T, T, inner)
    D = decoder_tokens
    decoder = 2 * D * (4 * width * inner + feed) + _attention(D, D, inner)
    crossed = 2 * D * 2 * width * inner + 2 * T * 2 * width * inner + _attention(D, T, inner)
    return config.num_layers * encoder + config.num_decoder_layers * (decoder + crossed) + 2 * D * width * config.vocab_size


_FORWARD: dict[str, Callable[[Any, int, int], int]] = {
    "gpt_bigcode": _gpt_bigcode,
    "gpt2": _gpt2,
    "llama": _llama,
    "mistral": _llama,
    "qwen2": _llama,
    "gpt_neox": _gpt_neox,
    "t5": _t5,
}
