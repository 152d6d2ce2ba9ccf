"""What rollouts are worth by the settings of `ppo` and `grpo`: numbers that can be checked by hand."""

from typing import Any

import pytest
import torch
from torch import tensor

from src.errors import ConfigError
from src.experiments.grid import override
from src.experiments.interfaces import load_experiment
from src.systems.assistants.rl.experience import Rollouts
from tests.systems.assistants.train_policies import GRPO, PPO, rewards_of_tests


def rollouts_of(
    scores: list[float], is_complete: list[bool], logps: list[float], reference: list[float] | None = None
) -> Rollouts:
    """Rollouts of a prompt token and two sampled ones, of equal log-probabilities, and values of 0."""
    count = len(scores)
    sampled = tensor([[False, True, True]] * count)
    tokens: dict[str, Any] = {
        "input_ids": torch.zeros(count, 3, dtype=torch.int64),
        "sampled": sampled,
        "logps": tensor(logps)[:, None] * sampled,
        "values": torch.zeros(count, 3),
    }
    if reference:
        tokens["reference_logps"] = tensor(reference)[:, None] * sampled
    return Rollouts(tokens, tensor(scores), tensor(is_complete))


def bind_recipe(exp: dict[str, Any], **changes: Any) -> Any:
    with rewards_of_tests():
        return load_experiment(override(exp, changes), "here")


PLAIN = {"kl": None, "whiten": False, "lam": 1.0}


def test_the_score_is_on_the_last_token_and_the_kl_on_each():
    recipe = bind_recipe(PPO, ppo={**PLAIN, "lam": 0.0, "kl": {"weight": 0.5}})
    estimates = recipe.estimate(rollouts_of([2.0], [True], [-1.0], [-2.0]), {})
    assert estimates.tokens["advantages"].tolist() == [[0, -0.5, 1.5]]
    assert estimates.cursor == {"kl_weight": 0.5}


def test_the_weight_of_the_kl_follows_its_mean_over_sampled_tokens():
    recipe = bind_recipe(PPO, ppo={**PLAIN, "kl": {"weight": 0.1, "target": 1.0, "horizon": 100}})
    assert recipe.estimate(rollouts_of([0.0] * 4, [True] * 4, [-1.0] * 4, [-3.0] * 4), {}).cursor[
        "kl_weight"
    ] == pytest.approx(0.1 * (1 + 0.2 * 4 / 100))
    again = recipe.estimate(rollouts_of([0.0] * 4, [True] * 4, [-1.0] * 4, [-1.0] * 4), {"kl_weight": 0.3})
    assert again.facts["kl_weight"].tolist() == pytest.approx([0.3] * 4)
    assert again.cursor["kl_weight"] == pytest.approx(0.3 * (1 - 0.2 * 4 / 100))


def test_rewards_are_divided_by_their_deviation_so_far_or_at_first_and_then_cut():
    running = bind_recipe(PPO, ppo={**PLAIN, "scale": "running", "reward_clip": 1.0})
    first = running.estimate(rollouts_of([0.0, 2.0], [True] * 2, [-1.0] * 2), {})
    deviation = 2**0.5
    assert first.tokens["advantages"][:, 2].tolist() == pytest.approx([0.0, min(1.0, 2 / deviation)])
    assert first.cursor["reward_moments"] == [2, 2, 4]
    second = running.estimate(rollouts_of([1.0, 1.0], [True] * 2, [-1.0] * 2), first.cursor)
    assert second.cursor["reward_moments"] == [4, 4, 6]
    assert second.tokens["advantages"][0, 2].item() == pytest.approx(1.0), "1.22 of a deviation of 0.82, cut"
    once = bind_recipe(PPO, ppo={**PLAIN, "scale": "first"})
    second_estimates = once.estimate(rollouts_of([1.0, 1.0], [True] * 2, [-1.0] * 2), first.cursor)
    assert second_estimates.cursor["reward_moments"] == [2, 2, 4]
    assert second_estimates.tokens["advantages"][0, 2].item() == pytest.approx(1 / deviation)


@pytest.mark.parametrize("exp", [PPO, GRPO], ids=["ppo", "grpo"])
def test_unended_answers_are_scored_penalised_or_masked(exp: dict[str, Any]):
    recipe, scores, is_complete = exp["recipe"], [1.0, 0.0] * 4, [True, False] * 4
    grpo_settings = PLAIN if recipe == "ppo" else {"divide_by_std": False}

    def estimate(policy: str) -> Any:
        return bind_recipe(
            exp, **{recipe: {**grpo_settings, "truncated_answers": policy, "truncated_reward": -1.0}}
        ).estimate(rollouts_of(scores, is_complete, [-1.0] * 8), {})

    by_default, with_penalty, with_mask = map(estimate, ("keep", "penalise", "mask"))
    below = {"ppo": (0.0, -1.0), "grpo": (-0.5, -1.0)}[recipe]
    assert by_default.tokens["advantages"][1, 2].item() == pytest.approx(below[0])
    assert with_penalty.tokens["advantages"][1, 2].item() == pytest.approx(below[1])
    assert with_mask.tokens["learned"].any(dim=1).tolist() == is_complete
    assert by_default.tokens["learned"].sum() == with_penalty.tokens["learned"].sum() == 16


def test_a_group_of_equal_rewards_is_left_out_and_counted():
    recipe = bind_recipe(GRPO)
    estimates = recipe.estimate(rollouts_of([1.0] * 8 + [1.0, 0.0] * 4, [True] * 16, [-1.0] * 16), {})
    assert estimates.facts["equal_groups"].tolist() == [1.0] * 8 + [0.0] * 8
    assert estimates.tokens["learned"].any(dim=1).tolist() == [False] * 8 + [True] * 8
    assert recipe.count({"learned": estimates.tokens["learned"]}) == 16


def test_explained_variance_is_1_for_values_that_are_right_and_0_for_those_that_say_nothing():
    right = rollouts_of([1.0, -1.0], [True] * 2, [-1.0] * 2)
    columns = {**right.tokens, "values": tensor([[0.0, 1.0, 1.0], [0.0, -1.0, -1.0]])}
    recipe = bind_recipe(PPO, ppo=PLAIN)
    assert recipe.estimate(right._replace(tokens=columns), {}).facts["explained_variance"][0].item() == pytest.approx(1)
    assert recipe.estimate(right, {}).facts["explained_variance"][0].item() == pytest.approx(0)


def test_the_divergence_can_be_taken_from_the_reward_of_an_answer():
    """RLOOTrainer of TRL 1.16.0: rewards - beta * the sum of the log-ratios of the answer, then each less the mean of
    the others."""
    recipe = bind_recipe(GRPO, grpo={"baseline": "others", "divide_by_std": False, "kl_weight": 0.5, "kl_in": "reward"})
    logps, reference = [-1.0] * 8, [-1.0, -3.0, *[-1.0] * 6]
    estimates = recipe.estimate(rollouts_of([1.0] + [0.0] * 7, [True] * 8, logps, reference), {})
    rewards = tensor([1.0, 0.0 - 0.5 * 2 * 2.0, *[0.0] * 6])
    assert estimates.tokens["advantages"][:, 2].tolist() == pytest.approx(
        [(r - (rewards.sum() - r) / 7).item() for r in rewards]
    )
    assert recipe.needs_sampled_logps


@pytest.mark.parametrize(
    ("settings", "value"),
    [({"corrected_kl": True}, "kl_weight"), ({"kl_in": "reward"}, "kl_weight"), ({"dual_clip": 1.0}, "1.0"),
     ({"corrected_kl": True, "kl_weight": 0.1, "kl_in": "reward"}, "loss")],
)  # fmt: skip
def test_settings_without_effect_are_refused(settings: dict[str, Any], value: str):
    with pytest.raises(ConfigError) as error:
        bind_recipe(GRPO, grpo=settings)
    assert "grpo" in str(error.value)
    assert value in str(error.value)
