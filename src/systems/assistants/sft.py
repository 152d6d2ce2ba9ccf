"""Recipe `sft`: supervised fine-tuning on conversations, with loss on the assistant's answers."""

from collections.abc import Callable, Mapping
from typing import Any

from pydantic import Field, model_validator

from src.evaluation.config import Answers, SampledAnswers
from src.evaluation.harness import Harness
from src.experiments.config import Places
from src.experiments.dataset_protocols import Dataset
from src.experiments.interfaces import NewTokens
from src.experiments.kinds import DECODER
from src.recipes import pretraining
from src.recipes.training_recipe import TrainingRecipe
from src.runs.context import Run


class Config(TrainingRecipe):
    """An experiment of this recipe, without its "recipe" key."""

    answers: Answers | None = None
    """Last answers of validation conversations to generate and score at each evaluation; None for no answers."""
    sampled: SampledAnswers | None = None
    """Last answers of validation conversations to generate by sampling, several times each."""
    harness: Harness | None = None
    """Tasks of lm-evaluation-harness to score; None for none."""
    poly_epsilon: float = Field(default=0.0, ge=0)
    """Weight of 1 - p in the training loss, where p is the target's probability; see `training.loss.cross_entropy`."""

    @model_validator(mode="after")
    def _reads_text(self) -> "Config":
        pretraining.require_text(self, DECODER)
        return self

    def checks(self, places: Places) -> list[Callable[[], object]]:
        """The checks of text recipes, and that prompts and answers fit the model."""
        questions = [each for each in (self.answers, self.sampled) if each]
        names = [name for each in questions for name in each.score_names()]
        longest = NewTokens.longest({"answers": self.answers, "sampled": self.sampled})
        return [
            *pretraining.checks(self, places, [*pretraining.score_names(), "val_accuracy", *names]),
            lambda: longest and self.data.check_length(self.model.longest_sequence(places), longest),
        ]

    def training_loss(self) -> Callable[..., Any]:
        from src.training.loss import causal_lm_loss

        options = (self.loop.label_smoothing, self.loop.z_loss, self.poly_epsilon) if self.loop else ()
        return self.in_chunks(lambda model, batch: causal_lm_loss(model, batch, *options))

    def run(self, run: Run) -> None:
        """Train to the last step, or evaluate. More scores: val_accuracy and the scores of answers. Collective."""
        from src.training.loss import causal_lm_loss

        def require_questions(train: Dataset, val: Any) -> Mapping[str, str]:
            for questions in (self.answers, self.sampled):
                if questions:
                    questions.require(val)
            return {}

        def more_scores(val: Any, scorer: pretraining.Scorer) -> dict[str, float]:
            scores = scorer.answers(self.answers, val) if self.answers else {}
            return scores | (scorer.sampled_answers(self.sampled, val) if self.sampled else {})

        pretraining.train_on_text(
            self,
            run,
            pretraining.TextTraining(causal_lm_loss, accuracy=True, begin=require_questions, more_scores=more_scores),
        )
