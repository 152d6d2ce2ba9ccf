"""A reward that falls after a number of tokens."""

from pydantic import Field, model_validator

from src.systems.assistants.rewards.interface import RewardConfig, RewardSetting, Rollout, Scorer


class Config(RewardConfig):
    """From which length on an answer is too long."""

    free_tokens: int = Field(ge=0)
    """Sampled tokens that cost nothing."""
    worst_tokens: int = Field(gt=0)
    """Tokens from which the score is -1;
    between the two it falls linearly (DAPO, Yu et al. 2025, arXiv 2503.14476, equation 13)."""

    @model_validator(mode="after")
    def _falls(self) -> "Config":
        if self.free_tokens >= self.worst_tokens:
            raise ValueError(f"worst_tokens: {self.worst_tokens} is not above free_tokens = {self.free_tokens}.")
        return self

    def scorer(self, setting: RewardSetting) -> Scorer:
        return lambda rollouts: [self.score(rollout) for rollout in rollouts]

    def score(self, rollout: Rollout) -> float:
        """Between -1 and 0."""
        over = rollout.sampled - self.free_tokens
        return -min(1.0, max(0.0, over / (self.worst_tokens - self.free_tokens)))
