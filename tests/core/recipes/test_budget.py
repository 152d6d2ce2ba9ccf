"""loop.budget: the steps that follow from tokens or operations, and where they are unknown."""

import json
from pathlib import Path
from typing import Any

import pytest

from src.errors import ConfigError
from src.experiments.config import Places
from src.experiments.identity import exp_id
from src.experiments.interfaces import load_experiment
from src.support import flops
from tests import toy


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("budget")
    toy.write_data(folder / "data")
    return folder


def experiment(budget: Any, **changes: Any) -> dict[str, Any]:
    loop = {name: value for name, value in toy.BASE["loop"].items() if name != "steps"}
    return {**toy.BASE, "loop": {**loop, "budget": budget}, **changes}


def steps(folder: Path, exp: dict[str, Any]) -> int:
    recipe: Any = load_experiment(exp, "g[0]").with_steps(Places(folder / "data", folder / "runs"))
    return recipe.loop.steps


def step_flops() -> int:
    """FLOPs of a step of toy.BASE: 8 sequences of 16 tokens."""
    from transformers import GPTBigCodeConfig

    vocabulary = len(toy.SPECIAL) + len(toy.COLOURS) + len(toy.THINGS) + 6
    config = GPTBigCodeConfig(vocab_size=vocabulary, n_embd=32, n_layer=3, n_head=2, n_positions=64)
    return flops.training_flops(config, 8, 16)


def test_tokens_are_rounded_down_to_steps(folder: Path):
    assert [steps(folder, experiment({"tokens": tokens})) for tokens in (128, 255, 256, 12 * 128)] == [1, 1, 2, 12]


def test_flops_are_those_of_the_throughput(folder: Path):
    assert steps(folder, experiment({"flops": 5.5 * step_flops()})) == 5


def test_a_training_by_budget_equals_one_by_steps(folder: Path, capsys: pytest.CaptureFixture[str]):
    """The schedule and the data follow the resulting steps; the dry run prints them."""
    by_tokens = experiment({"tokens": 12 * 128})
    assert toy.main(["-e", "g", "--dry-run"], {"g": [by_tokens]}, folder) == 0
    assert "12 steps" in capsys.readouterr().out
    assert toy.main(["-e", "g"], {"g": [by_tokens, toy.BASE]}, folder) == 0
    rows, expected = (toy.rows(folder, exp_id(exp)) for exp in (by_tokens, toy.BASE))
    assert rows == expected
    config = json.loads((folder / "runs" / exp_id(by_tokens) / "config.json").read_text())
    assert config["loop"]["steps"] == 12


@pytest.mark.parametrize(
    ("exp", "path"),
    [
        (experiment({"tokens": 127}), "loop.budget.tokens"),
        (experiment({"flops": 1.0}), "loop.budget.flops"),
        (
            experiment({"tokens": 999}, data={"name": "documents", "corpus": "toy_text", "sequence_tokens": 16}),
            "loop.budget.tokens",
        ),
    ],
    ids=["less than a step", "less than a step of operations", "lengths differ"],
)
def test_budgets_without_steps_are_refused_by_the_dry_run(
    folder: Path, capsys: pytest.CaptureFixture[str], exp: dict[str, Any], path: str
):
    assert toy.main(["-e", "g", "--dry-run"], {"g": [exp]}, folder) == 1
    assert path in capsys.readouterr().err


@pytest.mark.parametrize(
    "loop", [{"steps": 3, "budget": {"tokens": 9}}, {}, {"budget": {}}, {"budget": {"tokens": 1, "flops": 1}}]
)
def test_exactly_one_size(loop: dict[str, Any]):
    rest = {name: value for name, value in toy.BASE["loop"].items() if name != "steps"}
    with pytest.raises(ConfigError, match="loop"):
        load_experiment({**toy.BASE, "loop": {**rest, **loop}}, "g[0]")


def test_validators_see_the_steps_of_a_budget(folder: Path):
    exp = experiment({"tokens": 256})
    exp["loop"]["extra_eval_steps"] = [5]
    with pytest.raises(ConfigError, match="extra_eval_steps"):
        steps(folder, exp)
