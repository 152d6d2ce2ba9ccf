"""Whether an answer has a given form, such as `<think>...</think><answer>...</answer>`."""

from pydantic import field_validator

from src.support.patterns import compile_pattern
from src.systems.assistants.rewards.interface import RewardConfig, RewardSetting, Rollout, Scorer


class Config(RewardConfig):
    """The form, and the scores of answers with and without it."""

    pattern: str
    """Regular expression (RE2) that the answer must match from start to end, without outer whitespace;
    `.` also matches a newline."""
    correct: float = 1.0
    """Score of an answer that matches."""
    incorrect: float = 0.0
    """Score of an answer that does not match."""

    @field_validator("pattern")
    @classmethod
    def _compile(cls, pattern: str) -> str:
        compile_pattern(pattern)
        return pattern

    def scorer(self, setting: RewardSetting) -> Scorer:
        form = compile_pattern(self.pattern, dot_is_any=True)

        def score(rollout: Rollout) -> float:
            """`correct` if the answer is complete and matches, else `incorrect`."""
            return self.correct if rollout.is_complete and form.fullmatch(rollout.text.strip()) else self.incorrect

        return lambda rollouts: [*map(score, rollouts)]
