"""A reward with a known optimum, for tests: 1 for an answer that begins with a small letter."""

from src.systems.assistants.rewards.interface import RewardConfig, RewardSetting, Rollout, Scorer


class Config(RewardConfig):
    """What it pretends to need."""

    reads: str | None = None
    """A key of the prompts' rows."""

    @property
    def row_key(self) -> str | None:
        return self.reads

    def scorer(self, setting: RewardSetting) -> Scorer:
        return lambda rollouts: [self.score(rollout) for rollout in rollouts]

    def score(self, rollout: Rollout) -> float:
        """1 or 0."""
        return float("a" <= rollout.text[:1] <= "z")
