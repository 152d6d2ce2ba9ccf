"""Recipe `reward`: train a reward model on ranked replies (Ouyang et al. 2022, arXiv 2203.02155, section 3.5)."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from src.data.parts import leaf_configs
from src.experiments.config import Config as StrictConfig
from src.experiments.config import Places
from src.experiments.kinds import REWARD
from src.recipes import pretraining
from src.systems.assistants.conversations import ranked
from src.systems.assistants.preferences.training import ReplyRecipe

if TYPE_CHECKING:
    import torch


class Ranking(StrictConfig):
    """The loss of ranked replies; see `systems.assistants.preferences.losses.ranking_loss`."""

    by: Literal["conversations", "pairs"] = "conversations"
    """Unit of the loss: each conversation has weight 1, or each pair of replies has."""
    l2: float = Field(default=0.001, ge=0)
    """Weight of the squared rewards."""
    margin: Annotated[float, Field(ge=0)] | Literal["scores"] = 0.0
    """Required margin of the better reply's reward. "scores": the difference of the replies' "score"."""
    centring: float = Field(default=0.0, ge=0)
    """Weight of the squared sum of the two rewards of a pair."""


class Config(ReplyRecipe):
    """An experiment of this recipe, without its "recipe" key."""

    reported_scores: ClassVar[Sequence[str]] = ("accuracy", "kendall", "spearman", "best_reward", "worst_reward")

    ranking: Ranking = Ranking()

    @model_validator(mode="after")
    def _reads_rewards(self) -> "Config":
        pretraining.require_text(self, REWARD)
        for path, data in leaf_configs("data", self.data):
            if not isinstance(data, ranked.Config):
                raise ValueError(f"{path}: {data.name!r} data have no ranks. Use 'ranked_replies', or recipe 'kto'.")
        return self

    def checks(self, places: Places) -> list[Callable[[], object]]:
        needs_scores = self.ranking.margin == "scores"
        return [*super().checks(places), lambda: needs_scores and self.data.check_scores(places)]

    def loss(self) -> Callable[..., Any]:
        """A function that returns the summed loss and, by name, sums over the conversations that have a preference.

        accuracy: whether the best reply has a higher reward than the worst. kendall, spearman: correlations of rewards
        and ranks. best_reward, worst_reward: rewards of the best and the worst reply.
        """
        from src.evaluation.metrics.ranking import correlations
        from src.systems.assistants.preferences.losses import ranking_loss

        settings = self.ranking

        def loss_and_sums(model: Any, batch: "Mapping[str, torch.Tensor]") -> Any:
            import torch

            rewards_R = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
            conversations_R, ranks_R = batch["sample_of_row"], batch["ranks"]
            margin = batch["scores"] if settings.margin == "scores" else settings.margin
            total_loss = ranking_loss(
                rewards_R,
                conversations_R,
                ranks_R,
                by=settings.by,
                l2=settings.l2,
                margin=margin,
                centring=settings.centring,
            )
            conversation_scores = correlations(rewards_R.tolist(), conversations_R.tolist(), ranks_R.tolist())
            count = torch.tensor(float(len(conversation_scores)))
            sums = {name: sum(getattr(each, name) for each in conversation_scores) for name in self.reported_scores}
            return total_loss, {name: (torch.tensor(each, dtype=torch.float64), count) for name, each in sums.items()}

        return loss_and_sums

    def training_loss(self) -> Callable[..., Any]:
        """The loss, and the sums except correlations."""
        loss = self.loss()

        def loss_and_sums(model: Any, batch: "Mapping[str, torch.Tensor]") -> Any:
            total_loss, sums = loss(model, batch)
            return total_loss, {name: sums[name] for name in ("accuracy", "best_reward", "worst_reward")}

        return loss_and_sums

    def count(self, batch: "Mapping[str, torch.Tensor]") -> float:
        """Number of conversations with a preference, or of pairs."""
        from src.systems.assistants.preferences.losses import count_ranked

        return count_ranked(batch["sample_of_row"], batch["ranks"], self.ranking.by)
