"""Dropout behind the parts of a layer, frozen layers, and scaled rotary positions, in every family that the presets
name."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from src.errors import ConfigError
from src.experiments.config import Places, Problems
from src.experiments.registry import MODELS, bind
from src.models.hf import RotaryScaling
from src.support.weights import trained_weights

GPT = {"n_embd": 16, "n_layer": 3, "n_head": 2, "n_positions": 64}
LLAMA = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
}
SIZES: dict[str, dict[str, Any]] = {
    "gpt2": GPT,
    "gptj": {**GPT, "rotary_dim": 4},
    "codegen": {**GPT, "n_head": 4, "rotary_dim": 4},
    "gpt_neox": LLAMA,
    "llama": LLAMA,
    "falcon": {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2},
    "opt": {
        "hidden_size": 16,
        "ffn_dim": 24,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "word_embed_proj_dim": 16,
    },
    "bloom": {"hidden_size": 16, "n_layer": 3, "n_head": 2},
}
QUIET = {
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "dropout": 0.0,
    "attn_pdrop": 0.0,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
}
RANDOM = {
    "name": "gpt_bigcode",
    "tokenizer": "t",
    "hidden_size": 8,
    "num_layers": 2,
    "num_heads": 1,
    "max_positions": 8,
}
EVERY = pytest.mark.parametrize("family", SIZES)
IDS = torch.arange(12)[None] % 31


def saved(folder: Path, family: str) -> dict[str, Any]:
    """The part of an experiment that names a tiny model of a family, which is in `folder`."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 31, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 1, **QUIET, **SIZES[family]}
    config = transformers.AutoConfig.for_model(family, **sizes)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder / family)
    return {"name": "hf", "path": str(folder / family)}


def build(raw: dict[str, Any], folder: Path) -> Any:
    return bind(MODELS, raw).build(Places(folder, folder))


@EVERY
def test_dropout_only_affects_training(family: str, tmp_path: Path):
    base = saved(tmp_path, family)
    plain, dropped = (
        build(base, tmp_path),
        build({"name": "regularized", "base": base, "residual_dropout": 0.5}, tmp_path),
    )
    assert torch.equal(plain.eval()(IDS).logits, dropped.eval()(IDS).logits)
    assert plain.state_dict().keys() == dropped.state_dict().keys()
    assert torch.equal(plain.train()(IDS).logits, plain(IDS).logits)
    assert not torch.equal(dropped.train()(IDS).logits, dropped(IDS).logits)


@EVERY
def test_the_first_layers_and_the_embeddings_are_not_trained(family: str, tmp_path: Path):
    base = saved(tmp_path, family)
    model = build({"name": "regularized", "base": base, "frozen_layers": 2, "frozen_embeddings": True}, tmp_path)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert {part for name in trained for part in name.split(".") if part.isdigit()} == {"2"}
    assert not [
        name
        for name in trained
        if any(word in name for word in ("embed_in", "embed_tokens", "embed_positions", "wte", "wpe"))
    ]
    assert trained == trained_weights(model).keys() & dict(model.named_parameters()).keys()
    whole = build({"name": "regularized", "base": base, "frozen_layers": 2}, tmp_path)
    assert whole.get_input_embeddings().weight.requires_grad


def test_growing_dropout_rises_from_zero_to_the_full_rate(tmp_path: Path):
    part = {
        "name": "regularized",
        "base": saved(tmp_path, "llama"),
        "residual_dropout": 0.3,
        "dropout_by_layer": "growing",
    }
    assert bind(MODELS, part).dropout_rates(3) == pytest.approx([0.0, 0.15, 0.3])
    model = build(part, tmp_path).train()
    drops = [[], [], []]
    for number, layer in enumerate(model.model.layers):
        layer.mlp.register_forward_hook(
            lambda *args, rates=drops[number]: rates.append(float((args[2] == 0).float().mean()))
        )
    for _ in range(40):
        model(IDS)
    assert [sum(rates) / len(rates) for rates in drops] == pytest.approx([0.0, 0.15, 0.3], abs=0.03)


def test_settings_without_effect_are_refused(tmp_path: Path):
    base = saved(tmp_path, "llama")
    for wrong, message in (
        ({}, "expected residual_dropout, frozen_layers or frozen_embeddings"),
        ({"dropout_by_layer": "growing", "frozen_layers": 1}, "'growing' needs residual_dropout"),
        ({"frozen_layers": 1, "base": RANDOM}, "its weights are random"),
        ({"frozen_embeddings": True, "base": {**base, "extra_tokens": ["<a>"]}}, "would not be learned"),
    ):
        with pytest.raises(Problems, match=message):
            bind(MODELS, {"name": "regularized", "base": base, **wrong})
    with pytest.raises(ConfigError, match="3 of 3 layers leave none to train"):
        bind(MODELS, {"name": "regularized", "base": base, "frozen_layers": 3}).check(Places(tmp_path, tmp_path))


@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
def test_linear_scaling_divides_positions(family: str, tmp_path: Path):
    base = saved(tmp_path, family)
    part = {**base, "rope": {"kind": "linear", "factor": 2.0}}
    plain, scaled = build(base, tmp_path).eval(), build(part, tmp_path).eval()
    positions = torch.arange(12)[None]
    assert torch.allclose(
        plain(IDS, position_ids=positions).logits, scaled(IDS, position_ids=2 * positions).logits, atol=1e-5
    )
    assert not torch.allclose(plain(IDS).logits, scaled(IDS).logits, atol=1e-4)
    places = Places(tmp_path, tmp_path)
    assert (bind(MODELS, base).longest_sequence(places), bind(MODELS, part).longest_sequence(places)) == (64, 128)
    scaled.save_pretrained(tmp_path / "again")
    again = build({"name": "hf", "path": str(tmp_path / "again")}, tmp_path).eval()
    assert torch.equal(again(IDS).logits, scaled(IDS).logits)


def test_ntk_scaling_multiplies_the_base_of_the_frequencies(tmp_path: Path):
    """The example of the specification: base 10,000, twice as many tokens, 64 wide."""
    config = transformers.LlamaConfig(hidden_size=128, num_attention_heads=2, max_position_embeddings=64)
    RotaryScaling(kind="ntk", factor=2.0).apply(config)
    assert config.rope_parameters["rope_theta"] == pytest.approx(20452.23, abs=0.01)
    assert config.max_position_embeddings == 128
    with pytest.raises(ConfigError, match="no single kind of rotary positions"):
        bind(MODELS, {**saved(tmp_path, "gpt2"), "rope": {"kind": "linear", "factor": 2.0}}).check(
            Places(tmp_path, tmp_path)
        )
