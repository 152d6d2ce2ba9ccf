"""Forms of answers."""

import pytest

from src.experiments.registry import REWARDS, bind
from src.systems.assistants.rewards.format import Config
from tests.systems.assistants.rewards.rollouts import rollout, setting


def test_all_of_an_answer_has_the_form():
    config = Config(pattern="<answer>[^<]*</answer>", correct=0.5, incorrect=-0.5)
    texts = [
        "<answer>a\nb</answer>",
        " <answer></answer>\n",
        "So <answer>a</answer>",
        "<answer>a</answer> <answer>b</answer>",
    ]
    assert config.scorer(setting())([rollout(text) for text in texts]) == [0.5, 0.5, -0.5, -0.5]


def test_a_bad_pattern_is_refused_when_the_experiment_is_read():
    with pytest.raises(ValueError, match=r"pattern: '\(a' is not a valid RE2 expression: missing \): \(a\."):
        bind(REWARDS, {"name": "format", "pattern": "(a"})
    with pytest.raises(ValueError, match="RE2 has no lookahead"):
        bind(REWARDS, {"name": "format", "pattern": "(?=a)a"})


def test_no_answer_holds_the_training_up():
    """Python's own expressions need longer than the universe is old for this one."""
    config = Config(pattern="(a+)+b")
    assert config.scorer(setting())([rollout("a" * 1000), rollout("a" * 1000 + "b")]) == [0, 1]
