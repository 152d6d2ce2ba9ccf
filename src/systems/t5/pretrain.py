"""Recipe `t5_pretrain`: pre-train an encoder-decoder by denoising text, from scratch or from existing weights.

In addition to the scores of every pre-training it has val_accuracy, the share of target tokens that are the most likely
ones given the tokens before; and with `depth` data val_sentence_loss and val_sentence_accuracy, only over sentence
tokens.
"""

from collections.abc import Callable
from typing import Any

from pydantic import model_validator

from src.experiments.config import Places
from src.experiments.kinds import ENCODER_DECODER
from src.recipes import pretraining
from src.recipes.training_recipe import TrainingRecipe
from src.runs.context import Run

SENTENCE_SCORES = ("val_sentence_loss", "val_sentence_accuracy")
"""Scores of data sets with `sentence_targets`."""


class Config(TrainingRecipe):
    """An experiment of this recipe, without its "recipe" key."""

    @model_validator(mode="after")
    def _reads_text(self) -> "Config":
        pretraining.require_text(self, ENCODER_DECODER)
        return self

    def checks(self, places: Places) -> list[Callable[[], object]]:
        sentences = SENTENCE_SCORES if self.data.validation.name == "depth" else ()
        scores = [*pretraining.score_names(), "val_accuracy", *sentences]
        return [
            *pretraining.checks(self, places, scores),
            lambda: self.model.check_kind(ENCODER_DECODER, places),
        ]

    def training_loss(self) -> Callable[..., Any]:
        return self.with_loop_options(denoising_loss)

    def run(self, run: Run) -> None:
        """Train to the last step, or evaluate. Collective."""
        pretraining.train_on_text(
            self, run, pretraining.TextTraining(denoising_loss, accuracy=True, more_scores=sentence_scores)
        )


def denoising_loss(model: Any, batch: Any, *options: float) -> Any:
    """Summed loss of a batch. options: label smoothing and z-loss."""
    from src.training.loss import depth_loss, seq2seq_loss

    return (depth_loss if "cross_mask" in batch else seq2seq_loss)(model, batch, *options)


def sentence_scores(val: Any, scorer: pretraining.Scorer) -> dict[str, float]:
    """`SENTENCE_SCORES` of `depth` data; empty for other data."""
    sentence_targets = getattr(val, "sentence_targets", None)
    if sentence_targets is None:
        return {}
    sentences = scorer.loss_sums(sentence_targets())
    return dict(zip(SENTENCE_SCORES, (sentences.loss, sentences.accuracy), strict=True))
