"""Whether an answer is mathematically equal to the row's "answer"; see src/evaluation/metrics/math.py."""

from collections.abc import Sequence

from src.evaluation.metrics.math import CpuSeconds, Judge, require_library
from src.experiments.config import Places
from src.systems.assistants.rewards.interface import RewardConfig, RewardSetting, Rollout, Scorer, row_entry


class Config(RewardConfig):
    """Scores of right and wrong answers. A truncated answer is wrong."""

    correct: float = 1.0
    """Score of a right answer."""
    incorrect: float = 0.0
    """Score of a wrong answer."""
    cpu_seconds: CpuSeconds = 5.0
    """See `CpuSeconds`."""

    @property
    def row_key(self) -> str:
        return "answer"

    def check(self, places: Places) -> None:
        require_library("reward 'math'")

    def scorer(self, setting: RewardSetting) -> Scorer:
        self.check(setting.places)
        judge = Judge(self.cpu_seconds)
        return lambda rollouts: self.scores(judge, rollouts)

    def scores(self, judge: Judge, rollouts: Sequence[Rollout]) -> list[float]:
        """One score per rollout."""
        pairs = [(rollout.text, str(row_entry(rollout.row, "answer"))) for rollout in rollouts]
        complete = [place for place, rollout in enumerate(rollouts) if rollout.is_complete]
        scores = [self.incorrect] * len(rollouts)
        for place, is_right in zip(complete, judge.agree([pairs[place] for place in complete]), strict=True):
            scores[place] = self.correct if is_right else self.incorrect
        return scores
