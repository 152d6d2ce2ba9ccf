"""Recipe `ppo`: proximal policy optimisation (Schulman et al. 2017, arXiv 1707.06347) of a policy on prompts."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, model_validator

from src.experiments.config import Config as StrictConfig
from src.experiments.interfaces import ModelConfig
from src.runs.context import Run
from src.systems.assistants import policy_training
from src.systems.assistants.policy_training import rollouts_of

if TYPE_CHECKING:
    import torch

    from src.data.orders import Cursor
    from src.systems.assistants.rl.experience import Estimates, Rollouts


class KL(StrictConfig):
    """Penalty on the KL divergence from the initial policy."""

    weight: float = Field(default=0.05, ge=0)
    """Subtracted from each token's reward, per nat."""
    estimate: Literal["k1", "k3"] = "k1"
    """Estimator of the divergence (Schulman 2020): k1 is unbiased; k3 is never negative and has less variance."""
    target: float | None = Field(default=None, gt=0)
    """Target KL in nats per token, for an adaptive weight; None for a constant weight."""
    horizon: int = Field(default=10000, gt=0)
    """Number of rollouts in which the adaptive weight reaches the target."""
    reference: Literal["copy", "adapters_off"] = "copy"
    """copy: a second model in memory. adapters_off: the policy without its adapters; needs model 'lora'."""


class Settings(StrictConfig):
    """Settings of the advantages and the loss."""

    kl: KL | None = KL()
    """None for no reference."""
    gamma: float = Field(default=1.0, gt=0, le=1)
    """Discount per token."""
    lam: float = Field(default=0.95, ge=0, le=1)
    """Lambda of generalized advantage estimation."""
    clip: float = Field(default=0.2, gt=0)
    """Range of the probability ratio around 1, outside of which a token's gradient is clipped."""
    dual_clip: float | None = Field(default=None, gt=1)
    """Maximum ratio for tokens with a negative advantage, for example 3; None for no maximum."""
    value_clip: float = Field(default=0.2, gt=0)
    """Maximum change of a value prediction before its gradient is cut."""
    value_weight: float = Field(default=1.0, ge=0)
    """Weight of the value loss."""
    entropy_weight: float = Field(default=0.0, ge=0)
    """Weight of the entropy bonus, per nat."""
    whiten: bool = True
    """Whether to normalise advantages to mean 0 and standard deviation 1 over the tokens of an iteration."""
    scale: Literal["none", "running", "first"] = "none"
    """Divide rewards by their standard deviation over all iterations so far, or over the first iteration."""
    reward_clip: float | None = Field(default=None, gt=0)
    """Maximum absolute value of a scaled reward."""
    truncated_answers: Literal["keep", "penalise", "mask"] = "keep"
    """Truncated answers: keep their reward, replace it by `truncated_reward`, or do not train on them."""
    truncated_reward: float = -1.0
    """Reward of an answer without an end token, if `truncated_answers` is penalise."""


class Config(policy_training.PolicyRecipe):
    """An experiment of this recipe, without its "recipe" key."""

    ppo: Settings = Settings()

    @model_validator(mode="after")
    def _has_values(self) -> "Config":
        policy_training.require_rollouts(self, self.reference)
        if self.model.name != "with_values":
            raise ValueError(f"model: expected 'with_values' around the policy, got {self.model.name!r}.")
        if self.ppo.kl and self.ppo.kl.reference == "adapters_off" and self.policy_config.name != "lora":
            raise ValueError(
                "ppo.kl.reference: only model 'lora' has adapters to switch off. Wrap the base in 'lora', or use copy."
            )
        return self

    @property
    def reference(self) -> Literal["none", "copy", "adapters_off"]:
        """The source of the reference's log-probabilities."""
        return self.ppo.kl.reference if self.ppo.kl else "none"

    @property
    def policy_config(self) -> ModelConfig:
        """Config of the model that answers, to which 'with_values' adds the values."""
        base: Any = getattr(self.model, "base", None)
        return base

    def run(self, run: Run) -> None:
        """Train to the last step; see `policy_training.train_policy` for the scores. Collective."""
        method = policy_training.PolicyMethod(
            self.reference,
            self.estimate,
            self.token_losses,
            fact_names=("explained_variance", *(["kl_weight"] if self.ppo.kl else [])),
            policy_config=self.policy_config,
            policy_of=lambda model: model.base,
        )
        policy_training.train_policy(self, run, method)

    def estimate(self, rollouts: "Rollouts", cursor: "Cursor") -> "Estimates":
        """Generalised advantages of the scaled rewards minus the KL penalty; the next KL weight and reward moments."""
        import torch

        from src.systems.assistants.rl import advantages
        from src.systems.assistants.rl.experience import Estimates

        ppo, tokens = self.ppo, rollouts.tokens
        sampled, logps, values = tokens["sampled"], tokens["logps"], tokens["values"]
        kl, weight = torch.zeros_like(logps), 0.0
        if ppo.kl:
            kl, weight = (
                advantages.kl_terms(logps, tokens["reference_logps"], ppo.kl.estimate),
                cursor.get("kl_weight", ppo.kl.weight),
            )
            kl = torch.where(sampled, kl, 0.0)
        scores, moments = self._scale(rollouts.scores, cursor)
        loss_mask = sampled
        if ppo.truncated_answers == "penalise":
            scores = torch.where(rollouts.is_complete, scores, ppo.truncated_reward)
        elif ppo.truncated_answers == "mask":
            loss_mask = sampled & rollouts.is_complete[:, None]
        rewards = advantages.token_rewards(scores, kl, sampled, weight)
        gains = advantages.generalized_advantages(values, rewards, sampled, ppo.gamma, ppo.lam)
        worth = gains.advantages
        if ppo.whiten:
            worth = advantages.whiten(worth, loss_mask, advantages.Moments.measure(worth, loss_mask))
        error = advantages.Moments.measure(gains.returns - values, sampled).deviation
        spread = advantages.Moments.measure(gains.returns, sampled).deviation
        explained_variance = 1 - (error / spread) ** 2 if spread else 0.0
        changes = {"kl_weight": weight} if ppo.kl else {}
        if ppo.kl and ppo.kl.target:
            mean = float(kl.sum() / sampled.sum())
            changes["kl_weight"] = advantages.next_kl_weight(weight, mean, len(scores), ppo.kl.target, ppo.kl.horizon)
        columns = {
            "learned": loss_mask,
            "advantages": worth,
            "logps": logps,
            "values": values,
            "returns": gains.returns,
            "kl": kl,
        }
        facts = {"explained_variance": torch.full_like(scores, explained_variance)}
        facts |= {"kl_weight": torch.full_like(scores, weight)} if ppo.kl else {}
        return Estimates(columns, facts, {**changes, **moments})

    def _scale(self, scores: "torch.Tensor", cursor: "Cursor") -> "tuple[torch.Tensor, Cursor]":
        """Scaled and clipped rewards, and the moments of the scale."""
        import torch

        from src.systems.assistants.rl.advantages import Moments

        state: Cursor = {}
        if self.ppo.scale != "none":
            before = cursor.get("reward_moments")
            moments = Moments(*before) if before else Moments(0.0, 0.0, 0.0)
            if self.ppo.scale == "running" or not before:
                moments = moments + Moments.measure(scores, torch.ones_like(scores, dtype=torch.bool))
            state["reward_moments"] = [moments.count, moments.total, moments.squares]
            scores = scores / (moments.deviation or 1.0)
        return (
            scores if self.ppo.reward_clip is None else scores.clamp(-self.ppo.reward_clip, self.ppo.reward_clip)
        ), state

    def token_losses(self, model: Any, batch: "Mapping[str, torch.Tensor]") -> Any:
        """Clipped losses of policy and values minus the entropy bonus; and sums over learned tokens: kl, clipped,
        entropy, value_loss."""
        from src.systems.assistants.rl import losses
        from src.systems.assistants.rl.policy import score_tokens

        ppo, loss_mask = self.ppo, batch["learned"]
        token_scores = score_tokens(
            model,
            batch,
            rollouts_of(self).sampling.temperature,
            entropy_gradient=ppo.entropy_weight > 0,
        )
        assert token_scores.values is not None, "the model is 'with_values'"
        policy = losses.policy_loss(
            token_scores.logps,
            batch["logps"],
            batch["advantages"],
            loss_mask,
            clip_low=ppo.clip,
            clip_high=ppo.clip,
            dual_clip=ppo.dual_clip,
        )
        value = losses.value_loss(token_scores.values, batch["values"], batch["returns"], loss_mask, ppo.value_clip)
        entropy = losses.token_sum(token_scores.entropies, loss_mask, "tokens")
        loss = policy.loss + ppo.value_weight * value - ppo.entropy_weight * entropy
        count = loss_mask.sum()
        sums = {"kl": losses.token_sum(batch["kl"], loss_mask, "tokens")} if ppo.kl else {}
        sums |= {"clipped": policy.clipped, "entropy": entropy, "value_loss": value}
        return loss, {name: (each, count) for name, each in sums.items()}
