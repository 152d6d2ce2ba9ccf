"""Pretrained models that FSDP2 cuts before their weights are there: the numbers are those of models that were built
whole."""

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoTokenizer, T5Config, T5ForConditionalGeneration

from src.experiments.config import Places
from src.experiments.identity import exp_id
from src.experiments.registry import MODELS, bind
from src.models import lora
from src.support.deferred import build_deferred, take_recording
from src.support.weights import is_unfilled
from tests import toy, warm
from tests.core.models import shared_fill
from tests.core.models.conftest import make_base
from tests.core.training.parallel.modes import scores, weights
from tests.systems.t5 import test_seq2seq


def save(folder: Path, family: str, **sizes: Any) -> Path:
    """A pretrained model in two files, with the toy tokenizer beside `folder`."""
    model = make_t5(**sizes) if family == "t5" else make_base(family, **sizes)
    model.generation_config.max_new_tokens = 7
    model.save_pretrained(folder, max_shard_size="30KB")
    AutoTokenizer.from_pretrained(folder.parent / "toy_tokenizer").save_pretrained(folder)
    assert len(list(folder.glob("*.safetensors"))) > 1
    return folder


def make_t5(logits_tied: bool, vocab_size: int = 60) -> Any:
    """logits_tied: as in the original T5, and not in v1.1. Its config.json says that they are in either case."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "d_model": 16,
        "d_kv": 4,
        "d_ff": 24,
        "num_layers": 2,
        "num_heads": 4,
        "decoder_start_token_id": 0,
    }
    model: Any = T5ForConditionalGeneration(T5Config(vocab_size=vocab_size, **sizes))
    if not logits_tied:
        model.lm_head.weight = nn.Parameter(torch.randn(vocab_size, 16))
    return model


def store_as_pickle(folder: Path) -> None:
    """Replace the safetensors files of a pretrained model."""
    files = sorted(folder.glob("model*.safetensors"))
    torch.save(
        {name: tensor for file in files for name, tensor in load_file(file).items()}, folder / "pytorch_model.bin"
    )
    for path in folder.glob("model*.safetensors*"):
        path.unlink()


def build_models(data: Path, **more: Any) -> tuple[Any, Any]:
    """The model of data/pretrained, or another around it, whole and for FSDP2. Neither draws more numbers than the
    other."""
    config: Any = bind(MODELS, more if "base" in more else {"name": "hf", "path": "pretrained", **more})
    places, loaded, random_states = Places(data, data), [], []
    for build in (config.build, lambda places: build_deferred(lambda: config.build(places))):
        torch.manual_seed(0)
        loaded.append(build(places))
        random_states.append(torch.get_rng_state())
    assert torch.equal(*random_states)
    return loaded[0], loaded[1]


FAMILIES = [
    ("llama", {"tie_word_embeddings": True}),
    ("gpt2", {}),
    ("qwen2", {}),
    ("t5", {"logits_tied": True}),
    ("t5", {"logits_tied": False}),
]


PRETRAINED = {"name": "hf", "path": "pretrained"}
CONVERTED = {
    **PRETRAINED,
    "dtype": "bfloat16",
}  # transformers does not read weights of the type of the files until they are used
CROSS_ATTENTION = {"name": "cross_attention", "num_layers": 2, "stride": 2, "feed_forward_size": 64, "base": CONVERTED}
WRAPPED: dict[str, dict[str, Any]] = {
    "adapters": {"rank": 3, "target_modules": ["q_proj", "down_proj"], "base": CONVERTED},
    "adapters in gpt2": {"rank": 3, "target_modules": ["c_attn", "c_fc"], "base": PRETRAINED},
    "cross-attention": CROSS_ATTENTION,
    "one block": {**CROSS_ATTENTION, "shared_weights": True, "base": PRETRAINED},
    "all is trained": {**CROSS_ATTENTION, "train_all_params": True},
    "both": {"rank": 3, "target_modules": ["o_proj"], "base": CROSS_ATTENTION},
}
"""Models around a base."""
for model in WRAPPED.values():
    if "rank" in model:
        model |= {"name": "lora", "alpha": 6.0}


@pytest.mark.parametrize("kind", WRAPPED)
def test_new_layers_around_a_base_are_initialised(tmp_path: Path, kind: str):
    data = toy.write_data(tmp_path / "data")
    save(
        data / "pretrained",
        "gpt2" if "gpt2" in kind else "llama",
        **({} if "gpt2" in kind else {"tie_word_embeddings": True}),
    )
    whole, model = build_models(data, **WRAPPED[kind])
    parameters = dict(model.named_parameters())
    assert [*parameters] == [name for name, _ in whole.named_parameters()], "tied alike"
    recording = take_recording(model)
    assert recording
    assert recording.folders(model) == [data / "pretrained"]
    for name, expected in whole.named_parameters():
        loaded = parameters[name]
        assert loaded.is_meta, name
        assert (loaded.requires_grad, loaded.dtype) == (expected.requires_grad, expected.dtype), name
        assert torch.equal(recording.compute(loaded), expected), name
        assert torch.equal(recording.compute_rows(loaded, 1, 3), expected[1:3]), name
    assert (str(model), model.name_or_path, model.training) == (str(whole), whole.name_or_path, whole.training)
    with pytest.raises(AssertionError, match="another recording"):
        recording.compute(torch.empty(2, device="meta"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_trained_adapters_are_merged_into_weights_that_are_read_later(tmp_path: Path, dtype: str):
    data = toy.write_data(tmp_path / "data")
    save(data / "pretrained", "llama")
    config: Any = bind(MODELS, WRAPPED["adapters"] | {"base": {**PRETRAINED, "dtype": dtype}})

    def build_merged() -> Any:
        torch.manual_seed(0)
        model = config.build(Places(data, data))
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.data.normal_()
        assert lora.merge(model) > 0
        return model

    whole, model = build_merged(), build_deferred(build_merged)
    recording = take_recording(model)
    assert recording
    for (name, weight), expected in zip(model.named_parameters(), whole.parameters(), strict=True):
        assert weight.is_meta
        assert torch.equal(recording.compute(weight), expected), name


@pytest.mark.parametrize("readable", [True, False])
def test_layers_around_a_base_with_new_tokens_are_equal(tmp_path: Path, readable: bool):
    """readable: whether the base is read in parts."""
    data = toy.write_data(tmp_path / "data")
    save(data / "pretrained", "llama" if readable else "gpt_neox")
    base = {**PRETRAINED, "extra_tokens": ["<new>"]}
    matrices = {"target_modules": ["q_proj" if readable else "query_key_value"]}
    models = [WRAPPED["adapters"] | {"base": base} | matrices]
    if readable:
        models.append(CROSS_ATTENTION | {"train_all_params": True, "base": base})
    for model in models:
        whole, other = build_models(data, **model)
        recording = take_recording(other)
        assert recording
        assert is_unfilled(other) == readable
        for one, two in zip(other.parameters(), whole.parameters(), strict=True):
            assert torch.equal(recording.compute(one), two)


RANDOM: dict[str, dict[str, Any]] = {
    "decoder": {
        "name": "gpt_bigcode",
        "tokenizer": "toy_tokenizer",
        "hidden_size": 512,
        "num_layers": 12,
        "num_heads": 8,
        "max_positions": 64,
    },
    "t5": {
        "name": "t5",
        "random": {
            "tokenizer": "toy_tokenizer",
            "hidden_size": 512,
            "feed_forward_size": 1024,
            "num_layers": 5,
            "num_heads": 8,
        },
    },
}
"""Models with random weights."""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["adapters", "cross-attention", "both", *RANDOM])
def test_no_process_builds_a_full_model(tmp_path: Path, kind: str):
    data = toy.write_data(tmp_path / "data")
    save(data / "pretrained", "llama", hidden_size=512, intermediate_size=2048, num_hidden_layers=12)
    model = json.dumps({**WRAPPED, **RANDOM}[kind])
    for processes in (1, 4):
        assert warm.torchrun(Path(shared_fill.__file__), [str(data), model], processes, tmp_path / "log") == ""
    for rank in range(4):
        peak_bytes, whole = json.loads((data / f"grown-{rank}").read_text())
        assert peak_bytes < 0.75 * whole, (
            f"process {rank} has held more than its part; a base built whole is 2.8 times the model while converted"
        )


@pytest.mark.parametrize(("family", "sizes"), FAMILIES)
def test_all_but_the_weights_is_there(tmp_path: Path, family: str, sizes: dict[str, Any]):
    data = toy.write_data(tmp_path / "data")
    save(data / "pretrained", family, **sizes)
    whole, empty = build_models(
        data, **({"name": "t5", "dropout_rate": 0.1} if family == "t5" else {"attention": "eager"})
    )
    assert is_unfilled(empty)
    assert not is_unfilled(whole)
    assert [*empty.state_dict()] == [*whole.state_dict()]
    assert [name for name, _ in empty.named_parameters()] == [name for name, _ in whole.named_parameters()], (
        "tied alike"
    )
    assert all(parameter.is_meta for parameter in empty.parameters())
    buffers = dict(empty.named_buffers())
    assert buffers.keys() == dict(whole.named_buffers()).keys()
    for name, buffer in whole.named_buffers():
        assert torch.equal(buffers[name], buffer), name
    for model in (whole, empty):
        model.config.name_or_path = ""
    assert empty.config.to_dict() == whole.config.to_dict()
    assert empty.generation_config.to_dict() == whole.generation_config.to_dict()
    assert str(empty) == str(whole), "and dropout"
    assert (empty.name_or_path, empty.training, empty.dtype) == (
        whole.name_or_path,
        whole.training,
        whole.dtype,
    )


def test_tied_weights_that_the_files_have_twice_stay_tied(tmp_path: Path):
    data = toy.write_data(tmp_path / "data")
    folder = save(data / "pretrained", "llama", tie_word_embeddings=True)
    file_tensors = {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    twice = file_tensors["model.embed_tokens.weight"]
    for logits, tied in ((twice.clone(), True), (twice + 1, False)):
        save_file({**file_tensors, "lm_head.weight": logits}, folder / "model.safetensors", {"format": "pt"})
        for model in build_models(data):
            assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied


def test_weights_that_cannot_be_read_in_parts_are_loaded_fully(tmp_path: Path):
    data = toy.write_data(tmp_path / "data")
    saved = save(data / "kept", "gpt2")

    def loads_fully(**more: Any) -> bool:
        whole, other = build_models(data, **more)
        pairs = zip(other.parameters(), whole.parameters(), strict=True)
        same = all(one.dtype == two.dtype and torch.equal(one, two) for one, two in pairs)
        return same and not is_unfilled(other)

    shutil.copytree(saved, data / "pretrained")
    assert is_unfilled(build_models(data)[1])
    save_file({"x": torch.ones(1)}, data / "pretrained" / "consolidated.safetensors")
    assert is_unfilled(build_models(data)[1]), "transformers does not load this file"
    store_as_pickle(data / "pretrained")
    assert loads_fully(), "not safetensors"
    shutil.rmtree(data / "pretrained")
    shutil.copytree(saved, data / "pretrained", ignore=shutil.ignore_patterns("*.safetensors*"))
    file_tensors = {name: tensor for file in saved.glob("*.safetensors") for name, tensor in load_file(file).items()}
    save_file(
        {name.removeprefix("transformer."): tensor for name, tensor in file_tensors.items()},
        data / "pretrained" / "model.safetensors",
    )
    assert loads_fully(), "names of the body of the model"
    shutil.rmtree(data / "pretrained")
    save(data / "pretrained", "gpt_neox")
    assert loads_fully(), "names that transformers changes"
    shutil.rmtree(data / "pretrained")
    save(data / "pretrained", "t5", logits_tied=True)
    assert loads_fully(name="t5", dtype="float16"), "transformers loads some weights in float32"
    assert is_unfilled(build_models(data, name="t5", dtype="bfloat16")[1])


def test_a_folder_with_adapters_is_loaded_by_transformers(tmp_path: Path):
    data = toy.write_data(tmp_path / "data")
    folder = save(data / "pretrained", "llama")
    model: Any = make_base("llama")
    model.add_adapter(LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
    model.save_pretrained(folder)
    (folder / "adapter_config.json").write_text(
        json.dumps(json.loads((folder / "adapter_config.json").read_text()) | {"base_model_name_or_path": str(folder)})
    )
    whole, other = build_models(data)
    assert [name for name, _ in other.named_parameters()] == [name for name, _ in whole.named_parameters()]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_buffers_are_computed_in_the_type_that_transformers_uses(tmp_path: Path, dtype: str):
    data = toy.write_data(tmp_path / "data")
    save(data / "pretrained", "gptj", rotary_dim=4)
    whole, other = build_models(data, dtype=dtype)
    assert is_unfilled(other)
    for name, expected in whole.named_buffers():
        assert torch.equal(other.get_buffer(name), expected), name


@pytest.mark.slow
@pytest.mark.parametrize("name", ["float32", "t5", "adapters", "cross-attention", "both"])
def test_a_training_has_the_same_bits_and_resumes(tmp_path: Path, name: str):
    """Frequencies of positions, which no file has, tied embeddings, logits of their own, and weights converted to
    another type; a base that is in no checkpoint, and what is trained around it, which begins as drawn and goes on from
    the checkpoint."""
    test_seq2seq.write_data(tmp_path)
    data = tmp_path / "data"
    size = len(AutoTokenizer.from_pretrained(data / "toy_tokenizer"))
    has_cross_attention = name in ("cross-attention", "both")
    exp: dict[str, Any] = copy.deepcopy(
        test_seq2seq.EXP if name == "t5" else toy.CROSSATTN if has_cross_attention else toy.BASE
    )
    if name == "t5":
        save(data / "pretrained", "t5", logits_tied=False, vocab_size=size)
        exp["model"] = {"name": "t5", "path": "pretrained"}
    else:
        save(data / "pretrained", "llama", tie_word_embeddings=True, vocab_size=size)
        exp["model"] = WRAPPED.get(name, {**PRETRAINED, "dtype": name}) | (
            {"dropout_rate": 0.1} if name == "adapters" else {}
        )
    exp["loop"] |= {"steps": 6, "eval_every": 3, "learning_rate": 1e-3} | (
        {"micro_batch": 4} if has_cross_attention else {}
    )
    root = toy.project(tmp_path, f"EXP_GROUPS = {{'x': [{exp!r}]}}\n")
    run, loaded = tmp_path / "runs" / exp_id(exp), {}
    shutil.copytree(data / "pretrained", tmp_path / "safetensors")
    for whole in (True, False):
        words = ["--fsdp"] if name == "t5" or not whole else []  # of T5 DDP adds the norm of gradients in another order
        if whole:
            store_as_pickle(data / "pretrained")  # has FSDP2 begin with a whole model
        else:
            shutil.rmtree(data / "pretrained")
            shutil.copytree(tmp_path / "safetensors", data / "pretrained")
        assert toy.run(root, ["-e", "x", *words], tmp_path, processes=2).returncode == 0
        assert ("each process loads its shard of these weights" in (run / "logs" / "train.log").read_text()) != whole
        loaded[whole] = scores(run), weights(run)
        if whole:
            shutil.rmtree(run)
    assert loaded[True] == loaded[False]
    shutil.rmtree(run / "checkpoints" / "step-00000006")
    (run / "status.json").unlink()
    assert toy.run(root, ["-e", "x", "--fsdp"], tmp_path, processes=2).returncode == 0
    assert "continues from step 3" in (run / "logs" / "train.log").read_text()
    assert (scores(run), weights(run)) == loaded[True]
