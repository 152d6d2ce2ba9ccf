"""Recipe `lm`: train a causal language model to predict the next token, from scratch or from pretrained weights."""

from collections.abc import Callable
from typing import Any

from pydantic import model_validator

from src.evaluation.harness import Harness
from src.experiments.config import Places
from src.experiments.kinds import DECODER
from src.recipes import pretraining
from src.recipes.training_recipe import TrainingRecipe
from src.runs.context import Run


class Config(TrainingRecipe):
    """Config of an experiment with this recipe, without its "recipe" key."""

    harness: Harness | None = None
    """Tasks of lm-evaluation-harness to score; None for none."""

    @model_validator(mode="after")
    def _reads_text(self) -> "Config":
        pretraining.require_text(self, DECODER)
        return self

    def checks(self, places: Places) -> list[Callable[[], object]]:
        return pretraining.checks(self, places, [*pretraining.score_names(), pretraining.BITS_PER_BYTE])

    def training_loss(self) -> Callable[..., Any]:
        from src.training.loss import causal_lm_loss

        return self.with_loop_options(causal_lm_loss)

    def run(self, run: Run) -> None:
        """Train or evaluate; see `pretraining.train_on_text` for the scores. Collective."""
        from src.training.loss import causal_lm_loss

        pretraining.train_on_text(self, run, pretraining.TextTraining(causal_lm_loss, bits_per_byte=True))
