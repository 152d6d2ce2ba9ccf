"""What the settings of `ppo` and `grpo` do to their losses, worked out by hand."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, tensor

from src.experiments.grid import override
from src.experiments.registry import RECIPES, bind
from src.systems.assistants.rl.experience import Rollouts
from tests.systems.assistants import train_policies

TOKENS = 5
LOGP = -math.log(TOKENS)
BATCH = {
    "input_ids": tensor([[1, 2, 3]]),
    "attention_mask": torch.ones(1, 3, dtype=torch.bool),
    "learned": tensor([[False, True, True]]),
    "logps": torch.full((1, 3), LOGP),
    "advantages": tensor([[0.0, 1, 2]]),
    "values": tensor([[0, 0.5, 0.5]]),
    "returns": tensor([[0.0, 1, 1]]),
}


def know_nothing(input_ids: Tensor, **_: Any) -> SimpleNamespace:
    """A model for which all tokens are alike, and every state is worth a half."""
    return SimpleNamespace(logits=torch.zeros(*input_ids.shape, TOKENS), state_values=torch.full(input_ids.shape, 0.5))


def recipe(name: str, **settings: Any) -> Any:
    exp = {"ppo": train_policies.PPO, "grpo": train_policies.GRPO}[name]
    return bind(
        RECIPES,
        override(exp, {"rewards": [{"name": "length", "free_tokens": 2, "worst_tokens": 4}], name: settings}),
        "recipe",
    )


@pytest.mark.parametrize(("value_weight", "entropy_weight"), [(0.5, 0.0), (2.0, 0.0), (0.5, 3.0)])
def test_the_loss_of_ppo_adds_its_parts_by_their_weights(value_weight: float, entropy_weight: float):
    """The ratio is 1, so that the policy's part is the sum of the advantages; each value is off by a half: twice 0.5 *
    0.5 ** 2."""
    ppo = recipe("ppo", kl=None, value_weight=value_weight, entropy_weight=entropy_weight)
    loss, sums = ppo.token_losses(know_nothing, BATCH)
    assert loss.item() == pytest.approx(-3 + value_weight * 0.25 - entropy_weight * 2 * -LOGP)
    assert [float(each) for each in sums["value_loss"]] == pytest.approx([0.25, 2])


@pytest.mark.parametrize("entropy_weight", [0.0, 3.0])
def test_the_loss_of_grpo_falls_with_the_entropy(entropy_weight: float):
    grpo = recipe("grpo", entropy_weight=entropy_weight, normalisation="tokens")
    loss, _ = grpo.token_losses(know_nothing, BATCH)
    assert loss.item() == pytest.approx(-3 - entropy_weight * 2 * -LOGP)


def test_ppo_whitens_over_learned_tokens():
    """With a half of each later gain: 0.5 and 1 of the answer that has ended, mean 0.75, deviation 0.5 ** 1.5. Nothing
    of the other is learned."""
    ppo = recipe("ppo", kl=None, gamma=1.0, lam=0.5, whiten=True, truncated_answers="mask")
    tokens = {"sampled": tensor([[False, True, True]] * 2), "logps": torch.zeros(2, 3), "values": torch.zeros(2, 3)}
    estimates = ppo.estimate(Rollouts(tokens, tensor([1.0, 5.0]), tensor([True, False])), {})
    assert estimates.tokens["learned"].tolist() == [[False, True, True], [False] * 3]
    assert estimates.tokens["advantages"][0, 1:].tolist() == pytest.approx([-(0.5**0.5), 0.5**0.5], rel=1e-3)
