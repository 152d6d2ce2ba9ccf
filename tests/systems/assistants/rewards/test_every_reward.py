"""What holds for every reward of the registry: one finite number for each rollout, which depends on nothing but that
rollout."""

import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from src.experiments.interfaces import ModelConfig
from src.experiments.kinds import REWARD
from src.experiments.registry import REWARDS, bind
from src.systems.assistants.rewards import reward_model
from src.systems.assistants.rewards.interface import RewardConfig, Rollout
from tests.systems.assistants.rewards.rollouts import needs_bubblewrap, rollout, setting

TASK = "Write an expression of 7 and 12 that gives 19."
ADD = "def add(a, b):\n    return a + b"
CASES: dict[str, tuple[dict[str, Any], list[tuple[Rollout, float]]]] = {
    "expressions": (
        {},
        [
            (rollout("7 + 12", TASK), 1),
            (rollout("7 * 12", TASK), 0),
            (rollout("12 + 7", TASK, is_complete=False), 0),
            (rollout("", TASK), 0),
        ],
    ),
    "format": (
        {"pattern": "<think>.*</think>\\d+", "incorrect": -1.0},
        [
            (rollout("<think>\na\n</think>4\n"), 1),
            (rollout("4"), -1),
            (rollout("<think></think>4", is_complete=False), -1),
            (rollout(""), -1),
        ],
    ),
    "length": (
        {"free_tokens": 2, "worst_tokens": 6},
        [(rollout("", sampled=n), s) for n, s in ((0, 0), (2, 0), (3, -0.25), (9, -1))],
    ),
    "math": (
        {"correct": 2.0},
        [
            (rollout("So it is \\boxed{\\frac{1}{2}}.", answer="0.5"), 2),
            (rollout("48 + 24 = 72\n#### 72", answer="Half of 48 is 24.\n#### 72"), 2),
            (rollout("#### 71", answer="#### 72"), 0),
            (rollout("#### 72", answer="#### 72", is_complete=False), 0),
            (rollout("", answer=7), 0),
        ],
    ),
    "python": (
        {"by": "tests", "share": True},
        [
            (rollout(f"Here:\n```python\n{ADD}\n```", tests=["assert add(1, 2) == 3", "assert add(1, 1) == 2"]), 1),
            (rollout("def add(a, b):\n    return 3", tests=["assert add(1, 2) == 3", "assert add(1, 1) == 2"]), 0.5),
            (rollout(ADD, tests="assert add(1, 2) == 3", is_complete=False), 0),
            (rollout("no program", tests="assert add(1, 2) == 3"), 0),
        ],
    ),
    "reward_model": ({}, [(rollout("", sampled=n), n + 1) for n in (3, 0, 5, 3, 1)]),
}
NEEDS = {"python": needs_bubblewrap}
EVERY = pytest.mark.parametrize("name", [pytest.param(name, marks=NEEDS.get(name, ())) for name in CASES])


class CountingModel(ModelConfig):
    """A reward model that counts tokens."""

    def kind(self, places: Any) -> str:
        return REWARD

    def build(self, places: Any) -> Any:
        import torch

        class Counting(torch.nn.Module):
            name_or_path = "anywhere"

            def forward(self, input_ids: Any, attention_mask: Any) -> Any:
                return attention_mask.sum(1).float()

        return Counting()


def bind_reward(name: str) -> RewardConfig:
    if name == "reward_model":
        return reward_model.Config.model_construct(model=CountingModel(), **CASES[name][0])
    return bind(REWARDS, {"name": name, **CASES[name][0]})


def test_every_reward_has_a_case():
    assert REWARDS.modules.keys() == CASES.keys()


@EVERY
def test_scores_are_right_and_depend_only_on_the_rollout(name: str):
    bind_reward(name).check(setting().places)
    score = bind_reward(name).scorer(setting(SimpleNamespace(backend_tokenizer=SimpleNamespace(to_str=str))))
    rollouts: Sequence[Rollout] = [case[0] for case in CASES[name][1]]
    scores = list(score(rollouts))
    assert scores == [case[1] for case in CASES[name][1]]
    assert all(type(value) is float and math.isfinite(value) for value in scores)
    assert list(score(rollouts[::-1])) == scores[::-1]
    assert [value for one in rollouts for value in score([one])] == scores
    assert list(score([*rollouts, *rollouts])) == scores * 2
    assert list(score([])) == []
