"""Whether an answer has a form, such as `<think>...</think><answer>...</answer>`."""

import re

from pydantic import field_validator

from src.rewards.interface import RewardConfig, RewardSetting, Rollout, Scorer


class Config(RewardConfig):
    """The form, and scores of answers with and without it."""

    pattern: str
    r"""Regular expression that all of an answer must match, blanks at both ends apart; `.` is any character, a new line too.

    Parts that repeat within a part that repeats, such as `(a+)+`, can take for ever on what a model writes.
    """
    right: float = 1.0
    wrong: float = 0.0

    @field_validator("pattern")
    @classmethod
    def _compile(cls, pattern: str) -> str:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"{pattern!r} is no regular expression: {error}.") from None
        return pattern

    def scorer(self, setting: RewardSetting) -> Scorer:
        return lambda rollouts: [self.score(rollout) for rollout in rollouts]

    def score(self, rollout: Rollout) -> float:
        """`right` where the answer has ended and matches."""
        has_form = rollout.ended and re.fullmatch(self.pattern, rollout.text.strip(), re.DOTALL)
        return self.right if has_form else self.wrong
