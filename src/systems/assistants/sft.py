"""Recipe `sft`: supervised fine-tuning on conversations, of which what the assistant says is learned."""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from pydantic import Field

from src.evaluation.config import Answers, SampledAnswers
from src.experiments.config import Places
from src.experiments.dataset_protocols import Dataset
from src.experiments.kinds import DECODER
from src.recipes.pretraining import Pretraining, Scorer
from src.runs.context import Run


class Config(Pretraining):
    """An experiment of this recipe, without its "recipe" key."""

    model_kind: ClassVar[str] = DECODER
    measures_accuracy: ClassVar[bool] = True

    answers: Answers | None = None
    """The last answers of validation conversations, generated and scored at each evaluation; None for none."""
    sampled: SampledAnswers | None = None
    """The same by drawing from the model, several answers to each."""
    poly_epsilon: float = Field(default=0.0, ge=0)
    """Weight of 1 - p of each target, p being its probability, in training; see `training.loss.cross_entropy`."""

    def score_names(self) -> list[str]:
        return [
            *super().score_names(),
            "val_accuracy",
            *(name for asked in self._asked for name in asked.score_names()),
        ]

    @property
    def _asked(self) -> list[Answers | SampledAnswers]:
        return [asked for asked in (self.answers, self.sampled) if asked]

    def loss(self) -> Callable[..., Any]:
        from src.training.loss import causal_lm_loss

        return causal_lm_loss

    def training_loss(self, loss: Callable[..., Any]) -> Callable[..., Any]:
        options = (self.loop.label_smoothing, self.loop.z_loss, self.poly_epsilon) if self.loop else ()
        return self.in_chunks(lambda model, batch: loss(model, batch, *options))

    def checks(self, places: Places) -> list[Callable[[], object]]:
        """See `Pretraining`; and that answers fit behind their prompts."""
        most = max((asked.max_new_tokens for asked in self._asked), default=0)
        more = [lambda: self.data.check_length(self.model.longest_sequence(places), most)] if most else []
        return [*super().checks(places), *more]

    def begin(self, train: Dataset, val: Any, run: Run) -> Mapping[str, str]:
        for asked in self._asked:
            asked.require(val)
        return {}

    def more_scores(self, val: Any, scorer: Scorer) -> dict[str, float]:
        found = scorer.answers(self.answers, val) if self.answers else {}
        return found | (scorer.sampled_answers(self.sampled, val) if self.sampled else {})
