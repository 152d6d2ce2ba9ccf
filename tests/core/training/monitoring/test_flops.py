"""Operations by formula against those that PyTorch counts, and the share of a peak."""

from typing import Any

import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode

from src.support.flops import forward_flops, training_flops
from src.training.monitoring import flops

TOLERANCE = 1e-3
"""Of forward and backward together. The forward pass is equal to the last operation."""
SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 96, "intermediate_size": 96}
GPT = {
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "vocab_size": 96,
    "n_positions": 64,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
T5 = {
    "decoder_start_token_id": 0,
    "d_model": 48,
    "d_kv": 8,
    "d_ff": 80,
    "num_layers": 2,
    "num_decoder_layers": 3,
    "num_heads": 4,
    "vocab_size": 96,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "bigcode multi query": ("GPTBigCode", {**GPT, "multi_query": True}),
    "bigcode multi head": ("GPTBigCode", {**GPT, "multi_query": False, "n_inner": 100}),
    "gpt2": ("GPT2", GPT),
    "llama": ("Llama", {**SMALL, "num_key_value_heads": 4}),
    "llama grouped": ("Llama", {**SMALL, "num_key_value_heads": 2, "head_dim": 32}),
    "mistral": ("Mistral", {**SMALL, "num_key_value_heads": 2}),
    "qwen2": ("Qwen2", {**SMALL, "num_key_value_heads": 2}),
    "neox": ("GPTNeoX", SMALL),
    "falcon multi query": ("Falcon", {**SMALL, "multi_query": True}),
    "falcon grouped": ("Falcon", {**SMALL, "new_decoder_architecture": True, "num_kv_heads": 2}),
    "codegen": ("CodeGen", {**GPT, "n_ctx": 64, "rotary_dim": 8}),
    "opt": ("OPT", {**SMALL, "ffn_dim": 96, "word_embed_proj_dim": 64}),
    "t5": ("T5", T5),
    "mt5": ("MT5", T5),
    "t5 gated": ("T5", {**T5, "feed_forward_proj": "gated-gelu"}),
}


def make_model(name: str) -> Any:
    family, sizes = MODELS[name]
    config = getattr(transformers, f"{family}Config")(**sizes)
    config._attn_implementation = "eager"  # PyTorch counts no backward of the fused one on a CPU
    head = "ForConditionalGeneration" if family.endswith("T5") else "LMHeadModel" if family == "GPT2" else "ForCausalLM"
    return getattr(transformers, f"{family}{head}")(config)


def batch_of(name: str) -> dict[str, torch.Tensor]:
    batch = {"input_ids": torch.randint(1, 96, (3, 40))}
    return {**batch, "labels": torch.randint(1, 96, (3, 24))} if "t5" in name else batch


@pytest.mark.parametrize("name", MODELS)
def test_the_formula_is_what_pytorch_counts(name: str):
    model, batch = make_model(name), batch_of(name)
    with FlopCounterMode(display=False) as counter:
        logits = model(**batch).logits
    assert forward_flops(model.config, *flops._lengths(batch)) == counter.get_total_flops()
    with FlopCounterMode(display=False) as backward:
        logits.sum().backward()
    both = counter.get_total_flops() + backward.get_total_flops()
    of_batch = flops.batch_flops(model)
    assert of_batch
    assert of_batch(batch) == pytest.approx(both, rel=TOLERANCE)


def test_by_hand():
    """One layer, one head, width 2, one token, vocabulary 3, inner width 8: 2·2·(2 + 4 + 2 + 16) + 4·2 + 2·2·3."""
    config = transformers.GPTBigCodeConfig(n_embd=2, n_layer=1, n_head=1, vocab_size=3)
    assert forward_flops(config, 1, 1) == 2 * 2 * 24 + 8 + 12
    assert training_flops(config, 1, 1) == 3 * 116


def test_a_frozen_part_and_an_unknown_model_have_no_count(caplog: pytest.LogCaptureFixture):
    caplog.set_level("INFO")
    model = make_model("gpt2")
    model.transformer.wpe.weight.requires_grad_(False)
    assert flops.batch_flops(model) is None
    assert flops.batch_flops(torch.nn.Linear(2, 2)) is None
    assert [record.message for record in caplog.records] == [
        "GPT2LMHeadModel: partly frozen, so MFU is not reported.",
        "Linear: FLOPs unknown, so MFU is not reported.",
    ]


@pytest.mark.parametrize(
    ("name", "precision", "rate"),
    [
        ("NVIDIA A100-SXM4-80GB", "bfloat16", 312e12),
        ("NVIDIA H100 80GB HBM3", "bfloat16", 989e12),
        ("NVIDIA H100 PCIe", "float16", 756e12),
        ("NVIDIA H100 NVL", "bfloat16", 835e12),
        ("NVIDIA H200", "bfloat16", 989e12),
        ("NVIDIA L4", "bfloat16", 121e12),
        ("NVIDIA L40S", "bfloat16", 362e12),
        ("Tesla V100-SXM2-16GB", "float16", 125e12),
        ("Tesla V100-PCIE-32GB", "float16", 112e12),
        ("Tesla V100-SXM2-16GB", "bfloat16", None),
        ("Tesla T4", "bfloat16", None),
        ("NVIDIA A100-SXM4-80GB", "float32", None),
        ("NVIDIA A1000", "bfloat16", None),
        ("", "bfloat16", None),
        ("NVIDIA A10G", "bfloat16", 70e12),
        ("NVIDIA GB200", "bfloat16", 2500e12),
        ("NVIDIA GeForce RTX 4090", "bfloat16", 165.2e12),
        ("NVIDIA RTX 6000 Ada Generation", "bfloat16", 364.2e12),
        ("h100 pcie", "bfloat16", 756e12),
    ],
)
def test_peaks_are_matched_by_complete_words(name: str, precision: str, rate: float | None):
    assert flops.peak_flops(name, precision) == rate


def test_mfu_is_a_share_of_all_devices():
    assert flops.mfu(312e12, 312e12, 2) == 0.5
