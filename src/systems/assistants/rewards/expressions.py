"""Whether an answer solves a task of expressions; see src/evaluation/metrics/expressions.py."""

from src.evaluation.metrics import expressions
from src.systems.assistants.rewards.interface import RewardConfig, RewardSetting, Rollout, Scorer


class Config(RewardConfig):
    """Scores of right and wrong answers."""

    correct: float = 1.0
    """Score of a right answer."""
    incorrect: float = 0.0
    """Score of a wrong answer."""

    def scorer(self, setting: RewardSetting) -> Scorer:
        return lambda rollouts: [self.score(rollout) for rollout in rollouts]

    def score(self, rollout: Rollout) -> float:
        """`correct` if the answer is complete, uses both numbers and has the right value, else `incorrect`."""
        is_solved = rollout.is_complete and expressions.solves(rollout.messages[-1]["content"], rollout.text)
        return self.correct if is_solved else self.incorrect
