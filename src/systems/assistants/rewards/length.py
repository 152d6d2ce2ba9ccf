"""A reward that penalises long answers."""

from pydantic import Field, model_validator

from src.systems.assistants.rewards.interface import RewardConfig, RewardSetting, Rollout, Scorer


class Config(RewardConfig):
    """Lengths at which the penalty starts and ends."""

    free_tokens: int = Field(ge=0)
    """Maximum number of sampled tokens without a penalty."""
    worst_tokens: int = Field(gt=0)
    """Number of tokens from which the score is -1.
    Between the two it falls linearly (DAPO, Yu et al. 2025, arXiv 2503.14476, equation 13)."""

    @model_validator(mode="after")
    def _falls(self) -> "Config":
        if self.free_tokens >= self.worst_tokens:
            raise ValueError(
                f"worst_tokens: expected more than free_tokens = {self.free_tokens}, got {self.worst_tokens}."
            )
        return self

    def scorer(self, setting: RewardSetting) -> Scorer:
        return lambda rollouts: [self.score(rollout) for rollout in rollouts]

    def score(self, rollout: Rollout) -> float:
        """A score between -1 and 0."""
        over = rollout.sampled - self.free_tokens
        return -min(1.0, max(0.0, over / (self.worst_tokens - self.free_tokens)))
