"""Packed documents do not read each other: logits and gradients of a packed row are those of its documents alone."""

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from src.data import collate
from src.data.packing.dataset import ATTENTIONS, FAMILIES
from src.models.lora import MATRICES
from src.training.loss import causal_lm_loss
from src.training.parallel.memory import checkpoint_layers

GPT = {
    "n_embd": 16,
    "n_layer": 2,
    "n_head": 2,
    "n_positions": 64,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}
LLAMA = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
}
SIZES: dict[str, dict[str, Any]] = {
    "gpt2": GPT,
    "gpt_bigcode": GPT,
    "gpt_neox": LLAMA,
    "llama": {**LLAMA, "num_key_value_heads": 1},
    "mistral": {**LLAMA, "num_key_value_heads": 1, "sliding_window": 5},
    "qwen2": {
        **LLAMA,
        "num_key_value_heads": 1,
        "use_sliding_window": True,
        "sliding_window": 5,
        "max_window_layers": 1,
    },
}
ROWS = [[9, 1, 5, 12], [3, 2], [27], [1, 1, 8]]
"""Tokens of the documents of each row; most rows are padded."""
EVERY = pytest.mark.parametrize("family", FAMILIES)


def build(family: str, attention: str) -> Any:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(
        family, vocab_size=31, bos_token_id=0, eos_token_id=0, pad_token_id=0, **SIZES[family]
    )
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention)


def documents() -> list[list[list[int]]]:
    draw = torch.Generator().manual_seed(1)
    return [[torch.randint(1, 31, (n,), generator=draw).tolist() for n in row] for row in ROWS]


def packed_batch() -> Any:
    rows = documents()
    masks = [[i > 0 for document in row for i in range(len(document))] for row in rows]
    return collate.pack_tokens(
        [[token for document in row for token in document] for row in rows], masks, ROWS, pad_id=0, length=27
    )


def batch_of(document: list[int]) -> Any:
    return collate.pad_tokens([document], [[False] + [True] * (len(document) - 1)], 0)


def gradients(model: nn.Module, loss: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad], materialize_grads=True))


def largest(pairs: Any) -> float:
    return max(float((a - b).abs().max()) for a, b in pairs)


def test_every_decoder_family_with_adapters_was_tested():
    assert set(FAMILIES) == set(MATRICES) - {"t5", "longt5"}
    assert SIZES.keys() == set(FAMILIES)


@EVERY
@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_packed_documents_have_the_same_gradients_as_unpacked(family: str, attention: str, checkpointing: bool):
    model, batch = build(family, attention).train(), packed_batch()
    if checkpointing:
        checkpoint_layers(model)
    assert model.config._attn_implementation == attention
    logits: list[Tensor] = []
    model.register_forward_hook(lambda _, __, output: logits.append(output.logits.detach()))
    together = gradients(model, causal_lm_loss(model, batch))
    packed, *_ = logits
    alone = [torch.zeros_like(gradient) for gradient in together]
    for row, tokens in enumerate(documents()):
        offset = 0
        for document in tokens:
            logits.clear()
            parts = gradients(model, causal_lm_loss(model, batch_of(document)))
            alone = [a + b for a, b in zip(alone, parts, strict=True)]
            assert largest([(packed[row, offset : offset + len(document)], logits[0][0])]) < 1e-5
            offset += len(document)
    assert max(float(gradient.abs().max()) for gradient in together) > 0.1
    assert largest(zip(together, alone, strict=True)) < 1e-5


@EVERY
@pytest.mark.parametrize("attention", ATTENTIONS)
@torch.no_grad()
def test_documents_read_each_other_if_a_mask_is_passed_with_positions(family: str, attention: str):
    """Why `causal_lm_loss` passes none. If this fails, transformers has mended it."""
    model, batch = build(family, attention), packed_batch()
    inputs = {"input_ids": batch["input_ids"], "position_ids": batch["position_ids"], "use_cache": False}
    separate, with_mask = model(**inputs).logits, model(**inputs, attention_mask=batch["attention_mask"].long()).logits
    assert largest([(separate[0, 9:], with_mask[0, 9:])]) > 1e-3
