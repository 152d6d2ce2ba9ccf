"""A T5 under masks of its own for encoder, decoder and the view between them, beside a plain T5 v1.1 written here."""

import copy
from typing import Any

import pytest
import torch
from torch.nn.functional import gelu
from transformers import T5Config, T5ForConditionalGeneration

from src.experiments.config import Places, load
from src.systems.t5.model import config
from src.systems.t5.model.masks import accept

B, S, T, D, HEADS, VOCABULARY = 3, 7, 6, 16, 4, 23


def make(attention="sdpa"):
    """Two layers on each side, with weights of a visible size. Of seven positions, each distance has a bucket of its
    own."""
    torch.manual_seed(0)
    sizes = {
        "vocab_size": VOCABULARY,
        "d_model": D,
        "d_kv": 5,
        "d_ff": 24,
        "num_layers": 2,
        "num_heads": HEADS,
        "dropout_rate": 0.0,
    }
    ids = {"pad_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 0, "feed_forward_proj": "gated-gelu"}
    settings: Any = {**sizes, **ids, "tie_word_embeddings": False, "attn_implementation": attention}
    model: Any = T5ForConditionalGeneration(T5Config(**settings))
    model.lm_head.weight = torch.nn.Parameter(torch.randn(VOCABULARY, D))  # transformers ties it all the same
    for parameter in model.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    return model.eval()


@pytest.fixture
def batch():
    generator = torch.Generator().manual_seed(1)
    masks = {
        name: torch.rand(shape, generator=generator) < 0.5
        for name, shape in (("e", (B, S, S)), ("d", (B, T, T)), ("c", (B, T, S)))
    }
    masks["e"] |= torch.eye(S, dtype=torch.bool)
    masks["d"] = (masks["d"] | torch.eye(T, dtype=torch.bool)).tril()
    masks["c"][:, :, 0] |= ~masks["c"].any(2)
    return {
        "input_ids": torch.randint(3, VOCABULARY, (B, S), generator=generator),
        "decoder_input_ids": torch.randint(3, VOCABULARY, (B, T), generator=generator),
        "attention_mask": masks["e"][:, None],
        "decoder_attention_mask": masks["d"][:, None],
        "cross_attention_mask": masks["c"][:, None],
    }


def plain(model, batch):
    """Logits of T5 v1.1 (Raffel et al. 2020, and the release notes of v1.1), from the weights alone."""
    w = dict(model.named_parameters())

    def norm(x, name):
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * w[f"{name}.weight"]

    def attention(x, source, name, mask, bias):
        q, k, v = (
            (y @ w[f"{name}.{m}.weight"].T).unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for y, m in ((x, "q"), (source, "k"), (source, "v"))
        )
        shares = (q @ k.transpose(2, 3) + bias).masked_fill(~mask, -torch.inf).softmax(-1)
        return (shares @ v).transpose(1, 2).flatten(2) @ w[f"{name}.o.weight"].T

    def bias(side, length):
        distance = torch.arange(length) - torch.arange(length)[:, None]  # how far behind the token that looks
        bucket = torch.where(distance > 0, 16 + distance, -distance) if side == "encoder" else (-distance).clamp(min=0)
        return w[f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"][bucket].permute(2, 0, 1)

    def stack(side, ids, mask, encoded=None):
        x = w["shared.weight"][ids]
        for n in range(2):
            block = f"{side}.block.{n}.layer"
            y = norm(x, f"{block}.0.layer_norm")
            x = x + attention(y, y, f"{block}.0.SelfAttention", mask, bias(side, ids.shape[1]))
            if encoded is not None:
                y = norm(x, f"{block}.1.layer_norm")
                x = x + attention(y, encoded, f"{block}.1.EncDecAttention", batch["cross_attention_mask"], 0.0)
            last = 1 if encoded is None else 2
            y, dense = norm(x, f"{block}.{last}.layer_norm"), f"{block}.{last}.DenseReluDense"
            gated = gelu(y @ w[f"{dense}.wi_0.weight"].T, approximate="tanh") * (y @ w[f"{dense}.wi_1.weight"].T)
            x = x + gated @ w[f"{dense}.wo.weight"].T
        return norm(x, f"{side}.final_layer_norm")

    encoded = stack("encoder", batch["input_ids"], batch["attention_mask"])
    return (
        stack("decoder", batch["decoder_input_ids"], batch["decoder_attention_mask"], encoded) @ w["lm_head.weight"].T
    )


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_logits_and_gradients_are_those_of_a_plain_model(batch, attention):
    model = make(attention)
    accept(model)
    expected, logits = plain(model, batch), model(**batch, use_cache=False).logits
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    weights = dict(model.named_parameters())
    weights.pop("encoder.embed_tokens.weight", None)
    gradients = [
        torch.autograd.grad((y * y.detach().sin()).sum(), list(weights.values()), allow_unused=True)
        for y in (expected, logits)
    ]
    for name, mine, other in zip(weights, *gradients, strict=True):
        assert mine is not None, name
        torch.testing.assert_close(other, mine, rtol=1e-3, atol=1e-3 * float(mine.abs().max()))


def test_each_mask_matters(batch):
    model = make()
    accept(model)
    logits = model(**batch).logits
    for name in ("attention_mask", "decoder_attention_mask", "cross_attention_mask"):
        assert not torch.allclose(model(**{**batch, name: torch.ones_like(batch[name])}).logits, logits, atol=1e-2)


def test_other_calls_are_as_before(batch):
    model = make()
    changed = copy.deepcopy(model)
    accept(changed)
    ids = {name: batch[name] for name in ("input_ids", "decoder_input_ids")}
    for mask in (None, torch.arange(S) < torch.tensor([7, 5, 3])[:, None]):
        assert torch.equal(changed(**ids, attention_mask=mask).logits, model(**ids, attention_mask=mask).logits)
    outputs = [
        m.generate(batch["input_ids"], max_new_tokens=5, do_sample=False).tolist()
        for m in (model, changed, copy.deepcopy(changed))
    ]
    assert outputs[0] == outputs[1] == outputs[2]


def test_under_gradient_checkpointing_and_autocast(batch):
    model = make()
    accept(model)
    expected = model(**batch, use_cache=False).logits
    model.activation_checkpointing_enable()
    torch.testing.assert_close(model.train()(**batch, use_cache=False).logits, expected)
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(**batch, use_cache=False).logits
    assert (logits.float() - expected).abs().mean() < 0.05 * expected.abs().mean()


def test_every_t5_that_is_built_takes_them(places: Places, batch):
    sizes = {"tokenizer": "tokenizer", "hidden_size": 16, "feed_forward_size": 24, "num_layers": 1, "num_heads": 4}
    model = load(config.Config, {"random": sizes}, "model").build(places)
    assert not torch.equal(
        model(**batch).logits,
        model(**{**batch, "cross_attention_mask": torch.ones_like(batch["cross_attention_mask"])}).logits,
    )
