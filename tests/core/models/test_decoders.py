"""The decoders that an experiment can name: from random weights, from a folder or the hub's cache, from another
experiment."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from src.errors import CheckpointError, ConfigError, DataError
from src.experiments.config import Places
from src.experiments.interfaces import ModelConfig
from src.experiments.registry import MODELS, bind, resolved_dict
from src.files import new_directory, write_json
from src.support.weights import load_trained, trained_weights

GPT = {
    "name": "gpt_bigcode",
    "tokenizer": "tokenizer",
    "hidden_size": 16,
    "num_layers": 4,
    "num_heads": 4,
    "max_positions": 32,
}
PARENT = "0123456789abcdef0123456789abcdef"


def part(raw: dict) -> ModelConfig:
    return bind(MODELS, raw)


def save_checkpoint(model: torch.nn.Module, raw: dict, places: Places, step: int = 100) -> Path:
    """A checkpoint as the loop writes it, the last one of experiment PARENT."""
    run = places.runs / PARENT
    run.mkdir(parents=True, exist_ok=True)
    write_json(run / "exp_dict.json", {"recipe": "lm", "model": raw})
    write_json(run / "status.json", {"state": "done", "step": step})
    with new_directory(run / "checkpoints" / f"step-{step:08d}") as folder:
        save_file(trained_weights(model), folder / "model.safetensors")
        write_json(folder / "model.json", resolved_dict(part(raw)))
        shutil.copytree(places.data / "tokenizer", folder / "tokenizer")
    return run / "checkpoints" / f"step-{step:08d}"


def test_light_modules_import_nothing_heavy():
    code = (
        "import sys; import src.systems.crossattn.model.config, src.models.trained_model, src.models.gpt_bigcode, "
        "src.models.hf, src.support.weights;"
        "print([m for m in ('torch', 'transformers', "
        "'numpy', 'pandas', 'safetensors', 'huggingface_hub') if m in sys.modules])"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
    )


# ---- gpt_bigcode


def test_gpt_bigcode_has_the_configured_sizes(places):
    model = part({**GPT, "dropout_rate": 0.25}).build(places)
    assert type(model).__name__ == "GPTBigCodeForCausalLM"
    c = model.config
    assert (c.vocab_size, c.n_embd, c.n_layer, c.n_head, c.n_positions, c.multi_query) == (23, 16, 4, 4, 32, True)
    assert (c.resid_pdrop, c.embd_pdrop, c.attn_pdrop) == (0.25, 0.25, 0.25)
    assert (c.bos_token_id, c.eos_token_id, c.pad_token_id) == (1, 2, 0)
    assert model.name_or_path == str(places.data / "tokenizer")
    assert part(GPT).architecture(places).num_layers == 4


def test_gpt_bigcode_draws_from_the_global_generator(places):
    def first(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        return part(GPT).build(places).transformer.h[0].attn.c_attn.weight

    assert torch.equal(first(0), first(0))
    assert not torch.equal(first(0), first(1))


def test_gpt_bigcode_without_its_tokenizer(places):
    raw = part({**GPT, "tokenizer": "other"})
    for method in (raw.check, raw.build):
        with pytest.raises(
            DataError, match=r"data/other: no tokenizer here \(tokenizer.json is missing\)\. Prepare it"
        ):
            method(places)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("text", ["", '{"version": "1.0", ', "garbage"])
def test_a_damaged_tokenizer_is_found_before_the_training(places, name: str, text: str):
    folder = places.data / f"damaged_{name}_{len(text)}"
    folder.mkdir()
    for each in ("tokenizer.json", "tokenizer_config.json"):
        (folder / each).write_text(text if each == name else "{}")
    with pytest.raises(DataError, match=re.escape(str(folder / name))):
        part({**GPT, "tokenizer": folder.name}).check(places)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_heads": 3}, "hidden_size: expected a multiple of num_heads 3, got 16"),
        ({"num_layers": 0}, "expected a number > 0, got 0"),
        ({"dropout_rate": 1.0}, "expected a number < 1"),
        ({"max_positions": "32"}, "expected int, got '32'"),
    ],
)
def test_gpt_bigcode_refuses(change, message):
    with pytest.raises(ValueError, match=message):
        part({**GPT, **change})


def test_gpt_bigcode_names_a_damaged_tokenizer(places):
    (places.data / "tokenizer" / "tokenizer.json").write_text('{"added_tokens": [], "model": {}}')
    with pytest.raises(DataError, match=r"data/tokenizer: the tokenizer cannot be read \(.+\)\. Prepare it again\.$"):
        part(GPT).build(places)


# ---- experiment


@pytest.fixture
def parent(places) -> torch.nn.Module:
    """A model of random weights, saved as checkpoints 50 (noise) and 100."""
    torch.manual_seed(5)
    model = part(GPT).build(places)
    save_checkpoint(part(GPT).build(places), GPT, places, step=50)
    save_checkpoint(model, GPT, places)
    return model


def test_experiment_gives_the_parent_s_weights_and_tokenizer(parent, places):
    child = part({"name": "experiment", "exp_id": PARENT}).build(places)
    assert all(torch.equal(a, b) for a, b in zip(child.parameters(), parent.parameters(), strict=True))
    assert child.name_or_path == str(places.runs / PARENT / "checkpoints" / "step-00000100" / "tokenizer")
    assert child.lm_head.weight is child.transformer.wte.weight


def test_experiment_last_and_best(parent, places):
    with pytest.raises(ConfigError, match=rf"no best checkpoint of parent {PARENT}\. .*--with-parents"):
        part({"name": "experiment", "exp_id": PARENT, "checkpoint": "best"}).build(places)
    write_json(places.runs / PARENT / "checkpoints" / "best.json", {"step": 50})
    best = part({"name": "experiment", "exp_id": PARENT, "checkpoint": "best"}).build(places)
    assert not torch.equal(best.lm_head.weight, parent.lm_head.weight)


def test_experiment_knows_the_parent_s_depth_before_and_after_its_training(places):
    raw = part({"name": "experiment", "exp_id": PARENT})
    planned_places = Places(places.data, places.runs, {PARENT: {"recipe": "lm", "model": GPT}})
    assert raw.architecture(planned_places).num_layers == 4
    raw.check(planned_places)
    with pytest.raises(
        ConfigError,
        match=rf"no last checkpoint of parent {PARENT}\. Train the parent first: add --with-parents",
    ):
        raw.build(planned_places)
    with pytest.raises(ConfigError, match=rf"parent {PARENT}: neither under .* nor in exp_configs\.py.*--with-parents"):
        raw.check(places)
    save_checkpoint(part(GPT).build(places), GPT, places)
    assert raw.architecture(places).num_layers == 4


@pytest.mark.parametrize("exp_id", ["0" * 31, "0" * 33, "G" * 32, "../" * 10 + "00"])
def test_experiment_needs_a_full_id(exp_id):
    with pytest.raises(ValueError, match="exp_id"):
        part({"name": "experiment", "exp_id": exp_id})


def test_experiment_with_a_parent_that_we_cannot_read(places):
    raw = part({"name": "experiment", "exp_id": PARENT})
    with pytest.raises(ConfigError, match=rf"parent {PARENT}: model.hidden_size: missing"):
        raw.check(
            Places(places.data, places.runs, {PARENT: {"model": {k: v for k, v in GPT.items() if k != "hidden_size"}}})
        )
    with pytest.raises(ConfigError, match=rf"parent {PARENT}: the experiment has no 'model'"):
        raw.check(Places(places.data, places.runs, {PARENT: {"recipe": "lm"}}))
    config_file = places.runs / PARENT / "exp_dict.json"
    config_file.parent.mkdir(parents=True)
    for content in (3, "x model", ["model"]):
        write_json(config_file, content)
        with pytest.raises(
            ConfigError, match=rf"parent {PARENT}: {config_file}: expected a dict, got {type(content).__name__}\.$"
        ):
            raw.check(places)


@pytest.mark.parametrize(
    ("model", "lines"),
    [
        (3, [r"model: expected a dict with 'name', got 3 (int)."]),
        (
            {
                "name": "gpt_bigcode",
                "num_layers": 0,
                "num_heads": 1,
                "max_positions": 8,
                "tokenizer": "t",
                "hiden_size": 8,
            },
            [
                "model.hidden_size: missing. It has no default, so write it.",
                "model.num_layers: expected a number > 0, got 0 (int).",
                "model: unknown key 'hiden_size'. Did you mean 'hidden_size'?",
            ],
        ),
    ],
)
def test_every_mistake_in_a_parent_s_model_is_a_line(places, model, lines):
    raw = part({"name": "experiment", "exp_id": PARENT})
    with pytest.raises(ConfigError) as error:
        raw.check(Places(places.data, places.runs, {PARENT: {"model": model}}))
    messages = str(error.value).split("\n")
    assert len(messages) == len(lines)
    assert all(line.startswith(f"parent {PARENT}: {expected}") for line, expected in zip(messages, lines, strict=True))


def test_cross_attention_on_another_experiment_from_its_own_checkpoint(parent, places, tmp_path):
    """Base, child, and the child again from its checkpoint: the whole way of a real run."""
    raw = {"name": "cross_attention", "num_layers": 2, "stride": 1, "base": {"name": "experiment", "exp_id": PARENT}}
    part(raw).check(places)
    child = part(raw).build(places).eval()
    assert torch.equal(child.base.lm_head.weight, parent.lm_head.weight)
    assert child.name_or_path.endswith("tokenizer")
    save_file(trained_weights(child), tmp_path / "child.safetensors")
    again = part(json.loads(json.dumps(resolved_dict(part(raw))))).build(places).eval()
    load_trained(again, tmp_path / "child.safetensors")
    ids, mask = torch.arange(3, 9)[None], torch.ones(1, 6, dtype=torch.bool)
    inputs = {"input_ids": ids, "attention_mask": mask, "context_ids": ids[None], "context_mask": mask[None]}
    assert torch.equal(again(**inputs), child(**inputs))


def test_cross_attention_is_checked_before_anything_is_loaded(places):
    planned_places = Places(places.data, places.runs, {PARENT: {"model": GPT}})
    raw = {"name": "cross_attention", "num_layers": 2, "stride": 3, "base": {"name": "experiment", "exp_id": PARENT}}
    with pytest.raises(
        ConfigError,
        match=(
            r"num_layers 2 x stride 3 needs 6 decoder layers, but the base has 4. Use num_layers up to 1 or stride "
            r"up to 2"
        ),
    ):
        part(raw).check(planned_places)
    with pytest.raises(ConfigError, match=f"parent {PARENT}: neither"):
        part(raw).check(places)
    with pytest.raises(ConfigError, match="hidden_size 6 is not divisible by num_heads 4"):
        part({**raw, "stride": 1, "hidden_size": 6}).check(planned_places)
    assert part({**raw, "stride": 1}).architecture(planned_places).num_layers == 4
    with pytest.raises(DataError, match="data/other: no tokenizer here"):
        part({**raw, "stride": 1, "base": {**GPT, "tokenizer": "other"}}).check(places)
    with pytest.raises(ConfigError, match="its weights are random and frozen"):
        part({**raw, "stride": 1, "base": GPT}).check(places)
    part({**raw, "stride": 1, "base": GPT, "train_all_params": True}).check(places)


# ---- weights


class MixedModel(torch.nn.Module):
    """A frozen part, a trained part with a running mean and a scratch buffer, a tied pair, and a constant of no trained
    module."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("constant", torch.ones(1))
        self.frozen = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2)).requires_grad_(False)
        self.norm = torch.nn.BatchNorm1d(2)
        self.norm.register_buffer("scratch", torch.zeros(1), persistent=False)
        self.first = torch.nn.Linear(2, 2, bias=False)
        self.tied = torch.nn.Linear(2, 2, bias=False)
        self.tied.weight = self.first.weight


TRAINED = {
    "norm.weight",
    "norm.bias",
    "norm.running_mean",
    "norm.running_var",
    "norm.num_batches_tracked",
    "first.weight",
}


def test_trained_weights_are_trained_parameters_and_their_modules_buffers():
    weights = trained_weights(MixedModel())
    assert weights.keys() == TRAINED
    assert not any(tensor.requires_grad for tensor in weights.values())


def test_load_trained_restores_tied_weights(tmp_path):
    model, other = MixedModel(), MixedModel()
    model.norm.running_mean += 3
    save_file(trained_weights(model), tmp_path / "w.safetensors")
    load_trained(other, tmp_path / "w.safetensors")
    assert all(torch.equal(trained_weights(other)[name], tensor) for name, tensor in trained_weights(model).items())
    assert other.tied.weight is other.first.weight
    assert not torch.equal(other.frozen[0].weight, model.frozen[0].weight)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda w: w.pop("norm.bias"),
            r"w.safetensors: checkpoint is for a different model. Missing: norm.bias; unexpected: none\.",
        ),
        (
            lambda w: w.update({f"x{i}": torch.ones(1) for i in range(5)}),
            r"Missing: none; unexpected: x0, x1, x2 and 2 more\.",
        ),
        (
            lambda w: w.update({"first.weight": torch.ones(2, 3)}),
            r"w.safetensors: checkpoint is for a different model. first.weight is \[2, 3\], expected \[2, 2\]",
        ),
    ],
)
def test_load_trained_refuses_other_models_and_changes_nothing(tmp_path, change, message):
    model = MixedModel()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    weights = dict(trained_weights(MixedModel()))
    change(weights)
    save_file(weights, tmp_path / "w.safetensors")
    with pytest.raises(CheckpointError, match=message):
        load_trained(model, tmp_path / "w.safetensors")
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_load_trained_names_a_missing_or_damaged_file(tmp_path):
    file = tmp_path / "w.safetensors"
    with pytest.raises(CheckpointError, match=r"w.safetensors: no such file"):
        load_trained(MixedModel(), file)
    save_file(trained_weights(MixedModel()), file)
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(CheckpointError, match=r"w.safetensors: damaged, not readable as safetensors"):
        load_trained(MixedModel(), file)
