"""Recipe `kto`: Kahneman-Tversky optimization (Ethayarajh et al. 2024, arXiv 2402.01306) on single labeled replies."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field, model_validator

from src.data.parts import leaf_configs
from src.evaluation.harness import Harness
from src.experiments.config import Config as StrictConfig
from src.experiments.kinds import DECODER, REWARD
from src.recipes import pretraining
from src.systems.assistants.conversations import labeled
from src.systems.assistants.preferences.training import ROUNDING, ReplyRecipe

if TYPE_CHECKING:
    import torch


class Settings(StrictConfig):
    """The loss of a reply; see `systems.assistants.preferences.losses.unpaired_loss`."""

    kind: Literal["kto", "apo_zero_unpaired"] = "kto"
    """The loss function. apo_zero_unpaired: without the KL divergence."""
    beta: float = Field(default=0.1, gt=0)
    """Strength of the pull towards the reference model."""
    desirable_weight: float = Field(default=1.0, gt=0)
    """Weight of the loss of desirable replies. Equation 8 of the paper: choose the two weights so that (weight times
    number of desirable replies) / (weight times number of undesirable ones) is between 1 and 4/3."""
    undesirable_weight: float = Field(default=1.0, gt=0)
    """Weight of the loss of undesirable replies."""
    reference: Literal["stored", "adapters_off"] = "stored"
    """Source of the reference log-probabilities; see `preference.reference` of recipe `dpo`."""


class Config(ReplyRecipe):
    """An experiment of this recipe, without its "recipe" key. Sequences of the loop are groups of replies."""

    can_continue: ClassVar[bool] = False
    reported_scores: ClassVar[Sequence[str]] = ("accuracy", "kl_estimate", "desirable_logratio", "undesirable_logratio")

    kto: Settings = Settings()
    harness: Harness | None = None
    """Tasks of lm-evaluation-harness to score; None for none."""

    @model_validator(mode="after")
    def _samples_are_groups(self) -> "Config":
        pretraining.require_text(self, DECODER, REWARD)
        needs_kl = self.kto.kind == "kto"
        for path, data in leaf_configs("data", self.data):
            if not isinstance(data, labeled.Config):
                raise ValueError(f"{path}: this recipe needs labeled replies: use 'labeled_replies'.")
            if (data.group_size > 1) != needs_kl:
                sizes = "at least 2, to estimate the KL divergence" if needs_kl else "1, as it needs no KL divergence"
                raise ValueError(f"{path}.group_size: {data.group_size}, but kto.kind {self.kto.kind!r} needs {sizes}.")
        self.require_reference("kto.reference")
        return self

    @property
    def reference(self) -> str:
        return self.kto.reference

    def loss(self) -> Callable[..., Any]:
        """A function that returns the summed loss and, by name, sums over replies or groups.

        accuracy: 1 if the log-ratio of a desirable reply is above the reference point by more than rounding, or that
        of an undesirable one below. kl_estimate: reference point of each group. desirable_logratio,
        undesirable_logratio: log-probability of each reply relative to the reference.
        """
        from src.systems.assistants.preferences.losses import reference_points, unpaired_loss
        from src.systems.assistants.preferences.reference import log_ratios

        settings = self.kto

        def loss_and_sums(model: Any, batch: "Mapping[str, torch.Tensor]") -> Any:
            import torch

            is_mismatch, groups = batch["mismatch_mask"], int(batch["sample_of_row"].max()) + 1
            replies, mismatches = (
                {name: values[rows] for name, values in batch.items()} for rows in (~is_mismatch, is_mismatch)
            )
            points = torch.zeros(groups, device=is_mismatch.device)
            if settings.kind == "kto":
                with torch.no_grad():
                    _, ratios = log_ratios(model, mismatches, settings.reference)
                points = reference_points(ratios, mismatches["sample_of_row"], groups)
            _, ratios_R = log_ratios(model, replies, settings.reference)
            points_R, desirable_R = points[replies["sample_of_row"]], replies["ranks"] == labeled.DESIRABLE
            loss = unpaired_loss(
                ratios_R,
                points_R,
                desirable_R,
                beta=settings.beta,
                desirable_weight=settings.desirable_weight,
                undesirable_weight=settings.undesirable_weight,
            )
            ratios_R = ratios_R.detach()
            gains_R = torch.where(desirable_R, ratios_R - points_R, points_R - ratios_R)
            is_right = (gains_R > ROUNDING).float()
            return loss, self.named_sums(is_right, points, ratios_R[desirable_R], ratios_R[~desirable_R])

        return loss_and_sums

    def count(self, batch: "Mapping[str, torch.Tensor]") -> float:
        """Number of labeled replies."""
        return float((~batch["mismatch_mask"]).sum())
