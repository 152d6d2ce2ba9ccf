"""Blocks that XC-Cache saved give the logits that its formulas give; ours go back under its names."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional

from src.errors import CheckpointError
from src.experiments.registry import MODELS, bind
from src.support.deferred import build_deferred, take_recording
from src.systems.crossattn.model import xc_cache_weights
from tests.core.models.conftest import PLACEHOLDER, make_base

WIDTH, HEADS, INNER = 8, 2, 32
GPT_SHAPES = {
    **{f"ln_{i}.{kind}": (16,) for i in (1, 2) for kind in ("weight", "bias")},
    **{f"crossattention.{name}_attn.weight": (WIDTH, 16) for name in "qkv"},
    **{f"crossattention.{name}_attn.bias": (WIDTH,) for name in "qkv"},
    "crossattention.c_proj.weight": (16, WIDTH),
    "crossattention.c_proj.bias": (16,),
    "mlp.c_fc.weight": (INNER, 16),
    "mlp.c_fc.bias": (INNER,),
    "mlp.c_proj.weight": (16, INNER),
    "mlp.c_proj.bias": (16,),
}
LLAMA_SHAPES = {
    **{f"ln_{i}.{kind}": (16,) for i in (1, 2) for kind in ("weight", "bias")},
    **{f"crossattention.{name}_proj.weight": (WIDTH, 16) for name in "qkv"},
    "crossattention.o_proj.weight": (16, WIDTH),
    "mlp.gate_proj.weight": (INNER, 16),
    "mlp.up_proj.weight": (INNER, 16),
    "mlp.down_proj.weight": (16, INNER),
}


def draw_weights(
    shapes: dict[str, tuple[int, ...]], places: list[int], shared: bool = False
) -> dict[str, torch.Tensor]:
    """Weights as XC-Cache names them, with some of the base's, which are to be left alone."""
    generator = torch.Generator().manual_seed(3)
    blocks = [
        {name: torch.randn(shape, generator=generator) / 3 for name, shape in shapes.items()}
        for _ in range(1 if shared else len(places))
    ]
    weights = {
        f"cross_attn_layers.{i}.{name}": value
        for n, i in enumerate(places)
        for name, value in blocks[0 if shared else n].items()
    }
    return {**weights, "transformer.wte.weight": torch.zeros(3)}


def linear(weights, name, x):
    return functional.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))


def rotate_half(x: torch.Tensor) -> torch.Tensor:
    """(B, H, T, d) at positions 0, 1, …, as Llama does it."""
    half = x.shape[-1] // 2
    angles = torch.arange(x.shape[2])[:, None] * 10000.0 ** (-torch.arange(half) / half)
    x1, x2 = x[..., :half], x[..., half:]
    return torch.cat((x1 * angles.cos() - x2 * angles.sin(), x2 * angles.cos() + x1 * angles.sin()), dim=-1)


def plain_block(weights, h, context, mask, gated):
    """The published block: pre-norm cross-attention and MLP, each added to its input."""
    split = lambda x: x.unflatten(-1, (HEADS, -1)).transpose(1, 2)  # noqa: E731
    x = functional.layer_norm(h, (16,), weights["ln_1.weight"], weights["ln_1.bias"], 1e-6 if gated else 1e-5)
    suffix = "proj" if gated else "attn"
    q, k, v = (
        split(linear(weights, f"crossattention.{n}_{suffix}", s)) for n, s in (("q", x), ("k", context), ("v", context))
    )
    if gated:
        q, k = rotate_half(q), rotate_half(k)
    scores = (q @ k.transpose(-1, -2) / (WIDTH // HEADS) ** 0.5).masked_fill(~mask[:, None, None], float("-inf"))
    read = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
    h = h + linear(weights, f"crossattention.{'o_proj' if gated else 'c_proj'}", read)
    x = functional.layer_norm(h, (16,), weights["ln_2.weight"], weights["ln_2.bias"], 1e-6 if gated else 1e-5)
    if gated:
        return h + linear(
            weights,
            "mlp.down_proj",
            functional.silu(linear(weights, "mlp.gate_proj", x)) * linear(weights, "mlp.up_proj", x),
        )
    return h + linear(weights, "mlp.c_proj", functional.gelu(linear(weights, "mlp.c_fc", x), approximate="tanh"))


def plain_logits(model_type, saved, batch, places):
    """Of the base with the published blocks after its layers."""
    base: Any = make_base(model_type)
    gated = model_type == "llama"
    layers = base.model.layers if gated else base.transformer.h
    ids, mask = batch["context_ids"][:, 0], batch["context_mask"][:, 0]
    body: Any = base.model if gated else base.transformer
    context = body(input_ids=ids, attention_mask=mask.long()).last_hidden_state
    for i in places:
        weights = {
            name.removeprefix(f"cross_attn_layers.{i}."): value
            for name, value in saved.items()
            if f".{i}." in name[:21]
        }
        layers[i].register_forward_hook(lambda _, __, out, w=weights: plain_block(w, out, context, mask, gated))
    return base(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"].long()).logits


@pytest.mark.parametrize("kind", ["gpt_bigcode", "gpt_bigcode shared", "llama"])
@torch.no_grad()
def test_published_blocks_give_their_logits(make, batch, tmp_path: Path, kind: str):
    model_type, _, shared = kind.partition(" ")
    gated = model_type == "llama"
    saved = draw_weights(LLAMA_SHAPES if gated else GPT_SHAPES, [3, 1], bool(shared))
    save_file({name: value.clone() for name, value in saved.items()}, tmp_path / "model.safetensors")
    settings = {"norm": "layer", "num_key_value_heads": HEADS} if gated else {"shared_weights": bool(shared)}
    model = make(model_type, hidden_size=WIDTH, num_heads=HEADS, final_layer=True, **settings)
    xc_cache_weights.load(model, tmp_path)
    one = {**batch, "context_ids": batch["context_ids"][:, :1], "context_mask": batch["context_mask"][:, :1]}
    expected = plain_logits(model_type, saved, one, [3, 1])
    real = batch["attention_mask"]
    torch.testing.assert_close(model(**one)[real], expected[real], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("settings", [{}, {"shared_weights": True}, {"shared_projections": True}])
@pytest.mark.parametrize("model_type", ["gpt_bigcode", "llama"])
def test_saved_blocks_can_be_loaded(make, tmp_path: Path, model_type: str, settings: dict):
    model_settings = {**settings, **({"num_key_value_heads": 4} if model_type == "llama" else {})}
    model, other = make(model_type, **model_settings), make(model_type, noise=0.3, **model_settings)
    (tmp_path / "out").mkdir()
    xc_cache_weights.save(model, tmp_path / "out", "base")
    xc_cache_weights.load(other, tmp_path / "out")
    for one, two in zip(model.blocks.parameters(), other.blocks.parameters(), strict=True):
        assert torch.equal(one, two)
    names = load_file(tmp_path / "out" / "model.safetensors")
    assert all(re.match(r"cross_attn_layers\.[13]\.", name) for name in names)
    saved_config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (
        saved_config["n_cross_attn_layers"],
        saved_config["cross_attn_layers_stride"],
        saved_config["cross_attn_hidden_size"],
    ) == (
        2,
        2,
        16,
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_heads": 2}, "cross_attn_num_attention_heads: expected 2, .* got 4"),
        ({"final_layer": True}, "cross_attn_final_layer: expected True, .* got False"),
        ({"skip_connections": True}, "cross_attn_skip_connections: expected True, .* got False"),
    ],
)
def test_blocks_with_other_settings_are_refused(make, tmp_path: Path, settings: dict, message: str):
    xc_cache_weights.save(make(context_dropout_rate=0.5), tmp_path, "base")
    xc_cache_weights.load(make(), tmp_path)
    with pytest.raises(CheckpointError, match=message):
        xc_cache_weights.load(make(**settings), tmp_path)


def test_pytorch_files_in_several_parts(make, tmp_path: Path):
    saved = draw_weights(GPT_SHAPES, [3, 1])
    halves = list(saved.items())
    torch.save(dict(halves[:9]), tmp_path / "pytorch_model-00001-of-00002.bin")
    torch.save(dict(halves[9:]), tmp_path / "pytorch_model-00002-of-00002.bin")
    model = make(hidden_size=WIDTH, num_heads=HEADS)
    xc_cache_weights.load(model, tmp_path)
    assert torch.equal(model.blocks["1"].mlp.up.weight, saved["cross_attn_layers.1.mlp.c_fc.weight"])


def test_other_blocks_are_refused_and_nothing_changes(make, tmp_path: Path):
    saved = draw_weights(GPT_SHAPES, [3, 1])
    model = make(hidden_size=WIDTH, num_heads=HEADS)
    before = [p.clone() for p in model.parameters()]

    def require_refusal(change: dict, message: str) -> None:
        save_file({**saved, **change}, tmp_path / "model.safetensors")
        with pytest.raises(CheckpointError, match=message):
            xc_cache_weights.load(model, tmp_path)

    with pytest.raises(CheckpointError, match="no weights"):
        xc_cache_weights.load(model, tmp_path)
    require_refusal(
        {"cross_attn_layers.0.ln_1.weight": torch.ones(16)},
        "unexpected: cross_attn_layers.0.ln_1.weight. Compare its config.json",
    )
    require_refusal(
        {"cross_attn_layers.3.ln_1.weight": torch.ones(17)}, r"ln_1\.weight: expected the shape \[16\], got \[17\]"
    )
    (tmp_path / "model.safetensors").write_bytes(b"\0" * 20)
    with pytest.raises(CheckpointError, match="cannot be read"):
        xc_cache_weights.load(model, tmp_path)
    shared = make(hidden_size=WIDTH, num_heads=HEADS, shared_weights=True)
    save_file(saved, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="differ, but shared_weights"):
        xc_cache_weights.load(shared, tmp_path)
    assert all(torch.equal(one, two) for one, two in zip(before, model.parameters(), strict=True))


def test_weights_are_checked_and_belong_to_the_fingerprint(places, tmp_path: Path):
    bind(MODELS, {**PLACEHOLDER, "tokenizer": "tokenizer"}).build(places).save_pretrained(tmp_path / "base")
    raw = {
        "name": "cross_attention",
        "num_layers": 1,
        "stride": 1,
        "base": {"name": "hf", "path": str(tmp_path / "base")},
    }
    plain, with_weights = bind(MODELS, raw), bind(MODELS, {**raw, "weights": str(tmp_path / "published")})
    (tmp_path / "published").mkdir()
    with pytest.raises(CheckpointError, match="published: no weights"):
        with_weights.check(places)
    model = plain.build(places)
    xc_cache_weights.save(model, tmp_path / "published", "base")
    with_weights.check(places)
    assert torch.equal(with_weights.build(places).blocks["0"].mlp.up.weight, model.blocks["0"].mlp.up.weight)
    deferred = build_deferred(lambda: with_weights.build(places))
    recording = take_recording(deferred)
    assert recording
    assert torch.equal(recording.compute(deferred.blocks["0"].mlp.up.weight), model.blocks["0"].mlp.up.weight)
    assert plain.fingerprint(places) == bind(MODELS, raw["base"]).fingerprint(places)
    first = with_weights.fingerprint(places)
    xc_cache_weights.save(plain.build(places), tmp_path / "published", "base")
    assert len({first, with_weights.fingerprint(places), plain.fingerprint(places)}) == 3


MISTRAL_SHAPES = {
    # heads and width of the base, 16 in 4 of which 2 have keys; an MLP of four times cross_attn_hidden_size
    **{name: shape for name, shape in LLAMA_SHAPES.items() if name.startswith(("ln_", "mlp."))},
    **{f"crossattention.{name}_proj.weight": (16 if name in "qo" else 8, 16) for name in "qkvo"},
}
REFERENCE: dict[str, tuple[str, dict[str, tuple[int, ...]], dict[str, Any]]] = {
    # case: model_type, shapes of a block, our settings of the same
    "gpt_bigcode": ("gpt_bigcode", GPT_SHAPES, {"hidden_size": WIDTH, "num_heads": HEADS}),
    "gpt_bigcode shared": (
        "gpt_bigcode",
        GPT_SHAPES,
        {"hidden_size": WIDTH, "num_heads": HEADS, "shared_weights": True},
    ),
    "llama": (
        "llama",
        LLAMA_SHAPES,
        {"hidden_size": WIDTH, "num_heads": HEADS, "num_key_value_heads": HEADS, "norm": "layer"},
    ),
    "mistral": ("mistral", MISTRAL_SHAPES, {"feed_forward_size": INNER, "norm": "layer"}),
}


@pytest.mark.parametrize("case", REFERENCE)
def test_reference_loads_the_export_with_base_strictly(make, tmp_path: Path, case: str):
    """Its loader makes a model from `_name_or_path` and loads all weight files into it with `strict`: the base's
    weights under their own names, but "transformer." instead of "model.", and a block for each of its layers."""
    model_type, shapes, settings = REFERENCE[case]
    model = make(model_type, **settings)
    assert xc_cache_weights.unlike_reference(model) == []
    xc_cache_weights.save(model, tmp_path, "owner/base", with_base=True)
    saved = load_file(tmp_path / "model.safetensors")
    base = {re.sub(r"^model\.", "transformer.", name): tensor.shape for name, tensor in model.base.state_dict().items()}
    blocks = {f"cross_attn_layers.{i}.{name}": torch.Size(shape) for i in (3, 1) for name, shape in shapes.items()}
    assert {name: tensor.shape for name, tensor in saved.items()} == {**base, **blocks}
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["_name_or_path"], config["model_type"]) == ("owner/base", model_type)
    assert config["cross_attn_hidden_size"] * 4 == INNER, "its MLP is four times as wide"


@pytest.mark.parametrize(
    ("model_type", "settings", "what"),
    [
        ("llama", {}, "RMSNorm in blocks"),
        ("mistral", {"norm": "layer", "hidden_size": WIDTH}, "Mistral blocks with other heads than the base's"),
        ("gpt_bigcode", {"feed_forward_size": 24}, "feed_forward_size"),
        ("gpt_neox", {}, "bases of type 'gpt_neox'"),
    ],
)
def test_unsupported_features_of_the_reference_are_logged(make, model_type: str, settings: dict[str, Any], what: str):
    assert xc_cache_weights.unlike_reference(make(model_type, **settings)) == [what]


def test_published_llama_blocks_have_two_projections_whatever_their_configuration_says(make, tmp_path: Path):
    """XC-Cache's Llama and Mistral blocks know no shared projections."""
    saved = draw_weights(LLAMA_SHAPES, [3, 1])
    save_file(saved, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"cross_attn_shared_projections": True}))
    model = make("llama", hidden_size=WIDTH, num_heads=HEADS, num_key_value_heads=HEADS, norm="layer")
    xc_cache_weights.load(model, tmp_path)
    theirs = {"norm1": "ln_1", "norm2": "ln_2", "attention.out": "crossattention.o_proj"}
    theirs |= {f"attention.{name}": f"crossattention.{name}_proj" for name in "qkv"}
    theirs |= {f"mlp.{name}": f"mlp.{name}_proj" for name in ("gate", "up", "down")}
    loaded = model.blocks.state_dict()
    assert len(loaded) == 2 * len(LLAMA_SHAPES)
    for name, weight in loaded.items():
        layer, part, kind = re.fullmatch(r"(\d+)\.(.+)\.(\w+)", name).groups()  # type: ignore[union-attr]
        assert torch.equal(weight, saved[f"cross_attn_layers.{layer}.{theirs[part]}.{kind}"]), name
