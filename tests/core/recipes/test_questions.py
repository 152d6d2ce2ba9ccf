"""Options that need questions, in every recipe and with every data set: --dry-run refuses what training would."""

from pathlib import Path
from typing import Any

import pytest

from src.errors import ConfigError, DataError
from src.experiments.config import Places
from src.experiments.interfaces import load_experiment
from src.experiments.kinds import DECODER
from src.experiments.registry import DATASETS, RECIPES, bind
from tests.core.data.test_every_dataset import CASES, READERS

QUESTIONS: dict[str, Any] = {"questions": 1, "max_new_tokens": 2, "metrics": [{"name": "words"}]}
INFERENCE: dict[str, Any] = {"max_new_tokens": 2, "metrics": [{"name": "words"}]}
OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "answers": ("answers", QUESTIONS),
    "answers.shuffled_context": ("answers", {**QUESTIONS, "shuffled_context": True}),
    "sampled": ("sampled", {**QUESTIONS, "samples": 2}),
    "inference": ("inference", INFERENCE),
    "inference.wrong_contexts": ("inference", {**INFERENCE, "wrong_contexts": True}),
}
TEXT = {"name": "text", **CASES["text"]}
TALK = {"name": "conversations", **CASES["conversations"], "sequence_tokens": 48}
PACKED = {"name": "packed", "documents": TALK, "sequence_tokens": 48}
DATA: dict[str, dict[str, Any]] = {name: {"name": name, **case} for name, case in CASES.items()} | {
    "no contexts": {**CASES["prompted_qa"], "name": "prompted_qa", "contexts": "none", "context_tokens": None},
    "mixture of talks": {"name": "mixture", "parts": {"a": TALK, "b": TALK}},
    "packed talks": PACKED,
    "phases to talks": {"name": "phases", "phases": [{"until": 0.5, "data": TEXT}, {"data": TALK}]},
    "phases to packed": {"name": "phases", "phases": [{"until": 0.5, "data": TALK}, {"data": PACKED}]},
    "rollouts": {"name": "rollouts", "prompts": TALK, "rollouts": 4, "group_size": 2, "max_new_tokens": 2},
}
ACCEPTED_PAIRS = {
    "answers": {
        *(
            "crossattn qa",
            "fid fid_qa",
            "grpo rollouts",
            "interleaved streamed",
            "ppo rollouts",
            "prompted no contexts",
        ),
        *("prompted prompted_qa", "sft conversations", "sft no contexts", "sft phases to talks", "sft prompted_qa"),
    },
    "answers.shuffled_context": {
        *("crossattn qa", "fid fid_qa", "interleaved streamed", "prompted prompted_qa", "sft prompted_qa"),
    },
    "sampled": {
        *("grpo rollouts", "ppo rollouts", "sft conversations", "sft no contexts", "sft phases to talks"),
        "sft prompted_qa",
    },
    "inference": {"crossattn qa", "fid fid_qa", "prompted no contexts", "prompted prompted_qa"},
    "inference.wrong_contexts": {"crossattn qa", "fid fid_qa", "prompted prompted_qa"},
}
"""By option: recipe and data."""


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("recipe", RECIPES.modules)
def test_questions_are_checked_before_the_training(recipe: str, option: str, tmp_path: Path):
    field, setting = OPTIONS[option]
    accepted_names: set[str] = set()
    refusals: dict[str, str] = {}
    for name, data in DATA.items():
        model = READERS[bind(DATASETS, data).reader]
        exp: dict[str, Any] = {"recipe": recipe, "seed": 0, "model": model, "data": data, field: setting}
        exp["loop"] = {"steps": 1, "sequences_per_step": 4, "micro_batch": 4, "learning_rate": 1e-3, "eval_every": 1}
        if recipe in ("grpo", "ppo"):
            exp["rewards"] = [{"name": "expressions"}]
            exp["model"] = {"name": "with_values", "base": READERS[DECODER]} if recipe == "ppo" else READERS[DECODER]
        try:
            loaded: Any = load_experiment(exp, "here")
        except ConfigError:
            continue
        try:
            loaded.check_questions(Places(tmp_path, tmp_path))
            accepted_names.add(f"{recipe} {name}")
        except DataError:  # the data are missing; questions are counted last
            accepted_names.add(f"{recipe} {name}")
        except ConfigError as error:
            refusals[name] = str(error).partition(": ")[0]
    assert set(refusals.values()) <= {option, field}, refusals
    assert accepted_names == {each for each in ACCEPTED_PAIRS[option] if each.startswith(f"{recipe} ")}
