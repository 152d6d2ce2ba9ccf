"""Small experiments of the recipes `ppo` and `grpo`, on the data of train_assistants."""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

from src.experiments.grid import ref
from src.experiments.registry import REWARDS
from tests.systems.assistants.train_assistants import SFT, TALK


@contextlib.contextmanager
def rewards_of_tests() -> Iterator[None]:
    """Within the block the rewards are known that only tests have."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("letters", "noise"):
            patch.setitem(REWARDS.modules, name, f"tests.systems.assistants.rl.{name}")  # type: ignore[arg-type]
        yield


GRPO: dict[str, Any] = {
    "recipe": "grpo",
    "seed": 0,
    "model": ref(SFT),
    "data": {
        "name": "rollouts",
        "prompts": TALK,
        "rollouts": 16,
        "group_size": 8,
        "passes": 2,
        "max_new_tokens": 4,
        "generation_batch": 4,
    },
    "rewards": [{"name": "letters"}],
    "loop": {
        "steps": 8,
        "sequences_per_step": 8,
        "micro_batch": 2,
        "learning_rate": 1e-3,
        "eval_every": 4,
        "best_metric": "em_mean@2",
        "best_mode": "max",
    },
    "sampled": {"questions": 4, "samples": 2, "max_new_tokens": 3, "metrics": [{"name": "squad"}]},
}
PPO: dict[str, Any] = {
    **GRPO,
    "recipe": "ppo",
    "model": {"name": "with_values", "base": ref(SFT)},
    "data": {**GRPO["data"], "group_size": 1},
    "ppo": {"kl": {"weight": 0.1, "target": 0.5, "horizon": 100}, "scale": "running", "reward_clip": 4.0},
}
