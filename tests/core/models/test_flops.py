"""Operations of models with parts of their own, and of adapters, against those that PyTorch counts in a training
pass."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    GPTBigCodeConfig,
    GPTBigCodeForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from src.systems.crossattn.fusion_in_decoder.layers import FusionInDecoder
from src.systems.crossattn.model.config import Config
from src.systems.crossattn.model.layers import CrossAttentionLM
from src.training.monitoring.flops import batch_flops

EXACT, NEARLY = 1e-3, 0.03
"""NEARLY: adapters, whose first layer gives no gradients to its inputs."""
VOCABULARY, LAYERS = 96, 6


def bigcode() -> Any:
    return GPTBigCodeForCausalLM(
        GPTBigCodeConfig(n_embd=64, n_layer=LAYERS, n_head=4, vocab_size=VOCABULARY, n_positions=64)
    )


def llama() -> Any:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=LAYERS, vocab_size=VOCABULARY, **sizes))


def t5() -> Any:
    sizes = {"d_model": 48, "d_kv": 8, "d_ff": 80, "num_heads": 4, "decoder_start_token_id": 0}
    return T5ForConditionalGeneration(T5Config(num_layers=LAYERS, vocab_size=VOCABULARY, **sizes))


def eager(model: Any) -> Any:
    """PyTorch counts no backward of the fused attention on a CPU."""
    model.set_attn_implementation("eager")
    return model


def add_adapters(model: Any, names: list[str]) -> Any:
    from peft import LoraConfig, inject_adapter_in_model

    inject_adapter_in_model(LoraConfig(r=4, target_modules=names), model)
    return model


def reading(base: Callable[[], Any], adapters: list[str] | None = None, **settings: Any) -> Any:
    options = {"base": {"name": "hf", "path": "none"}, "num_layers": 2, "stride": 2, **settings}
    model = CrossAttentionLM(Config.model_validate(options), eager(base()))
    if adapters:
        add_adapters(model.base, adapters)
    return model


CROSS_ATTENTION_CASES: dict[str, tuple[Callable[[], Any], float]] = {
    "bigcode": (partial(reading, bigcode), EXACT),
    "llama, after the layers, one for all": (partial(reading, llama, final_layer=True, shared_weights=True), EXACT),
    "one matrix for queries and keys, narrow": (
        partial(reading, bigcode, shared_projections=True, hidden_size=32),
        EXACT,
    ),
    "base trained": (partial(reading, llama, train_all_params=True), EXACT),
    "adapters": (partial(reading, llama, ["q_proj", "down_proj"]), NEARLY),
}


def crossed_batch(encoded: bool) -> dict[str, torch.Tensor]:
    """Three questions with up to three chunks of unlike lengths, more than are encoded in one pass; or with encoded
    contexts."""
    lengths = torch.tensor([[20, 7, 3], [20, 12, 0], [1, 1, 20], [9, 9, 9]])
    mask = torch.arange(20) < lengths[..., None]
    batch = {"input_ids": torch.randint(1, VOCABULARY, (4, 12)), "attention_mask": torch.ones(4, 12).bool()}
    batch["loss_mask"] = (torch.arange(12) > 5).expand(4, 12)
    if encoded:
        return {**batch, "context_hidden": torch.randn(4, 60, 64), "context_mask": mask.flatten(1)}
    return {**batch, "context_ids": torch.randint(1, VOCABULARY, (4, 3, 20)), "context_mask": mask}


def count_flops(model: Any, batch: dict[str, torch.Tensor]) -> int:
    model.train()
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        output = model(**batch)
        (output if isinstance(output, torch.Tensor) else output.logits).sum().backward()
    return counter.get_total_flops()


def expected(model: Any, batch: dict[str, torch.Tensor]) -> int:
    of_batch = batch_flops(model)
    assert of_batch
    return of_batch(batch)


@pytest.mark.parametrize("encoded", [False, True])
@pytest.mark.parametrize("name", CROSS_ATTENTION_CASES)
def test_cross_attention(name: str, encoded: bool):
    make, tolerance = CROSS_ATTENTION_CASES[name]
    model, batch = make(), crossed_batch(encoded)
    assert expected(model, batch) == pytest.approx(count_flops(model, batch), rel=tolerance)


@pytest.mark.parametrize(("names", "tolerance"), [([], EXACT), (["q", "v", "wo"], NEARLY)])
def test_fusion_in_decoder(names: list[str], tolerance: float):
    base = eager(t5())
    model = FusionInDecoder(add_adapters(base, names) if names else base)
    mask = torch.arange(15) < torch.tensor([[15, 4, 1], [15, 0, 0]])[..., None]
    batch = {"context_ids": torch.randint(1, VOCABULARY, (2, 3, 15)), "context_mask": mask}
    batch |= {"input_ids": torch.randint(1, VOCABULARY, (2, 9)), "attention_mask": torch.ones(2, 9).bool()}
    assert expected(model, batch) == pytest.approx(count_flops(model, batch), rel=tolerance)


@pytest.mark.parametrize(
    ("base", "names"), [(llama, ["q_proj", "up_proj"]), (bigcode, ["c_attn"]), (t5, ["q", "k", "wi"])]
)
def test_adapters_in_a_frozen_model(base: Callable[[], Any], names: list[str]):
    model = add_adapters(eager(base()), names)
    batch = {"input_ids": torch.randint(1, VOCABULARY, (3, 20))}
    if base is t5:
        batch["decoder_input_ids"] = torch.randint(1, VOCABULARY, (3, 11))
    assert expected(model, batch) == pytest.approx(count_flops(model, batch), rel=NEARLY)
