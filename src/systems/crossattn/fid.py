"""Recipe `fid`: Fusion-in-Decoder. The encoder reads each passage separately, the decoder reads all passages."""

from collections.abc import Callable
from typing import Any, ClassVar

from pydantic import model_validator

from src.evaluation.config import Answers, Inference
from src.experiments.config import Places
from src.experiments.kinds import FUSION_IN_DECODER
from src.recipes.training_recipe import TrainingRecipe
from src.runs.context import Run
from src.systems.crossattn import question_answering


class Config(TrainingRecipe):
    """An experiment of this recipe, without its "recipe" key."""

    takes_chunks: ClassVar[bool] = False

    answers: Answers | None = None
    """Validation questions to answer and score at each evaluation; None for no questions."""
    inference: Inference | None = None
    """Questions to answer after training; None for no questions."""

    @model_validator(mode="after")
    def _reads_questions(self) -> "Config":
        question_answering.require_questions(self, FUSION_IN_DECODER, "fid_qa")
        return self

    def checks(self, places: Places) -> list[Callable[[], object]]:
        return question_answering.checks(self, places, FUSION_IN_DECODER, self.answers, self.inference)

    def training_loss(self) -> Callable[..., Any]:
        from src.training.loss import context_lm_loss

        return self.with_loop_options(context_lm_loss)

    def run(self, run: Run) -> None:
        """Train, or evaluate without training; then run inference. Collective."""
        from src.training.loss import context_lm_loss

        question_answering.train_on_questions(self, run, context_lm_loss, self.answers, self.inference)
