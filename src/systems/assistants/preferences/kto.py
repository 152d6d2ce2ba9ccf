"""Recipe `kto`: Kahneman-Tversky optimization (Ethayarajh et al. 2024, arXiv 2402.01306) on single labeled replies."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field, model_validator

from src.data.parts import leaf_configs
from src.evaluation.harness import Harness
from src.experiments.config import Config as StrictConfig
from src.experiments.config import Places
from src.experiments.kinds import DECODER, REWARD
from src.recipes import pretraining
from src.recipes.training_recipe import TrainingRecipe
from src.runs.context import Run
from src.systems.assistants.conversations import labeled
from src.systems.assistants.preferences.training import ROUNDING, require_reference, train_on_replies

if TYPE_CHECKING:
    import torch

REPORTED_SCORES = ("accuracy", "kl_estimate", "desirable_logratio", "undesirable_logratio")
"""Named sums of the loss that an evaluation reports."""
_TENSORS = ("input_ids", "attention_mask", "loss_mask", "reference_logps")


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


class Config(TrainingRecipe):
    """An experiment of this recipe, without its "recipe" key. Sequences of the loop are groups of replies."""

    takes_chunks: ClassVar[bool] = False
    is_cross_entropy: ClassVar[bool] = False
    can_continue: ClassVar[bool] = False

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
        require_reference(self, "kto.reference", self.kto.reference)
        return self

    def checks(self, places: Places) -> list[Callable[[], object]]:
        return pretraining.checks(self, places, pretraining.score_names(REPORTED_SCORES))

    def loss(self) -> Callable[..., Any]:
        """A function that returns the summed loss and, by name, sums over replies or groups.

        accuracy: 1 if the log-ratio of a desirable reply is above the reference point by more than rounding, or that
        of an undesirable one below. kl_estimate: reference point of each group. desirable_logratio,
        undesirable_logratio: log-probability of each reply relative to the reference.
        """
        from src.systems.assistants.preferences.losses import answer_logps, reference_points, unpaired_loss
        from src.systems.assistants.preferences.reference import adapters_off, model_logits

        settings = self.kto

        def log_ratios(model: Any, batch: "Mapping[str, torch.Tensor]", rows: "torch.Tensor") -> "torch.Tensor":
            part = {name: batch[name][rows] for name in _TENSORS if name in batch}

            def logps() -> "torch.Tensor":
                return answer_logps(model_logits(model, part), part["input_ids"], part["loss_mask"]).logps

            if settings.reference == "stored":
                return logps() - part["reference_logps"]
            with adapters_off(model):
                reference = logps()
            return logps() - reference

        def loss_and_sums(model: Any, batch: "Mapping[str, torch.Tensor]") -> Any:
            import torch

            is_mismatched, group_of_row = batch["mismatch_mask"], batch["sample_of_row"]
            groups = int(group_of_row.max()) + 1
            points = torch.zeros(groups, device=group_of_row.device)
            if settings.kind == "kto":
                with torch.no_grad():
                    ratios = log_ratios(model, batch, is_mismatched)
                points = reference_points(ratios, group_of_row[is_mismatched], groups)
            ratios_R, points_R = log_ratios(model, batch, ~is_mismatched), points[group_of_row[~is_mismatched]]
            desirable_R = batch["ranks"][~is_mismatched] == labeled.DESIRABLE
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
            values = (
                (gains_R > ROUNDING).float(),
                points,
                ratios_R[desirable_R],
                ratios_R[~desirable_R],
            )
            sums = {
                name: (each.sum(), torch.tensor(float(len(each))))
                for name, each in zip(REPORTED_SCORES, values, strict=True)
            }
            return loss, sums

        return loss_and_sums

    def training_loss(self) -> Callable[..., Any]:
        return self.loss()

    def count(self, batch: "Mapping[str, torch.Tensor]") -> float:
        """Number of labeled replies."""
        return float((~batch["mismatch_mask"]).sum())

    def run(self, run: Run) -> None:
        """Train to the last step, or evaluate. Scores: val_loss and the means of `REPORTED_SCORES`. Collective."""
        train_on_replies(self, run, self.loss(), REPORTED_SCORES, self.count, self.kto.reference)
