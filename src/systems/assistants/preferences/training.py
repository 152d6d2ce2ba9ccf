"""Base of the recipes on replies, `reward`, `dpo` and `kto`."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from src.data.parts import leaf_configs
from src.experiments.config import Places
from src.recipes import pretraining
from src.recipes.training_recipe import TrainingRecipe
from src.runs.context import Run
from src.systems.assistants.conversations.dataset import ConversationConfig

if TYPE_CHECKING:
    import torch

ROUNDING = 1e-3
"""Maximum difference, in nats, between log-probabilities of one model in two passes."""


class ReplyRecipe(TrainingRecipe):
    """A training on replies, with a loss that also returns named sums."""

    takes_chunks: ClassVar[bool] = False
    is_cross_entropy: ClassVar[bool] = False

    reported_scores: ClassVar[Sequence[str]]
    """Named sums of the loss that an evaluation reports."""

    @property
    def reference(self) -> str:
        """Source of the reference log-probabilities. "stored" adds those of the initial model to the batches."""
        return "none"

    def require_reference(self, field: str) -> None:
        """Raise ValueError if log-probabilities of the reference cannot come from its source, the value of `field`."""
        for path, data in leaf_configs("data", self.data):
            tags = data.writing.tags if isinstance(data, ConversationConfig) else None
            if tags and tags.dropout and self.reference == "stored":
                raise ValueError(
                    f"{path}.writing.tags.dropout: stored references need the same text in each epoch. "
                    f"Set it to 0, or with model 'lora' set {field}: adapters_off."
                )
        if self.reference == "adapters_off" and self.model.name != "lora":
            raise ValueError(
                f"{field}: only model 'lora' has adapters to switch off. Wrap the model in 'lora', or use stored."
            )

    def checks(self, places: Places) -> list[Callable[[], object]]:
        return pretraining.checks(self, places, pretraining.score_names(self.reported_scores))

    def loss(self) -> Callable[..., Any]:
        """A function (model, batch) -> summed loss, and sums by the names `reported_scores`."""
        raise NotImplementedError

    def training_loss(self) -> Callable[..., Any]:
        return self.loss()

    def named_sums(self, *values: "torch.Tensor") -> dict[str, tuple["torch.Tensor", "torch.Tensor"]]:
        """The sum and the number of `values`, one tensor for each of `reported_scores`."""
        import torch

        sums = [(each.sum(), torch.tensor(float(len(each)))) for each in values]
        return dict(zip(self.reported_scores, sums, strict=True))

    def count(self, batch: "Mapping[str, torch.Tensor]") -> float:
        """Divisor of the summed loss."""
        raise NotImplementedError

    def run(self, run: Run) -> None:
        """Train to the last step, or evaluate. Scores: val_loss and the means of `reported_scores`. Collective."""
        from src.systems.assistants.preferences.reference import add_references

        prepare = partial(add_references, run=run.path, micro_batch=self.micro_batch, precision=self.precision[0])
        pretraining.train_on_text(
            self,
            run,
            pretraining.TextTraining(
                self.loss(),
                reported_sums=self.reported_scores,
                count=self.count,
                prepare=prepare if self.reference == "stored" else None,
            ),
        )
