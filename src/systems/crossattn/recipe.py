"""Recipe `crossattn`: train cross-attention layers in a frozen language model to answer questions about a context."""

from collections.abc import Callable
from typing import Any

from pydantic import model_validator

from src.evaluation.config import Answers, Inference
from src.experiments.config import Places
from src.experiments.kinds import CROSS_ATTENTION
from src.recipes.training_recipe import TrainingRecipe
from src.runs.context import Run
from src.support import distributed
from src.support.call_once import call_once
from src.systems.crossattn import question_answering


class Config(TrainingRecipe):
    """An experiment of this recipe, without its "recipe" key."""

    answers: Answers | None = None
    """Validation questions to answer and score at each evaluation; None for no questions."""
    inference: Inference | None = None
    """Questions to answer after training; None for no questions."""

    @model_validator(mode="after")
    def _reads_questions(self) -> "Config":
        question_answering.require_questions(self, CROSS_ATTENTION, "qa")
        return self

    def checks(self, places: Places) -> list[Callable[[], object]]:
        """The checks of `question_answering`, and that this model's base has encoded the stored contexts."""
        checks = question_answering.checks(self, places, CROSS_ATTENTION, self.answers, self.inference)
        return [*checks, lambda: call_once(self._check_base, places)]

    def training_loss(self) -> Callable[..., Any]:
        from src.training.loss import context_lm_loss

        return self.with_loop_options(context_lm_loss)

    def run(self, run: Run) -> None:
        """Train, or evaluate without training; then run inference. Collective."""
        from src.training.loss import context_lm_loss

        with distributed.raise_together():
            self._check_base(run.places)  # a parent can have been trained since the check
        question_answering.train_on_questions(self, run, context_lm_loss, self.answers, self.inference)

    def _check_base(self, places: Places) -> None:
        from src.systems.crossattn.data.cross_attention import Config as QAConfig

        assert isinstance(self.data, QAConfig), "the validator has checked its name"
        self.data.check_base(places, self.model)
