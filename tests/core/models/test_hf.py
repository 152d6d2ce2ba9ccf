"""Pretrained models from a folder or the hub's cache: what is missing or damaged is named, and which weights were
loaded is known."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from src.errors import CheckpointError, ConfigError, DataError
from src.experiments.interfaces import ModelConfig
from src.experiments.registry import MODELS, bind, resolved_dict
from src.files import write_json
from src.models import hf
from src.models.architecture import Architecture
from src.training.config import check_weight_type
from tests import toy

GPT = {
    "name": "gpt_bigcode",
    "tokenizer": "tokenizer",
    "hidden_size": 16,
    "num_layers": 4,
    "num_heads": 4,
    "max_positions": 32,
}


def part(raw: dict) -> ModelConfig:
    return bind(MODELS, raw)


@pytest.fixture
def pretrained(base_of, tmp_path: Path) -> Path:
    folder = tmp_path / "pretrained"
    base_of("llama").save_pretrained(folder)
    return folder


def test_hf_loads_a_folder(pretrained, places, base_of):
    model = part({"name": "hf", "path": str(pretrained)}).build(places)
    assert model.dtype == torch.float32
    assert model.name_or_path == str(pretrained)
    ids = torch.arange(5)[None]
    assert torch.equal(model.eval()(ids).logits, base_of("llama")(ids).logits)
    assert part({"name": "hf", "path": str(pretrained), "dtype": "bfloat16"}).build(places).dtype == torch.bfloat16


@pytest.mark.parametrize(
    "around",
    [
        lambda base: base,
        lambda base: {"name": "lora", "rank": 2, "alpha": 2.0, "target_modules": ["q_proj"], "base": base},
    ],
)
def test_weights_of_one_short_type_are_not_computed_with_in_the_other(pretrained, places, around):
    model = part(around({"name": "hf", "path": str(pretrained), "dtype": "float16"}))
    for precision in ("float16", "float32"):
        check_weight_type(precision, "loop.precision", model, places)
    with pytest.raises(
        ConfigError, match=r"loop.precision: 'bfloat16', but the dtype of the model's weights is 'float16'"
    ):
        check_weight_type("bfloat16", "loop.precision", model, places)


@pytest.mark.parametrize(
    ("model_type", "groups", "head_size"), [("llama", 2, 4), ("gpt_bigcode", 1, None), ("gpt_neox", 4, None)]
)
def test_hf_knows_the_sizes_before_loading(base_of, tmp_path, places, model_type, groups, head_size):
    base_of(model_type).save_pretrained(tmp_path / "m")
    raw = part({"name": "hf", "path": str(tmp_path / "m")})
    assert raw.architecture(places) == Architecture(model_type, 4, 16, 4, groups, max_positions=64, head_size=head_size)


def test_hf_loads_from_the_cache_by_hub_id(pretrained, places, tmp_path, monkeypatch):
    repository = tmp_path / "home" / "hub" / "models--owner--name"
    shutil.copytree(pretrained, repository / "snapshots" / "abc123")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc123")
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    for raw in ({"path": "owner/name"}, {"path": "owner/name", "revision": "abc123"}):
        assert part({"name": "hf", **raw}).build(places).config.model_type == "llama"
    with pytest.raises(
        ConfigError, match=r"'owner/name' at revision 'v9' is neither .* `hf download owner/name --revision v9`"
    ):
        part({"name": "hf", "path": "owner/name", "revision": "v9"}).check(places)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "elsewhere"))
    with pytest.raises(
        ConfigError,
        match=r"'owner/name' is neither a folder nor in the local Hugging Face cache\. Download it with `hf download "
        r"owner/name` "
        r"\(gated models: .*`python -m data_prep\.gguf FILE\.gguf --name owner/name`.*"
        rf" {places.data} \(--data_path\)\.$",
    ):
        part({"name": "hf", "path": "owner/name"}).check(places)


def test_hf_rejects_ignored_settings_and_folders_without_a_model(pretrained, places, tmp_path):
    with pytest.raises(ConfigError, match=r"^model\.revision: 'main' is ignored"):
        part({"name": "hf", "path": str(pretrained), "revision": "main"}).check(places)
    with pytest.raises(ConfigError, match=r"has no config.json"):
        part({"name": "hf", "path": str(tmp_path)}).check(places)
    (pretrained / "model.safetensors").unlink()
    with pytest.raises(
        CheckpointError, match=r"pretrained: no weights. Expected model.safetensors or pytorch_model.bin"
    ):
        part({"name": "hf", "path": str(pretrained)}).check(places)


def test_hf_names_the_damaged_file(pretrained, places):
    file = pretrained / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(
        CheckpointError, match=r"pretrained/model.safetensors: damaged, or weights of another model .*Download it again"
    ):
        part({"name": "hf", "path": str(pretrained)}).build(places)


@pytest.mark.filterwarnings("ignore")  # transformers warns of them in its own way
def test_hf_refuses_weights_that_do_not_fit(pretrained, places):
    file = pretrained / "model.safetensors"
    whole = load_file(file)
    save_file(
        {name: tensor for name, tensor in whole.items() if "layers.2.mlp.up" not in name},
        file,
        metadata={"format": "pt"},
    )
    with pytest.raises(
        CheckpointError, match=r"model.safetensors: incomplete: model.layers.2.mlp.up_proj.weight missing"
    ):
        part({"name": "hf", "path": str(pretrained)}).build(places)
    save_file({**whole, "model.norm.weight": torch.ones(3)}, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"model.safetensors: damaged, or weights of another model"):
        part({"name": "hf", "path": str(pretrained)}).build(places)


def test_hf_names_the_missing_shard(base_of, places, tmp_path):
    folder = tmp_path / "sharded"
    base_of("llama").save_pretrained(folder, max_shard_size="10KB")
    raw = part({"name": "hf", "path": str(folder)})
    raw.check(places)
    assert raw.build(places).config.model_type == "llama"
    shards = sorted(folder.glob("model-*.safetensors"))
    assert len(shards) > 1
    shards[1].unlink()
    with pytest.raises(
        CheckpointError, match=rf"{shards[1].name}: missing, but listed in model.safetensors.index.json"
    ):
        raw.check(places)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ([], "expected a dict, got list"),
        (3, "expected a dict, got int"),
        ({"model_type": None}, '"model_type" is missing'),
        ({"model_type": 3}, r"model_type: expected str, got 3 \(int\)"),
        ({"num_hidden_layers": "4"}, r"num_hidden_layers: expected an int > 0, got '4' \(str\)"),
        ({"hidden_size": 0}, r"hidden_size: expected an int > 0, got 0 \(int\)"),
        ({"num_key_value_heads": [2]}, r"num_key_value_heads: expected an int > 0, got \[2\] \(list\)"),
        ({"max_position_embeddings": True}, r"max_position_embeddings: expected an int > 0, got True \(bool\)"),
    ],
)
def test_hf_names_the_error_in_config_json(pretrained, places, change, message):
    raw = part({"name": "hf", "path": str(pretrained)})
    file = pretrained / "config.json"
    if isinstance(change, dict):
        change = {key: value for key, value in {**json.loads(file.read_text()), **change}.items() if value is not None}
    write_json(file, change)
    for method in (raw.check, raw.architecture, raw.build):
        with pytest.raises(ConfigError, match=f"pretrained/config.json: {message}"):
            method(places)


@pytest.mark.parametrize(
    "change", [{"model_type": "nope"}, {"hidden_act": "nope"}, {"rope_parameters": 3}, {"vocab_size": "x"}]
)
@pytest.mark.filterwarnings("ignore")  # transformers warns of some in its own way
def test_hf_names_the_config_json_that_makes_no_model(pretrained, places, change):
    file = pretrained / "config.json"
    write_json(file, {**json.loads(file.read_text()), **change})
    with pytest.raises(ConfigError, match=r"pretrained/config.json: cannot build a model from it \(.+\)\.") as error:
        part({"name": "hf", "path": str(pretrained)}).build(places)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("index", [[], 3, {}, {"weight_map": {}}, {"weight_map": ["a"]}, {"weight_map": {"a": 3}}])
def test_hf_names_an_invalid_index_of_shards(pretrained, places, index):
    (pretrained / "model.safetensors").unlink()
    write_json(pretrained / "model.safetensors.index.json", index)
    with pytest.raises(CheckpointError, match=r"pretrained/model.safetensors.index.json: expected"):
        part({"name": "hf", "path": str(pretrained)}).check(places)


def test_names_that_are_too_long_for_the_file_system(places):
    for raw in ({"path": "a" * 300}, {"path": "/" + "a" * 5000}, {"path": "owner/name", "revision": "a" * 300}):
        with pytest.raises(ConfigError, match=r"is neither a folder nor in the local Hugging Face cache"):
            part({"name": "hf", **raw}).check(places)
    with pytest.raises(DataError, match=r"a: no tokenizer here"):
        part({**GPT, "tokenizer": "a" * 300}).check(places)


def test_hf_fingerprint_of_a_folder_is_that_of_its_weights(pretrained, places, tmp_path):
    raw = part({"name": "hf", "path": str(pretrained)})
    first = raw.fingerprint(places)
    shutil.copytree(pretrained, tmp_path / "copy")
    (tmp_path / "copy" / "README.md").write_text("not loaded")
    assert part({"name": "hf", "path": str(tmp_path / "copy")}).fingerprint(places) == first
    assert (
        part({"name": "cross_attention", "num_layers": 1, "stride": 1, "base": resolved_dict(raw)}).fingerprint(places)
        == first
    )
    assert part({"name": "cross_attention", "num_layers": 1, "stride": 1, "base": GPT}).fingerprint(places) is None
    weights = load_file(pretrained / "model.safetensors")
    save_file(
        {**weights, "model.norm.weight": torch.zeros(16)}, pretrained / "model.safetensors", metadata={"format": "pt"}
    )
    second = raw.fingerprint(places)
    config = pretrained / "config.json"
    write_json(config, {**json.loads(config.read_text()), "rms_norm_eps": 0.5})
    assert len({first, second, raw.fingerprint(places)}) == 3


def test_hf_fingerprint_of_shards_and_of_a_hub_id(base_of, places, tmp_path, monkeypatch):
    repository = tmp_path / "hub" / "models--owner--name"
    commit = "c0ffee" + "0" * 34
    base_of("llama").save_pretrained(repository / "snapshots" / commit, max_shard_size="10KB")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    folder = repository / "snapshots" / commit
    raw = part({"name": "hf", "path": str(folder)})
    first = raw.fingerprint(places)
    assert part({"name": "hf", "path": "owner/name"}).fingerprint(places) == first
    shard = max(folder.glob("model-*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1] + b"~")
    assert raw.fingerprint(places) != first


def test_hf_fingerprint_meets_every_large_matrix(base_of, places, tmp_path):
    """As the export of merged adapters leaves it: the same sizes, and one matrix in the middle of the file is
    another."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4}
    model = base_of("llama", **sizes)
    model.save_pretrained(tmp_path / "m")
    assert (tmp_path / "m" / "model.safetensors").stat().st_size > 3 * 2**20
    raw = part({"name": "hf", "path": str(tmp_path / "m")})
    fingerprints = {raw.fingerprint(places)}
    for layer in model.model.layers:
        with torch.no_grad():
            layer.self_attn.q_proj.weight += 1e-3
        model.save_pretrained(tmp_path / "m")
        fingerprints.add(raw.fingerprint(places))
    assert len(fingerprints) == 5


def test_hf_fingerprint_samples_a_large_file(pretrained, places):
    def characters_read():
        return int(Path("/proc/self/io").read_text().split()[1])

    with open(pretrained / "model.safetensors", "r+b") as file:
        file.truncate(10 * 2**30)  # a file with holes
        raw, fingerprints = part({"name": "hf", "path": str(pretrained)}), set()
        before = characters_read()
        for changed in (b"", b"~" * 2**24):  # more than a thousandth of it
            file.seek(5 * 2**30 + 12345)
            file.write(changed)
            file.flush()
            fingerprints.add(raw.fingerprint(places))
    assert len(fingerprints) == 2
    assert characters_read() - before < 2 * 7 * 2**20


@pytest.mark.parametrize(("attention", "implementation"), [("eager", "eager"), ("sdpa", "sdpa"), (None, "sdpa")])
def test_hf_uses_the_configured_attention(pretrained, places, attention, implementation):
    raw = part({"name": "hf", "path": str(pretrained), "attention": attention})
    assert raw.build(places).config._attn_implementation == implementation
    around = part({"name": "lora", "rank": 1, "alpha": 1.0, "target_modules": ["q_proj"], "base": resolved_dict(raw)})
    assert around.architecture(places).attention == attention


def test_hf_refuses_an_attention_that_cannot_be_used(pretrained, places, base_of, tmp_path, monkeypatch):
    monkeypatch.setattr(hf, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"^model\.attention: 'flash_attention_2' needs .* pip install flash-attn$"):
        part({"name": "hf", "path": str(pretrained), "attention": "flash_attention_2"}).check(places)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    flex = part({"name": "hf", "path": str(pretrained), "attention": "flex_attention"})
    flex.check(places)
    around = part({"name": "lora", "rank": 1, "alpha": 1.0, "target_modules": ["q_proj"], "base": resolved_dict(flex)})
    for action in (lambda: flex.build(places), flex.check_device, around.check_device):
        with pytest.raises(ConfigError, match=r"^model\.attention: 'flex_attention' needs a GPU\. Use 'sdpa'\.$"):
            action()
    base_of("gpt_bigcode").save_pretrained(tmp_path / "gpt")
    with pytest.raises(ConfigError, match=r"the family 'gpt_bigcode' does not support 'flex_attention'\. Use 'sdpa'\."):
        part({"name": "hf", "path": str(tmp_path / "gpt"), "attention": "flex_attention"}).check(places)


def test_transformers_does_not_support_the_rejected_attention():
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    flags = {
        "sdpa": "_supports_sdpa",
        "flash_attention_2": "_supports_flash_attn",
        "flex_attention": "_supports_flex_attn",
    }
    for attention, families in hf.WITHOUT.items():
        for family in families:
            model = getattr(transformers, CONFIG_MAPPING[family].__name__.removesuffix("Config") + "PreTrainedModel")
            assert not getattr(model, flags[attention]), (attention, family)
    assert transformers.GPTNeoXPreTrainedModel._supports_flex_attn


@pytest.mark.parametrize("model_type", ["llama", "gpt_bigcode", "gpt_neox"])
@pytest.mark.parametrize("attention", ["sdpa", *hf.ON_GPU])
def test_each_attention_is_eager_to_rounding(base_of, tmp_path, places, model_type, attention):
    """Of float32 to 1e-5 of logits and gradients, of bfloat16, which flash_attention_2 needs, to 2e-2; rows are padded
    on the left."""
    if attention in hf.ON_GPU and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    if model_type in hf.WITHOUT[attention] or (attention == "flash_attention_2" and hf.find_spec("flash_attn") is None):
        pytest.skip("transformers, or this machine, has none")
    base_of(model_type).save_pretrained(tmp_path / "m")
    device = "cuda" if attention in hf.ON_GPU else "cpu"
    short = attention == "flash_attention_2"
    ids = torch.randint(3, 16, (3, 12), device=device)
    mask = torch.ones_like(ids)
    mask[0, :5] = mask[1, :1] = 0
    outputs = []
    for each in ("eager", attention):
        raw = {
            "name": "hf",
            "path": str(tmp_path / "m"),
            "attention": each,
            "dtype": "bfloat16" if short else "float32",
        }
        model = part(raw).build(places).to(device).eval()
        assert model.config._attn_implementation == each
        logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[mask.bool()].float()
        logits.logsumexp(-1).sum().backward()
        outputs.append(
            [
                logits.detach(),
                *(parameter.grad.float() for parameter in model.parameters() if parameter.grad is not None),
            ]
        )
    for one, other in zip(*outputs, strict=True):
        assert (one - other).abs().max() <= (2e-2 if short else 1e-5) * max(1.0, float(one.abs().max()))


def test_a_dry_run_refuses_an_attention_that_needs_a_gpu(tmp_path, base_of, monkeypatch, capsys):
    toy.write_data(tmp_path / "data")
    base_of("llama", vocab_size=64).save_pretrained(tmp_path / "data" / "m")
    for file in (tmp_path / "data" / "toy_tokenizer").iterdir():
        if file.name != "manifest.json":
            shutil.copy(file, tmp_path / "data" / "m")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    exp_dict = {
        each: {**toy.BASE, "model": {"name": "hf", "path": "m", "attention": each}}
        for each in ("flex_attention", "eager")
    }
    codes = {each: toy.main(["-e", "group", "--dry-run"], {"group": [exp]}, tmp_path) for each, exp in exp_dict.items()}
    assert codes == {"flex_attention": 1, "eager": 0}
    assert "group[0]: model.attention: 'flex_attention' needs a GPU. Use 'sdpa'." in capsys.readouterr().err
