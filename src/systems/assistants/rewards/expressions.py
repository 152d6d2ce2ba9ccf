"""Whether an answer solves a task of expressions; see src/evaluation/metrics/expressions.py."""

from src.evaluation.metrics import expressions
from src.systems.assistants.rewards.interface import RewardConfig, RewardSetting, Rollout, Scorer


class Config(RewardConfig):
    """Scores of right and wrong answers."""

    right: float = 1.0
    wrong: float = 0.0

    def scorer(self, setting: RewardSetting) -> Scorer:
        return lambda rollouts: [self.score(rollout) for rollout in rollouts]

    def score(self, rollout: Rollout) -> float:
        """`right` if the answer is complete, uses both numbers of the task and has the right value, else `wrong`."""
        is_solved = rollout.is_complete and expressions.solves(rollout.messages[-1]["content"], rollout.text)
        return self.right if is_solved else self.wrong
