"""A frozen base in 8 or 4 bits: small, near to what it was, and what stands around it learns."""

from typing import Any

import pytest
import torch

import src.models.hf
import src.models.load
from src.errors import ConfigError
from src.experiments.interfaces import load_experiment
from src.experiments.registry import MODELS, bind
from src.models.load import quantize, require_8bit
from src.support.weights import trained_weights
from tests.core.models.conftest import make_base

pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
DTYPES = {"8bit": "float16", "4bit": "float32"}


@pytest.fixture
def folder(tmp_path) -> str:
    make_base("llama", hidden_size=64, intermediate_size=128, initializer_range=0.1).save_pretrained(tmp_path / "base")
    return str(tmp_path / "base")


def around(folder: str, quantization: str, **settings: Any) -> dict[str, Any]:
    base = {"name": "hf", "path": folder, "dtype": DTYPES[quantization], "quantization": quantization}
    return {"name": "cross_attention", "num_layers": 2, "stride": 2, "base": base, **settings}


@pytest.mark.parametrize("quantization", DTYPES)
def test_it_is_small_and_near(folder: str, places, quantization: str):
    whole: Any = bind(MODELS, {"name": "hf", "path": folder}).build(places)
    part = bind(MODELS, around(folder, quantization)["base"])
    part.check(places)
    small: Any = part.build(places)
    matrix = [model.model.layers[0].mlp.up_proj.weight for model in (whole, small)]
    bits = matrix[1].numel() * matrix[1].element_size() * 8 / matrix[0].numel()
    assert bits == int(quantization[0])
    ids = torch.arange(3, 13).view(2, 5)
    with torch.no_grad():
        exact, near = whole(ids).logits, small(ids).logits.float()
    assert 0 < (near - exact).norm() / exact.norm() < (0.05 if quantization == "8bit" else 0.3)


@pytest.mark.parametrize("quantization", DTYPES)
def test_blocks_around_it_learn_and_it_does_not(folder: str, places, batch, quantization: str):
    torch.manual_seed(0)
    model: Any = bind(MODELS, around(folder, quantization)).build(places).train()
    assert all(name.startswith("blocks.") for name in trained_weights(model))
    model(**batch).float().square().mean().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.blocks.parameters())
    assert not any(p.requires_grad for p in model.base.parameters())


def test_training_quantized_weights_is_refused(folder: str, places, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(Exception, match="train_all_params: quantized weights cannot be trained"):
        bind(MODELS, around(folder, "4bit", train_all_params=True))
    exp = {"recipe": "lm", "seed": 0, "model": around(folder, "4bit")["base"], "data": {}, "loop": {}}
    exp["data"] = {"name": "text", "corpus": "c", "sequence_tokens": 8}
    exp["loop"] = {"steps": 1, "sequences_per_step": 1, "micro_batch": 1, "learning_rate": 1e-3, "eval_every": 1}
    with pytest.raises(ConfigError, match=r"a quantized model cannot be trained\. Wrap it in 'lora'"):
        load_experiment(exp, "quantized")
    monkeypatch.setattr(src.models.hf, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install -r requirements/bitsandbytes\.txt"):
        bind(MODELS, around(folder, "8bit")["base"]).check(places)


@pytest.mark.parametrize("has_adapters", [False, True])
def test_a_trained_model_is_quantized_with_its_adapters(folder: str, places, has_adapters: bool):
    config = {"name": "hf", "path": folder}
    lora = {"name": "lora", "rank": 2, "alpha": 4.0, "target_modules": ["q_proj"], "base": config}
    model: Any = bind(MODELS, lora if has_adapters else config).build(places).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.fill_(0.2)
        ids = torch.arange(3, 13).view(2, 5)
        plain: Any = bind(MODELS, config).build(places).eval()
        exact, other = model(ids).logits, plain(ids).logits
        small = quantize(model, "cpu")
        near = small(ids).logits.float()
    assert small.model.layers[0].mlp.up_proj.weight.dtype == torch.int8
    assert 0 < (near - exact).norm() / exact.norm() < 0.05
    assert ((near - other).norm() / exact.norm() > 0.1) == has_adapters
    with pytest.raises(ConfigError, match="--8bit: the model is already quantized"):
        quantize(small, "cpu")
    with pytest.raises(ConfigError, match="--device: 'cuda:99' cannot be used"):
        quantize(plain, "cuda:99")


def test_8_bits_need_a_gpu_and_their_package(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="--8bit: needs a GPU"):
        require_8bit(None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ConfigError, match="needs a GPU"):
        require_8bit("cpu")
    assert require_8bit(None) == "cuda"
    assert require_8bit("cuda:1") == "cuda:1"
    monkeypatch.setattr(src.models.load, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"--8bit: needs .*pip install -r requirements/bitsandbytes\.txt"):
        require_8bit(None)
