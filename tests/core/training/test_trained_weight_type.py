"""Trained weights in 16 bits are refused: they lose small updates."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from exp_configs import EXP_GROUPS
from src.errors import ConfigError
from src.experiments.config import Places
from src.experiments.interfaces import load_experiment
from src.experiments.registry import MODELS, bind
from src.runs import plan
from src.training.checkpointing.checkpoint import CheckpointMetadata
from src.training.config import check_trained_type
from src.training.loop import fit
from src.training.spec import TrainSpec
from tests import toy
from tests.core.models.test_unfilled import save
from tests.core.training import small

ADAPTERS = {"name": "lora", "rank": 2, "alpha": 2.0, "target_modules": ["q_proj"]}
BLOCKS = {"name": "cross_attention", "num_layers": 1, "stride": 1}


def check(model: dict[str, Any], folder: Path, recipe: dict[str, Any] = toy.BASE) -> None:
    experiment: Any = load_experiment({**copy.deepcopy(recipe), "model": model}, "x")
    check_trained_type(experiment.model, Places(folder, folder / "runs"))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_only_trained_weights_must_be_float32(tmp_path: Path, dtype: str):
    base = {"name": "hf", "path": "m", "dtype": dtype}
    with pytest.raises(ConfigError, match=f"^model.dtype: '{dtype}'"):
        check(base, tmp_path)
    with pytest.raises(ConfigError, match=dtype):
        check({"name": "regularized", "residual_dropout": 0.1, "base": base}, tmp_path)
    with pytest.raises(ConfigError, match=dtype):
        check({**BLOCKS, "train_all_params": True, "base": base}, tmp_path, toy.CROSSATTN)
    check({"name": "hf", "path": "m"}, tmp_path)
    check({**ADAPTERS, "base": base}, tmp_path)
    check({**BLOCKS, "base": base}, tmp_path, toy.CROSSATTN)
    check({**ADAPTERS, "base": {**BLOCKS, "base": base}}, tmp_path, toy.CROSSATTN)


def test_a_trained_critic_must_be_float32(tmp_path: Path):
    adapter_model = {**ADAPTERS, "base": {"name": "hf", "path": "m", "dtype": "bfloat16"}}
    for dtype, expected in (("bfloat16", "bfloat16"), ("float32", "float32")):
        model = bind(
            MODELS,
            {"name": "with_values", "base": adapter_model, "critic": {"name": "hf", "path": "m", "dtype": dtype}},
        )
        assert model.trained_type(Places(tmp_path, tmp_path)) == expected


def test_the_head_of_a_16_bit_reward_model_is_float32(tmp_path: Path):
    toy.write_data(tmp_path)
    save(tmp_path / "m", "llama", vocab_size=50)
    base = {"name": "hf", "path": "m", "dtype": "bfloat16"}
    model = bind(MODELS, {**ADAPTERS, "base": {"name": "reward", "base": base}}).build(Places(tmp_path, tmp_path))
    assert {each.dtype for each in model.parameters() if each.requires_grad} == {torch.float32}
    assert model(torch.ones(1, 3, dtype=torch.int64), torch.ones(1, 3, dtype=torch.bool)).dtype == torch.float32


def test_no_experiment_of_the_project_is_refused(tmp_path: Path):
    items = plan.load_all(EXP_GROUPS)
    places = Places(tmp_path, tmp_path / "runs", experiments={item.exp_id: item.exp for item in items.values()})
    trained = [item for item in items.values() if getattr(item.recipe, "loop", None)]
    assert len(trained) > 50
    for item in trained:
        check_trained_type(item.recipe.model, places)  # type: ignore[attr-defined]  every recipe with a loop has a model


def test_dry_run_refuses_bfloat16_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    toy.write_data(tmp_path / "data")
    save(
        tmp_path / "data" / "m",
        "llama",
        vocab_size=len(AutoTokenizer.from_pretrained(tmp_path / "data" / "toy_tokenizer")),
    )
    AutoTokenizer.from_pretrained(tmp_path / "data" / "toy_tokenizer").save_pretrained(tmp_path / "data" / "m")
    model = {"name": "hf", "path": "m", "dtype": "bfloat16"}
    groups = {"short": [{**toy.BASE, "model": model}], "adapters": [{**toy.BASE, "model": {**ADAPTERS, "base": model}}]}
    assert toy.main(["-e", "short", "--dry-run"], groups, tmp_path) == 1
    assert "model.dtype: 'bfloat16'" in capsys.readouterr().err
    assert toy.main(["-e", "adapters", "--dry-run"], groups, tmp_path) == 0
    assert toy.main(["-e", "adapters", "--steps", "2"], groups, tmp_path) == 0


def test_the_loop_checks_the_weights_themselves(tmp_path: Path):
    """As the type of a registered model's weights can be unknown before it is built."""
    with small.open_run(small.write_data(tmp_path)) as run:
        about = CheckpointMetadata({}, AutoTokenizer.from_pretrained(tmp_path / "data" / "toy_tokenizer"))
        spec = TrainSpec(small.Line().bfloat16(), about, small.Numbers(), {}, small.loss, lambda _: {"val_loss": 0.0})
        with pytest.raises(ConfigError, match=r"model\.dtype: 'bfloat16'"):
            fit(spec, run, small.CONFIG, seed=0)


def test_bfloat16_weights_lose_small_updates():
    """The reason: the same steps of AdamW change every float32 weight, and few bfloat16 weights."""
    changed = {}
    for dtype in (torch.float32, torch.bfloat16):
        torch.manual_seed(0)
        layer = torch.nn.Linear(64, 64).to(dtype)
        before = layer.weight.detach().clone()
        optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-5, weight_decay=0.0)
        for _ in range(20):
            optimizer.zero_grad()
            layer(torch.ones(1, 64, dtype=dtype)).sum().backward()
            optimizer.step()
        changed[dtype] = (layer.weight != before).double().mean().item()
    assert changed[torch.float32] == 1.0
    assert changed[torch.bfloat16] < 0.2
