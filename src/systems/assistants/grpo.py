"""Recipe `grpo`: a policy learns by comparing several answers to a prompt (Shao et al. 2024, arXiv 2402.03300).

Settings for its variants:
- Dr. GRPO: divide_by_std False, normalisation "room".
- DAPO: normalisation "tokens", clip_high above clip_low.
- GSPO: ratio "sequence".
- RLOO: baseline "others", divide_by_std False, ratio "sequence_sum", normalisation "rollouts", kl_in "reward".
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, model_validator

from src.experiments.config import Config as StrictConfig
from src.runs.context import Run
from src.systems.assistants import policy_training
from src.systems.assistants.policy_training import rollouts_of

if TYPE_CHECKING:
    import torch

    from src.data.orders import Cursor
    from src.systems.assistants.rl.experience import Estimates, Rollouts


class Settings(StrictConfig):
    """Settings of the advantages and the loss; see src/systems/assistants/rl/advantages.py and
    src/systems/assistants/rl/losses.py."""

    baseline: Literal["group", "others"] = "group"
    """Baseline of an answer: the mean reward of its group, or of the other answers in its group."""
    divide_by_std: bool = True
    """Whether to divide advantages by the standard deviation of the group's rewards."""
    ratio: Literal["token", "sequence", "sequence_sum"] = "token"
    """Probability ratio of a token; or one per rollout: the geometric mean over its tokens (GSPO), or their product."""
    normalisation: Literal["tokens", "rollouts", "room"] = "tokens"
    """The loss is a sum, divided by: the sampled tokens; the rollouts, each with the mean of its tokens; or rollouts
    times maximum tokens (Dr. GRPO)."""
    clip_low: float = Field(default=0.2, gt=0)
    """Maximum decrease of the probability ratio below 1."""
    clip_high: float = Field(default=0.2, gt=0)
    """Maximum increase of the probability ratio above 1."""
    kl_weight: float = Field(default=0.0, ge=0)
    """Weight of the KL divergence from the reference; 0 for no reference."""
    kl_in: Literal["loss", "reward"] = "loss"
    """loss: add the divergence to each token's loss, as k3. reward: subtract it from the answer's reward, as k1."""
    corrected_kl: bool = False
    """Whether to weight each token's divergence in the loss by its ratio, so that it has no bias after several steps
    on the same rollouts."""
    dual_clip: float | None = Field(default=None, gt=1)
    """Maximum ratio for tokens with a negative advantage, for example 3; None for no maximum."""
    reference: Literal["copy", "adapters_off"] = "copy"
    """copy: a second model in memory. adapters_off: the policy without its adapters."""
    entropy_weight: float = Field(default=0.0, ge=0)
    """Weight of the entropy bonus, per nat."""
    truncated_answers: Literal["keep", "penalise", "mask"] = "keep"
    """Truncated answers: keep their reward, replace it by `truncated_reward`, or do not train on them."""
    truncated_reward: float = -1.0
    """Reward of an answer without an end token, if `truncated_answers` is penalise."""


class Config(policy_training.PolicyRecipe):
    """An experiment of this recipe, without its "recipe" key."""

    grpo: Settings = Settings()

    @model_validator(mode="after")
    def _has_groups(self) -> "Config":
        policy_training.require_rollouts(self, self.reference)
        if rollouts_of(self).group_size < 2:
            raise ValueError("data.group_size: GRPO compares answers within a group; use at least 2.")
        if self.model.name == "with_values":
            raise ValueError("model: this recipe needs no values. Use the base of 'with_values'.")
        if self.grpo.kl_weight and self.grpo.reference == "adapters_off" and self.model.name != "lora":
            raise ValueError(
                "grpo.reference: only model 'lora' has adapters to switch off. Wrap the model in 'lora', or use copy."
            )
        if self.grpo.corrected_kl and not (self.grpo.kl_weight and self.grpo.kl_in == "loss"):
            raise ValueError(
                "grpo.corrected_kl: needs a divergence in the loss. "
                "Set kl_weight above 0 and kl_in 'loss', or remove it."
            )
        if self.grpo.kl_in == "reward" and not self.grpo.kl_weight:
            raise ValueError("grpo.kl_in: 'reward' needs kl_weight above 0. Set it, or remove kl_in.")
        return self

    @property
    def needs_sampled_logps(self) -> bool:
        """Whether the loss needs the log-probabilities at sampling time. Not if an iteration is one step: the policy
        has not changed, so all ratios are 1."""
        if self.grpo.kl_weight and self.grpo.kl_in == "reward":
            return True
        data = rollouts_of(self)
        return self.loop is None or data.passes * data.rollouts > self.loop.sequences_per_step

    @property
    def reference(self) -> Literal["none", "copy", "adapters_off"]:
        """The source of the reference's log-probabilities."""
        return self.grpo.reference if self.grpo.kl_weight else "none"

    def run(self, run: Run) -> None:
        """Train to the last step; see `policy_training.train_policy` for the scores. Collective."""
        method = policy_training.PolicyMethod(
            self.reference,
            self.estimate,
            self.token_losses,
            fact_names=("equal_groups",),
            policy_config=self.model,
            count=self.count,
            needs_sampled_logps=self.needs_sampled_logps,
        )
        policy_training.train_policy(self, run, method)

    def estimate(self, rollouts: "Rollouts", cursor: "Cursor") -> "Estimates":
        """Advantages of the answers within their groups. Groups with equal rewards are skipped."""
        import torch

        from src.systems.assistants.rl.advantages import group_advantages
        from src.systems.assistants.rl.experience import Estimates

        grpo, tokens, scores = self.grpo, rollouts.tokens, rollouts.scores
        if grpo.truncated_answers == "penalise":
            scores = torch.where(rollouts.is_complete, scores, grpo.truncated_reward)
        if grpo.kl_weight and grpo.kl_in == "reward":
            kl = torch.where(tokens["sampled"], tokens["logps"] - tokens["reference_logps"], 0.0)
            scores = scores - grpo.kl_weight * kl.sum(dim=1)
        worth, differ = group_advantages(scores, rollouts_of(self).group_size, grpo.baseline, grpo.divide_by_std)
        loss_mask = tokens["sampled"] & differ[:, None]
        if grpo.truncated_answers == "mask":
            loss_mask = loss_mask & rollouts.is_complete[:, None]
        columns = {"learned": loss_mask, "advantages": torch.where(loss_mask, worth[:, None], 0.0)}
        columns |= {name: tokens[name] for name in ("logps", "reference_logps") if name in tokens}
        return Estimates(columns, {"equal_groups": 1 - differ.float()}, {})

    def count(self, batch: "Mapping[str, torch.Tensor]") -> float:
        """The divisor of `normalisation`."""
        from src.systems.assistants.rl.losses import count

        return count(batch["learned"], self.grpo.normalisation, rollouts_of(self).max_new_tokens)

    def token_losses(self, model: Any, batch: "Mapping[str, torch.Tensor]") -> Any:
        """The clipped loss minus the entropy bonus; and sums over learned tokens: clipped, entropy and, with a
        reference, kl."""
        from src.systems.assistants.rl import losses
        from src.systems.assistants.rl.policy import score_tokens

        grpo, loss_mask = self.grpo, batch["learned"]
        token_scores = score_tokens(
            model,
            batch,
            rollouts_of(self).sampling.temperature,
            entropy_gradient=grpo.entropy_weight > 0,
        )
        policy = losses.policy_loss(
            token_scores.logps,
            batch.get("logps", token_scores.logps.detach()),
            batch["advantages"],
            loss_mask,
            clip_low=grpo.clip_low,
            clip_high=grpo.clip_high,
            ratio=grpo.ratio,
            normalisation=grpo.normalisation,
            dual_clip=grpo.dual_clip,
            reference_logps_BT=batch.get("reference_logps"),
            kl_weight=grpo.kl_weight if grpo.kl_in == "loss" else 0.0,
            corrected_kl=grpo.corrected_kl,
        )
        loss = policy.loss - grpo.entropy_weight * losses.token_sum(
            token_scores.entropies, loss_mask, grpo.normalisation
        )
        sums = {
            "clipped": policy.clipped,
            "entropy": losses.token_sum(token_scores.entropies.detach(), loss_mask, "tokens"),
        }
        sums |= {"kl": policy.kl} if "reference_logps" in batch else {}
        return loss, {name: (each, loss_mask.sum()) for name, each in sums.items()}
