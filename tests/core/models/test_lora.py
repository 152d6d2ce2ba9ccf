"""Adapters alone are trained and saved, the base keeps its bits, and merged they give the same model."""

import copy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoTokenizer

from src.errors import ConfigError
from src.experiments.config import Places, Problems
from src.experiments.interfaces import ModelConfig
from src.experiments.registry import MODELS, bind, resolved_dict
from src.files import new_directory, write_json
from src.models import lora
from src.runs.checkpoints import checkpoints
from src.support.weights import load_trained, trained_weights
from tests.conftest import ROOT
from tests.core.models.conftest import make_base

GPT = {
    "name": "gpt_bigcode",
    "tokenizer": "tokenizer",
    "hidden_size": 16,
    "num_layers": 2,
    "num_heads": 4,
    "max_positions": 32,
}
LORA = {"name": "lora", "rank": 2, "alpha": 8, "target_modules": ["c_attn", "c_fc"], "base": GPT}
PARENT = "0123456789abcdef0123456789abcdef"
IDS = torch.arange(3, 13).view(2, 5)

DECODERS = [family for family in lora.MATRICES if family not in ("longt5", "t5")]  # of that: test_t5.py


@pytest.mark.slow
def test_no_other_package_speaks_where_adapters_are_loaded():
    pytest.importorskip("bitsandbytes")
    command = [sys.executable, "-c", "import src.models.lora, peft; peft.inject_adapter_in_model"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def part(**changes: Any) -> ModelConfig:
    return bind(MODELS, {**LORA, **changes})


def pretrained(model_type: str, folder: Path) -> dict[str, str]:
    make_base(model_type).save_pretrained(folder)
    return {"name": "hf", "path": str(folder)}


def with_random_adapters(model: torch.nn.Module) -> torch.nn.Module:
    """The trained weights after something was learned."""
    generator = torch.Generator().manual_seed(3)
    for tensor in trained_weights(model).values():
        tensor += torch.randn(tensor.shape, generator=generator) / 8
    return model.eval()


@pytest.mark.parametrize("model_type", DECODERS)
def test_the_matrices_of_each_family_are_those_that_a_model_has(model_type: str):
    names = {name.rpartition(".")[2] for name, _ in lora._matrices(make_base(model_type))}
    assert names == set(lora.MATRICES[model_type])


@pytest.mark.parametrize("model_type", DECODERS)
def test_only_adapters_learn_and_initially_change_nothing(model_type: str, tmp_path: Path, places):
    name = lora.MATRICES[model_type][0]
    model = (
        bind(MODELS, {**LORA, "target_modules": [name], "base": pretrained(model_type, tmp_path / "m")})
        .build(places)
        .eval()
    )
    base = make_base(model_type)
    assert torch.equal(model(IDS).logits, base(IDS).logits)
    before = copy.deepcopy(model.state_dict())
    trained = trained_weights(model)
    assert trained
    assert all(f".{name}.lora_" in key for key in trained)
    matrices = [module.weight for key, module in base.named_modules() if key.endswith(f".{name}")]
    assert sum(tensor.numel() for tensor in trained.values()) == sum(
        2 * (rows + columns) for rows, columns in (m.shape for m in matrices)
    )

    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for _ in range(2):
        model(IDS, labels=IDS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    after = model.state_dict()
    assert {key for key in after if not torch.equal(after[key], before[key])} == set(trained)


def test_an_adapter_adds_alpha_over_rank_times_the_product(places):
    torch.manual_seed(0)
    model: Any = with_random_adapters(part().build(places))
    layer = model.transformer.h[1].mlp.c_fc
    x = torch.randn(3, 16)
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    torch.testing.assert_close(layer(x), layer.base_layer(x) + 8 / 2 * x @ a.T @ b.T)


def test_adapters_follow_from_the_seed(places):
    states = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        states.append(trained_weights(part().build(places)))
    same = [all(torch.equal(states[0][key], other[key]) for key in other) for other in states[1:]]
    assert same == [True, False]


def test_adapters_of_a_half_precision_base_are_float32(tmp_path: Path, places):
    base = {**pretrained("llama", tmp_path / "m"), "dtype": "bfloat16"}
    model = part(target_modules=["q_proj"], base=base).build(places)
    assert {tensor.dtype for tensor in trained_weights(model).values()} == {torch.float32}
    assert model(IDS).logits.dtype == torch.bfloat16


def test_dropout_acts_only_in_training(places):
    model: Any = with_random_adapters(part(dropout_rate=0.5).build(places))
    assert torch.equal(model(IDS).logits, model(IDS).logits)
    model.train()
    assert not torch.equal(model(IDS).logits, model(IDS).logits)


@pytest.mark.parametrize("model_type", ["gpt2", "gpt_bigcode", "llama"])
def test_merged_it_is_a_plain_model_that_says_the_same(model_type: str, tmp_path: Path, places):
    names = list(lora.MATRICES[model_type])
    model: Any = with_random_adapters(
        part(target_modules=names, base=pretrained(model_type, tmp_path / "m")).build(places)
    )
    expected, text = model(IDS).logits, model.generate(IDS, max_new_tokens=8, do_sample=False)
    assert lora.merge(model) == 4 * sum(
        key.startswith(_layer(model_type, 0)) for key, _ in lora._matrices(make_base(model_type))
    )
    base = make_base(model_type)
    assert model.state_dict().keys() == base.state_dict().keys()
    assert not torch.allclose(base(IDS).logits, expected, atol=1e-2)
    torch.testing.assert_close(model(IDS).logits, expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(model.generate(IDS, max_new_tokens=8, do_sample=False), text)
    assert lora.merge(model) == 0


def _layer(model_type: str, index: int) -> str:
    return f"{'model.layers' if model_type == 'llama' else 'transformer.h'}.{index}."


def test_around_cross_attention_the_blocks_are_trained_and_the_decoder_adapted(places, batch):
    crossing = {"name": "cross_attention", "num_layers": 1, "stride": 1, "base": GPT}
    model: Any = with_random_adapters(part(base=crossing).build(places))
    names = set(trained_weights(model))
    adapters = {name for name in names if ".lora_" in name}
    assert adapters
    assert all(name.startswith("base.transformer.h.") for name in adapters)
    assert names - adapters == {f"blocks.{name}" for name, _ in model.blocks.named_parameters()}
    model.train()
    model(**batch).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters() if parameter.requires_grad)
    model.eval()
    prompts = {**batch, "input_ids": batch["input_ids"].flip(1), "attention_mask": batch["attention_mask"].flip(1)}
    text = model.generate(**prompts, max_new_tokens=4, do_sample=False)
    assert lora.merge(model) == 4, "two layers of two matrices"
    assert torch.equal(model.generate(**prompts, max_new_tokens=4, do_sample=False), text)


def test_a_checkpoint_of_adapters_is_loaded_again(tmp_path: Path, places):
    torch.manual_seed(0)
    model = with_random_adapters(part().build(places))
    save_file(trained_weights(model), tmp_path / "model.safetensors")
    torch.manual_seed(0)
    other = part().build(places).eval()
    load_trained(other, tmp_path / "model.safetensors")
    assert torch.equal(other(IDS).logits, model(IDS).logits)


def write_parent(places) -> Any:
    """A finished run whose model has learned adapters; returns that model."""
    torch.manual_seed(0)
    base = make_base("llama")
    base.save_pretrained(places.data / "llama")
    raw = {**LORA, "target_modules": ["q_proj"], "base": {"name": "hf", "path": str(places.data / "llama")}}
    model = with_random_adapters(bind(MODELS, raw).build(places))
    with new_directory(checkpoints.folder(places.runs / PARENT, 4)) as folder:
        save_file(trained_weights(model), folder / "model.safetensors")
        write_json(folder / "model.json", resolved_dict(bind(MODELS, raw)))
        (folder / "tokenizer").mkdir()
    write_json(places.runs / PARENT / "exp_dict.json", {"recipe": "lm", "model": raw})
    write_json(places.runs / PARENT / "status.json", {"state": "done", "step": 4})
    return model


def test_a_child_starts_from_a_parents_adapters(places):
    parent = write_parent(places)
    child = {"name": "experiment", "exp_id": PARENT}
    goes_on: Any = bind(MODELS, child).build(places).eval()
    assert trained_weights(goes_on).keys() == trained_weights(parent).keys()
    assert torch.equal(goes_on(IDS).logits, parent(IDS).logits)

    again = bind(MODELS, {**LORA, "target_modules": ["v_proj"], "base": child})
    again.check(places)
    anew: Any = again.build(places).eval()
    assert all(".v_proj.lora_" in name for name in trained_weights(anew)), (
        "the parent's adapters are part of the base now"
    )
    torch.testing.assert_close(anew(IDS).logits, parent(IDS).logits, rtol=1e-5, atol=1e-5)

    crossing: Any = bind(MODELS, {"name": "cross_attention", "num_layers": 1, "stride": 1, "base": child}).build(places)
    assert all(name.startswith("blocks.") for name in trained_weights(crossing))


def test_a_name_that_no_matrix_has_is_refused_before_and_while_building(places, tmp_path: Path):
    wrong = part(target_modules=["c_attn", "q_proj"])
    message = r"model\.target_modules: unknown matrix of the base 'q_proj'\..* Known: c_attn, c_fc, c_proj\."
    with pytest.raises(ConfigError, match=message):
        wrong.check(places)
    with pytest.raises(ConfigError, match=message):
        wrong.build(places)
    with pytest.raises(ConfigError, match="'lm_head'"):
        part(target_modules=["lm_head"]).build(places)


@pytest.mark.parametrize(
    ("changes", "path", "message"),
    [
        ({"base": LORA}, "", "base: adapters cannot be nested"),
        ({"target_modules": []}, "target_modules", "expected a list that is not empty"),
        ({"rank": 0}, "rank", "expected a number > 0, got 0"),
        (
            {"dropout_rate": 0.1, "base": {"name": "cross_attention", "num_layers": 1, "stride": 1, "base": GPT}},
            "",
            "dropout_rate: ignored in the decoder of a cross-attention model",
        ),
    ],
)
def test_ignored_settings_are_refused(changes: dict[str, Any], path: str, message: str):
    with pytest.raises(Problems) as error:
        part(**changes)
    assert error.value.problems[0][0] == path
    assert message in error.value.problems[0][1]


def test_adapters_below_a_cross_attention_model_are_refused():
    with pytest.raises(
        Problems, match=r"it is frozen, so new adapters in it would not be trained\. Wrap 'cross_attention' in 'lora'"
    ):
        bind(MODELS, {"name": "cross_attention", "num_layers": 1, "stride": 1, "base": LORA})


def test_names_and_sizes_are_the_bases(places):
    assert part().architecture(places) == bind(MODELS, GPT).architecture(places)
    assert part().build(places).name_or_path == str(places.data / "tokenizer")


def test_fingerprint_is_of_the_base(tmp_path: Path, places):
    base = pretrained("llama", tmp_path / "m")
    assert part(target_modules=["q_proj"], base=base).fingerprint(places) == bind(MODELS, base).fingerprint(places)


@pytest.mark.parametrize("model_type", ["gpt2", "llama"])  # the output matrix is the embedding, and is not
def test_only_embedding_rows_of_extra_tokens_are_learned(model_type: str, tmp_path: Path, places: Places):
    tokenizer = AutoTokenizer.from_pretrained(places.data / "tokenizer")
    make_base(model_type, vocab_size=len(tokenizer)).save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    names = ["c_attn"] if model_type == "gpt2" else ["q_proj"]
    base = {"name": "hf", "path": str(tmp_path / "base"), "extra_tokens": ["<a>", "<b>"]}
    config = part(base=base, target_modules=names)
    torch.manual_seed(0)
    model = config.build(places).train()
    old, ids = len(tokenizer), torch.tensor([[3, len(tokenizer), 4, len(tokenizer) + 1, 5]])
    before = {name: weight.clone() for name, weight in merged(model).state_dict().items()}
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
    for _ in range(2):
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
    after, whole = merged(model).state_dict(), merged(model).eval()(ids).logits
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    tables = (
        {"transformer.wte.weight", "lm_head.weight"}
        if model_type == "gpt2"
        else {"model.embed_tokens.weight", "lm_head.weight"}
    )
    assert changed - tables == {name for name in before if name.split(".")[-2] in names and name.endswith("weight")}
    assert changed >= tables
    for name in tables:
        assert torch.equal(before[name][:old], after[name][:old])
        assert not (before[name][old:] == after[name][old:]).all(dim=1).any()
    assert torch.allclose(whole, model.eval()(ids).logits, atol=1e-5)

    saved = {name: weight.clone() for name, weight in trained_weights(model).items()}
    assert sum("token" in name for name in saved) == (1 if model_type == "gpt2" else 2)
    save_file(saved, tmp_path / "model.safetensors")
    torch.manual_seed(1)
    again = config.build(places)
    load_trained(again, tmp_path / "model.safetensors")
    assert torch.equal(again.eval()(ids).logits, model(ids).logits)


def merged(model: torch.nn.Module) -> Any:
    merged_model = copy.deepcopy(model)
    assert lora.merge(merged_model)
    return merged_model
