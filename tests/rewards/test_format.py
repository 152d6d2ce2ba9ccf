"""Forms of answers."""

import pytest

from src.registry import REWARDS, bind
from src.rewards.format import Config
from tests.rewards.rollouts import rollout


def test_all_of_an_answer_has_the_form():
    config = Config(pattern="<answer>[^<]*</answer>", right=0.5, wrong=-0.5)
    texts = ["<answer>a\nb</answer>", " <answer></answer>\n", "So <answer>a</answer>", "<answer>a</answer> <answer>b</answer>"]
    assert [config.score(rollout(text)) for text in texts] == [0.5, 0.5, -0.5, -0.5]


def test_a_bad_pattern_is_refused_when_the_experiment_is_read():
    with pytest.raises(ValueError, match=r"pattern: '\(a' is no regular expression: missing \), unterminated subpattern at position 0\."):
        bind(REWARDS, {"name": "format", "pattern": "(a"})
