"""What is exported is loaded by transformers alone, and says what the trained model says."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from src.errors import CheckpointError
from src.experiments.registry import MODELS, bind, resolved_dict
from src.files import new_directory, write_json
from src.models.export import main
from src.models.load import load
from src.runs.checkpoints import checkpoints
from src.support.weights import trained_weights

GPT = {
    "name": "gpt_bigcode",
    "tokenizer": "tokenizer",
    "hidden_size": 16,
    "num_layers": 2,
    "num_heads": 4,
    "max_positions": 32,
}
ADAPTERS = {"name": "lora", "rank": 2, "alpha": 8.0, "target_modules": ["c_attn", "c_fc"], "base": {"name": "hf"}}
IDS = torch.arange(3, 13).view(2, 5)


def trained(raw: dict[str, Any], places, step: int) -> Any:
    """A checkpoint of `raw` with weights that were moved; returns the model."""
    model: Any = bind(MODELS, raw).build(places)
    generator = torch.Generator().manual_seed(step)
    for tensor in trained_weights(model).values():
        tensor += torch.randn(tensor.shape, generator=generator) / 8
    with new_directory(checkpoints.folder(places.runs / "run", step)) as folder:
        save_file(trained_weights(model), folder / "model.safetensors")
        write_json(folder / "model.json", resolved_dict(bind(MODELS, raw)))
        shutil.copytree(places.data / "tokenizer", folder / "tokenizer")
    return model.eval()


def run(places, *words: object) -> int:
    return main([*map(str, words), "--data_path", str(places.data), "-sb", str(places.runs)])


@pytest.mark.parametrize("has_adapters", [False, True])
def test_transformers_loads_it(has_adapters: bool, places, tmp_path: Path):
    bind(MODELS, GPT).build(places).save_pretrained(tmp_path / "base")
    raw = {**ADAPTERS, "base": {"name": "hf", "path": str(tmp_path / "base")}} if has_adapters else GPT
    trained(raw, places, 2)
    model = trained(raw, places, 4)
    assert run(places, places.runs / "run", tmp_path / "out") == 0, "the newest"
    loaded, report = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(report.values())
    torch.testing.assert_close(loaded.eval()(IDS).logits, model(IDS).logits, rtol=1e-5, atol=1e-5)
    assert len(AutoTokenizer.from_pretrained(tmp_path / "out")) == model.config.vocab_size

    assert run(places, checkpoints.folder(places.runs / "run", 2), tmp_path / "earlier", "--dtype", "bfloat16") == 0
    earlier = AutoModelForCausalLM.from_pretrained(tmp_path / "earlier")
    assert earlier.dtype == torch.bfloat16
    assert not torch.allclose(earlier.eval()(IDS).logits.float(), model(IDS).logits, atol=1e-2)


def test_mean_of_checkpoints(places, tmp_path: Path):
    models = {step: trained(GPT, places, step) for step in (2, 4, 6)}
    run_folder = places.runs / "run"
    for name, steps, options in (
        ("last", (4, 6), ["--average_last", 2]),
        ("named", (2, 6), ["--average_steps", 6, 2]),
    ):
        assert run(places, run_folder, tmp_path / name, *options) == 0
        weights = AutoModelForCausalLM.from_pretrained(tmp_path / name).state_dict()
        expected = [trained_weights(models[step]) for step in steps]
        for key in expected[0]:
            torch.testing.assert_close(weights[key], (expected[0][key] + expected[1][key]) / 2)


@pytest.mark.parametrize(
    ("options", "value"),
    [
        (["--average_last", 3], "3"),
        (["--average_last", 0], "0"),
        (["--average_steps", 2, 3], "step-00000003"),
        (["--ema"], "ema.safetensors"),
    ],
)
def test_a_missing_checkpoint_of_an_average_is_reported(
    options: list[Any], value: str, places, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    for step in (2, 4):
        trained(GPT, places, step)
    assert run(places, places.runs / "run", tmp_path / "out", *options) == 1
    message = capsys.readouterr().err
    assert value in message
    assert str(places.runs / "run") in message
    assert not (tmp_path / "out").exists()


def test_a_mean_needs_a_run_with_equal_models(places, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    trained(GPT, places, 2)
    trained({**GPT, "hidden_size": 32}, places, 4)
    assert run(places, places.runs / "run", tmp_path / "out", "--average_last", 2) == 1
    assert "different model" in capsys.readouterr().err
    one = checkpoints.folder(places.runs / "run", 2)
    assert run(places, one, tmp_path / "out", "--average_last", 1) == 1
    assert str(one) in capsys.readouterr().err


def test_unexportable_models_are_reported(places, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (places.runs / "run").mkdir(parents=True)
    assert run(places, places.runs / "run", tmp_path / "out") == 1
    assert "runs/run: the folder is neither a checkpoint nor a run" in capsys.readouterr().err
    trained(GPT, places, 1)
    (tmp_path / "out").mkdir()
    assert run(places, places.runs / "run", tmp_path / "out") == 1
    assert "out: exists. Name a new folder." in capsys.readouterr().err


def test_a_damaged_checkpoint_is_not_exported(places, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    trained(GPT, places, 1)
    folder = checkpoints.folder(places.runs / "run", 1)
    with open(folder / "model.safetensors", "r+b") as file:
        file.seek(-4, 2)
        file.write(b"\1\2\3\4")
    assert run(places, folder, tmp_path / "out") == 1
    assert "step-00000001: damaged (" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def around(base: Any, **settings: Any) -> dict[str, Any]:
    return {"name": "cross_attention", "num_layers": 1, "stride": 1, "base": base, **settings}


@torch.no_grad()
@pytest.mark.parametrize("case", ["frozen", "learned", "adapted"])
def test_exported_blocks_load_in_xc_cache_and_start_another_training(case: str, places, tmp_path: Path):
    bind(MODELS, GPT).build(places).save_pretrained(tmp_path / "base")
    base = {"name": "hf", "path": str(tmp_path / "base")}
    raw = around(base, train_all_params=case == "learned")
    model = trained({**ADAPTERS, "base": raw} if case == "adapted" else raw, places, 3)
    assert run(places, places.runs / "run", tmp_path / "out") == 0
    assert (tmp_path / "out" / "base").is_dir() == (case != "frozen")
    exported_base = base if case == "frozen" else {"name": "hf", "path": str(tmp_path / "out" / "base")}
    again = bind(MODELS, around(exported_base, weights=str(tmp_path / "out"))).build(places).eval()
    contexts = {"context_ids": IDS[:, None] - 1, "context_mask": torch.ones(2, 1, 5, dtype=torch.bool)}
    mask = torch.ones(2, 5, dtype=torch.bool)
    torch.testing.assert_close(again(IDS, mask, **contexts), model(IDS, mask, **contexts), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", ["hub", "folder", "random"])
def test_the_export_names_its_base(case: str, places, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Also for programs with transformers 4, which do not know the class that 5 writes."""
    base_folder = (
        tmp_path / "hub" / "models--owner--base" / "snapshots" / "main" if case == "hub" else tmp_path / "base"
    )
    bind(MODELS, GPT).build(places).save_pretrained(base_folder)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    base = GPT if case == "random" else {"name": "hf", "path": "owner/base" if case == "hub" else str(base_folder)}
    trained(around(base, train_all_params=case == "random"), places, 3)
    assert run(places, places.runs / "run", tmp_path / "out", "--with_base") == 0
    expected_name = {"hub": "owner/base", "folder": str(base_folder), "random": str(tmp_path / "out" / "base")}[case]
    assert json.loads((tmp_path / "out" / "config.json").read_text())["_name_or_path"] == expected_name
    assert "transformer.wte.weight" in load_file(tmp_path / "out" / "model.safetensors")
    for folder in (tmp_path / "out", tmp_path / "out" / "base") if case == "random" else (tmp_path / "out",):
        tokenizer_config = json.loads((folder / "tokenizer_config.json").read_text())
        assert tokenizer_config["tokenizer_class"] == "PreTrainedTokenizerFast"
        original, copy = (AutoTokenizer.from_pretrained(path) for path in (places.data / "tokenizer", folder))
        assert original.get_vocab() == copy.get_vocab()
        assert sorted(original.all_special_tokens) == sorted(copy.all_special_tokens)


def test_standalone_is_for_cross_attention_and_push_needs_a_hub(
    places, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    bind(MODELS, GPT).build(places).save_pretrained(tmp_path / "base")
    trained(around({"name": "hf", "path": str(tmp_path / "base")}), places, 2)
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert run(places, places.runs / "run", tmp_path / "out", "--standalone", "--push_to_hub", "owner/name") == 1
    message = capsys.readouterr().err
    assert "error: --push_to_hub owner/name: not uploaded (" in message
    assert "is complete; upload it with `hf upload`." in message
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert set(config["auto_map"]) == {"AutoConfig", "AutoModelForCausalLM"}
    assert len(AutoTokenizer.from_pretrained(tmp_path / "out")) == config["base"]["vocab_size"]
    assert str(tmp_path) not in (tmp_path / "out" / "config.json").read_text(), "no path of this machine"
    assert run(places, places.runs / "run", tmp_path / "bad", "--push_to_hub", "a/b/c") == 1
    assert "--push_to_hub a/b/c: not uploaded" in capsys.readouterr().err
    trained(GPT, places, 4)
    assert run(places, places.runs / "run", tmp_path / "other", "--standalone") == 1
    assert "--standalone: is only for cross-attention models" in capsys.readouterr().err


def test_a_run_is_loaded_in_one_call(places, tmp_path: Path):
    bind(MODELS, GPT).build(places).save_pretrained(tmp_path / "base")
    model = trained(around({"name": "hf", "path": str(tmp_path / "base")}), places, 3)
    loaded, tokenizer = load(places.runs / "run", places)
    inputs = {
        "input_ids": IDS,
        "attention_mask": torch.ones(2, 5, dtype=torch.bool),
        "context_ids": IDS[:, None],
        "context_mask": torch.ones(2, 1, 5, dtype=torch.bool),
        "max_new_tokens": 4,
        "do_sample": False,
    }
    assert torch.equal(loaded.generate(**inputs), model.generate(**inputs))
    assert len(tokenizer) == model.config.vocab_size
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.float32}
    trained(around({"name": "hf", "path": str(tmp_path / "base"), "dtype": "bfloat16"}), places, 4)
    half, _ = load(places.runs / "run", places)
    assert {parameter.dtype for parameter in half.parameters()} == {torch.bfloat16}, "its blocks, too"
    assert half.generate(**inputs).shape == (2, 9)
    (places.runs / "empty").mkdir()
    with pytest.raises(CheckpointError, match="empty: the folder is neither a checkpoint nor a run"):
        load(str(places.runs / "empty"), places)
