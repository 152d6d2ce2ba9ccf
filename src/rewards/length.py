"""A reward that falls behind a number of tokens."""

from pydantic import Field

from src.rewards.interface import RewardConfig, RewardSetting, Rollout, Scorer


class Config(RewardConfig):
    """From which length on an answer is too long."""

    free_tokens: int = Field(ge=0)
    """Sampled tokens that cost nothing."""
    worst_tokens: int = Field(gt=0)
    """From so many on the score is -1; between the two it falls evenly (DAPO, Yu et al. 2025, arXiv 2503.14476, equation 13)."""

    def scorer(self, setting: RewardSetting) -> Scorer:
        return lambda rollouts: [self.score(rollout) for rollout in rollouts]

    def score(self, rollout: Rollout) -> float:
        """Between -1 and 0."""
        over = rollout.sampled - self.free_tokens
        return -min(1.0, max(0.0, over / (self.worst_tokens - self.free_tokens)))
