"""Recipe `t5_pretrain`: an encoder-decoder learns to restore what is missing from texts, from scratch or from given weights."""

from typing import Any

from pydantic import model_validator

from src.config import Places
from src.errors import check_all
from src.recipes.pretraining import SENTENCE_SCORES, Pretraining, carry_out, checks
from src.registry import ENCODER_DECODER, check_kind
from src.runs.context import Run


class Config(Pretraining):
    """An experiment of this recipe, without its "recipe" key."""

    @model_validator(mode="after")
    def _reads_and_writes(self) -> "Config":
        self.require(ENCODER_DECODER)
        return self


def check(config: Config, places: Places) -> None:
    """Raises a UserError for what can be known to fail before anything is loaded."""

    sentences = SENTENCE_SCORES if config.data.name == "depth" else ()
    check_all(*checks(config, places, ["val_accuracy", *sentences]), lambda: check_kind(config.model, ENCODER_DECODER, places))


def run(config: Config, run: Run) -> None:
    """Train to the last step. Scores: train_loss, val_loss (nats per token), val_perplexity, and val_accuracy: the share of target tokens
    that the model finds the likeliest, given those before; with `depth` data the last two of the sentence tokens alone, too. Collective.
    """
    from src.data.text import tokenizers
    from src.training.depth_loss import depth_loss
    from src.training.loss import seq2seq_loss

    def loss(model: Any, batch: Any, *more: float) -> Any:
        return (depth_loss if "cross_mask" in batch else seq2seq_loss)(model, batch, *more)

    carry_out(config, run, loss, tokenizers.load, accuracy=True)
