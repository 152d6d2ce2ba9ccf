"""Bytes that are kept per token of a context: the formulas give what the tensors have."""

from pathlib import Path

import pytest
import torch

from src.experiments.config import Places
from src.experiments.registry import MODELS, bind
from src.models import architecture
from src.models.architecture import Architecture
from src.models.kv_cache_size import cross_attention_bytes, decoder_bytes, numbers_per_token
from src.systems.crossattn.model.config import Config as CrossAttentionConfig

NOWHERE = Places(Path("nowhere"), Path("nowhere"))
FAMILIES = ["gpt2", "gpt_bigcode", "gpt_neox", "llama", "mistral", "qwen2"]


def nbytes(tensors) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@pytest.mark.parametrize(
    ("model_type", "wide"), [*((name, False) for name in FAMILIES), ("llama", True), ("mistral", True)]
)
def test_a_decoders_cache(base_of, model_type, wide):
    """4 layers of width 16 with 4 heads; 2 key/value heads in the Llama style, 1 in GPTBigCode. wide: heads of 6, not
    of 16 / 4."""
    base = base_of(model_type, **({"head_dim": 6} if wide else {}))
    cache = base(input_ids=torch.arange(3, 10)[None], use_cache=True).past_key_values
    live = nbytes(tensor for layer in cache.layers for tensor in (layer.keys, layer.values)) / 7
    heads = {"gpt_bigcode": 1, "llama": 2, "mistral": 2, "qwen2": 2}.get(model_type, 4)
    assert live == 4 * 2 * 4 * heads * (6 if wide else 4)
    assert decoder_bytes(architecture.from_dict(base.config.to_dict()), 4) == {"cache_bytes_per_context_token": live}


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"num_layers": 4, "stride": 1},
        {"shared_weights": True},
        {"hidden_size": 8, "num_heads": 2, "num_key_value_heads": 1},
        {"shared_projections": True, "num_key_value_heads": 4},
    ],
)
def test_cache_size_of_cross_attention(make, batch, tmp_path: Path, settings):
    model = make("llama", **settings)
    sizes = architecture.from_dict(model.base.config.to_dict())
    model.base.config.save_pretrained(tmp_path)
    base = bind(MODELS, {"name": "hf", "path": str(tmp_path)})
    config = CrossAttentionConfig(base=base, **{"num_layers": 2, "stride": 2, **settings})
    cache_sizes = config.cache_bytes(NOWHERE, model.base.dtype.itemsize)
    context = model.encode(batch["context_ids"], batch["context_mask"])
    positions = context.hidden.shape[0] * context.hidden.shape[1]
    with torch.no_grad(), model.reading(context):
        model.base(input_ids=batch["input_ids"])
        projected = nbytes(tensor for pair in model._reading.kv_cache.values() for tensor in pair)
    assert cache_sizes == {
        "cache_bytes_per_context_token": nbytes([context.hidden]) / positions,
        "projected_bytes_per_context_token": projected / positions,
        "decoder_cache_bytes_per_context_token": numbers_per_token(sizes) * 4,
    }


def test_sizes_of_published_models():
    """Llama-2-7B in half precision: 2 x 32 layers x 4096 numbers x 2 bytes are half a MiB a token; with cross-attention
    1/64 of it."""
    llama = Architecture("llama", num_layers=32, hidden_size=4096, num_heads=32, num_key_value_heads=32)
    assert decoder_bytes(llama, 2) == {"cache_bytes_per_context_token": 524_288}
    assert cross_attention_bytes(llama, 5, 2 * 1024, 2) == {
        "cache_bytes_per_context_token": 8_192,
        "projected_bytes_per_context_token": 5 * 2 * 1024 * 4,
        "decoder_cache_bytes_per_context_token": 524_288,
    }


def test_an_older_config_of_starcoder_has_one_key_value_head():
    """Its config.json says multi_query, and no number."""
    raw = {
        "model_type": "gpt_bigcode",
        "n_layer": 40,
        "n_embd": 6144,
        "n_head": 48,
        "multi_query": True,
        "n_positions": 8192,
    }
    sizes = architecture.from_dict(raw)
    assert sizes is not None
    assert (sizes.num_key_value_heads, numbers_per_token(sizes)) == (1, 2 * 40 * 128)


def test_unknown_sizes_have_no_cache():
    assert decoder_bytes(None, 4) is None
