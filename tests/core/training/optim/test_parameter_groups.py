"""Groups of parameters with their own settings, learning rates by layer, and which matrices Muon trains."""

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from src.errors import ConfigError
from src.experiments.config import load
from src.runs.jsonl_records import rows
from src.training.config import LoopConfig
from src.training.monitoring import parameter_statistics
from src.training.optim.optimizers import build_optimizer, learning_rates, set_learning_rate
from src.training.optim.parameter_groups import hidden_matrices, layer_numbers, split
from tests import toy
from tests.core.training.optim.test_optimizers import GROUPS, LOOP, Curve, place, train

CPU = torch.device("cpu")
LLAMA = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 3, "num_attention_heads": 2, "vocab_size": 16}


def loop(**changes: Any) -> LoopConfig:
    return load(LoopConfig, {**LOOP, "learning_rate": 0.1, **changes}, "loop")


def llama(**changes: Any) -> nn.Module:
    with torch.device("meta"):
        return LlamaForCausalLM(LlamaConfig(**LLAMA, **changes))


def rates(model: nn.Module, config: LoopConfig) -> dict[str, float]:
    """Learning rate by parameter, at the peak of the schedule."""
    factors = {name: its.rate_factor for its, parameters in split(model, config).items() for name in parameters}
    return {name: config.learning_rate * factor for name, factor in factors.items()}


def optimizers(model: nn.Module, config: LoopConfig) -> dict[str, str]:
    return {name: its.optimizer for its, parameters in split(model, config).items() for name in parameters}


def test_the_first_match_wins_and_sets_only_what_differs():
    model = llama(tie_word_embeddings=False)
    groups = [
        {"match": "embed|lm_head", "learning_rate": 0.3, "weight_decay": 0.0},
        {"match": r"lm_head|mlp\.", "optimizer": "adamw_scale"},
    ]
    config = loop(weight_decay=0.2, groups=groups)
    settings = {name: its for its, parameters in split(model, config).items() for name in parameters}
    assert settings.keys() == dict(model.named_parameters()).keys()
    for name, its in settings.items():
        first, second = "embed" in name or "lm_head" in name, ".mlp." in name
        assert its.rate_factor == pytest.approx(3.0 if first else 1.0), name
        assert its.weight_decay == (0.0 if first or "norm" in name else 0.2), name
        assert its.optimizer == ("adamw_scale" if second else "adamw"), name
        assert its.label == ("group0" if first else "group1" if second else ""), name


def test_without_settings_there_are_matrices_and_vectors():
    groups = split(llama(), loop())
    assert [(its.label, its.optimizer, its.rate_factor, its.of_matrices) for its in groups] == [
        ("", "adamw", 1.0, True),
        ("", "adamw", 1.0, False),
    ]


@pytest.mark.parametrize(
    ("changes", "path", "value"),
    [
        ({"groups": [{"match": "table"}, {"match": "embd"}]}, "loop.groups[1].match", "'embd'"),
        ({"groups": [{"match": "table"}, {"match": "tab"}]}, "loop.groups[1].match", "'tab'"),
        ({"groups": [{"match": "table", "optimizer": "muon"}]}, "loop.groups[0].optimizer", "'table'"),
    ],
)
def test_a_group_without_parameters_is_refused_before_the_first_step(changes: Any, path: str, value: str):
    with pytest.raises(ConfigError, match=rf"^{re.escape(path)}: .*{value}") as error:
        build_optimizer(Curve(), loop(**changes), CPU)
    assert error.value.everywhere


@pytest.mark.parametrize(
    ("changes", "path"), [({"optimizer": "muon"}, "loop.optimizer"), ({"layerwise_decay": 0.9}, "loop.layerwise_decay")]
)
def test_a_model_without_layers_is_refused(changes: Any, path: str):
    with pytest.raises(ConfigError, match=rf"^{path}: "):
        build_optimizer(nn.Sequential(nn.Linear(2, 2)), loop(**changes), CPU)


@pytest.mark.parametrize(
    ("changes", "path"),
    [
        ({"groups": [{"match": "(a"}]}, r"loop\.groups\[0\]"),
        ({"groups": [{"match": "a", "learning_rate": 0.0}]}, r"loop\.groups\[0\]\.learning_rate"),
        ({"muon_learning_rate": 0.1}, "loop: muon_learning_rate"),
        ({"layerwise_decay": 0.0}, r"loop\.layerwise_decay"),
    ],
)
def test_wrong_settings_are_refused_without_a_model(changes: Any, path: str):
    with pytest.raises(ConfigError, match=f"^{path}: "):
        loop(**changes)


@pytest.mark.parametrize("tie", [False, True])
def test_layerwise_decay_grows_from_the_head_to_the_embeddings(tie: bool):
    by_name = rates(llama(tie_word_embeddings=tie), loop(layerwise_decay=0.5))
    assert by_name["model.embed_tokens.weight"] == pytest.approx(0.1 * 0.5**4)
    for layer in range(3):
        parts = [rate for name, rate in by_name.items() if f"layers.{layer}." in name]
        assert parts == pytest.approx([0.1 * 0.5 ** (3 - layer)] * len(parts))
    assert by_name["model.norm.weight"] == 0.1
    assert by_name.get("lm_head.weight", 0.1) == 0.1


def test_layers_of_an_encoder_come_before_those_of_its_decoder():
    with torch.device("meta"):
        model = T5ForConditionalGeneration(
            T5Config(d_model=8, d_ff=8, d_kv=4, num_heads=2, num_layers=2, num_decoder_layers=1, vocab_size=16)
        )
    labels = {name: label for name, (label, _) in layer_numbers(model).items()}
    assert labels["shared.weight"] == "embeddings"
    assert labels["encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"] == "layer0"
    assert labels["encoder.final_layer_norm.weight"] == "layer1"
    assert labels["decoder.block.0.layer.0.SelfAttention.q.weight"] == "layer2"
    assert "decoder.final_layer_norm.weight" not in labels
    trained = hidden_matrices(model)
    assert "encoder.block.0.layer.0.SelfAttention.q.weight" in trained
    assert not {name for name in trained if "relative_attention_bias" in name or "shared" in name}


def test_muon_trains_matrices_of_layers_by_their_role():
    with torch.device("meta"):
        gpt2 = GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=16, tie_word_embeddings=False))
    names = optimizers(gpt2, loop(optimizer="muon"))
    assert {name for name, optimizer in names.items() if optimizer == "muon"} == {
        f"transformer.h.0.{part}.weight" for part in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    }
    assert set(names.values()) == {"muon", "adamw"}


def test_groups_and_muon_have_their_own_rates():
    config = loop(optimizer="muon", muon_learning_rate=0.4, groups=[{"match": "layers.1", "learning_rate": 0.7}])
    by_name = rates(llama(), config)
    assert by_name["model.layers.0.mlp.up_proj.weight"] == pytest.approx(0.4)
    assert by_name["model.layers.1.mlp.up_proj.weight"] == pytest.approx(0.7)
    assert by_name["model.layers.1.input_layernorm.weight"] == pytest.approx(0.7)
    assert by_name["model.embed_tokens.weight"] == 0.1


def test_muon_is_that_of_torch_step_for_step():
    torch.manual_seed(0)
    model = Curve()
    twin = copy.deepcopy(model)
    config = loop(optimizer="muon", muon_learning_rate=0.2, weight_decay=0.1)
    its = build_optimizer(model, config, CPU)
    matrix = twin.layers[0][0].weight  # type: ignore[index]
    adam = [part for part in twin.parameters() if part is not matrix]
    groups = [{"params": [part for part in adam if part.ndim >= 2], "weight_decay": 0.1}]
    groups.append({"params": [part for part in adam if part.ndim < 2], "weight_decay": 0.0})
    references = [
        torch.optim.Muon([matrix], lr=0.2, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(groups, lr=0.1, betas=(0.9, 0.95), eps=1e-6, fused=True),
    ]
    for rate in (1.0, 0.5, 0.25):
        set_learning_rate(its, 0.1 * rate)
        for reference, peak in zip(references, (0.2, 0.1), strict=True):
            for group in reference.param_groups:
                group["lr"] = peak * rate
        for each in (model, twin):
            each.zero_grad()
            each({"input_ids": torch.arange(32).expand(2, 32).T}).backward()
        for optimizer in (its, *references):
            optimizer.step()
        for (name, ours), theirs in zip(model.named_parameters(), twin.parameters(), strict=True):
            assert torch.equal(ours, theirs), name


def test_rates_of_groups_have_names():
    config = loop(**GROUPS | {"groups": [{"match": "table"}, *GROUPS["groups"][1:]]})
    columns = learning_rates(build_optimizer(Curve(), config, CPU), 0.5)
    assert columns == {
        "learning_rate/group0_embeddings": pytest.approx(0.5 * 0.9**2),
        "learning_rate/muon_layer0": pytest.approx(0.5 * 0.9),
        "learning_rate/group1_embeddings": pytest.approx(1.0 * 0.9**2),
        "learning_rate/group2_embeddings": pytest.approx(0.5 * 0.9**2),
    }


def test_statistics_use_the_rate_of_the_parameter():
    model = Curve()
    its = build_optimizer(model, loop(groups=[{"match": "line", "learning_rate": 0.3}]), CPU)
    assert parameter_statistics.learning_rates(model, its) == pytest.approx(
        {"table.weight": 0.1, "line.weight": 0.3, "line.bias": 0.3, "layers.0.0.weight": 0.1}
    )


def test_rates_of_groups_are_score_columns(tmp_path: Path):
    toy.write_data(tmp_path / "data")
    train(tmp_path, "muon")
    rates = [(row["learning_rate"], row["learning_rate/muon"]) for row in rows(place(tmp_path) / "scores.jsonl")]
    assert rates[-1][1] > 0
    assert [its for _, its in rates] == pytest.approx([2 * rate for rate, _ in rates])
