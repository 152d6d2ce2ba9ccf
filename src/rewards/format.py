"""Whether an answer has a form, such as `<think>...</think><answer>...</answer>`."""

from pydantic import field_validator

from src.patterns import compile_pattern
from src.rewards.interface import RewardConfig, RewardSetting, Rollout, Scorer


class Config(RewardConfig):
    """The form, and scores of answers with and without it."""

    pattern: str
    """Regular expression (RE2) that all of an answer must match, blanks at both ends apart; `.` is any character, a new line too."""
    right: float = 1.0
    wrong: float = 0.0

    @field_validator("pattern")
    @classmethod
    def _compile(cls, pattern: str) -> str:
        compile_pattern(pattern)
        return pattern

    def scorer(self, setting: RewardSetting) -> Scorer:
        form = compile_pattern(self.pattern, dot_is_any=True)

        def score(rollout: Rollout) -> float:
            """`right` where the answer has ended and matches."""
            return self.right if rollout.ended and form.fullmatch(rollout.text.strip()) else self.wrong

        return lambda rollouts: [*map(score, rollouts)]
