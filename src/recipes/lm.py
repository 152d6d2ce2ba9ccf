"""Recipe `lm`: train a causal language model on the next token, from scratch or from given weights."""

from pydantic import model_validator

from src.config import Places
from src.errors import check_all
from src.recipes.pretraining import Pretraining, carry_out, checks
from src.registry import DECODER
from src.runs.context import Run


class Config(Pretraining):
    """An experiment of this recipe, without its "recipe" key."""

    @model_validator(mode="after")
    def _reads_text_alone(self) -> "Config":
        if self.model.ask("reads_contexts"):
            raise ValueError("the model of this recipe reads no contexts; recipe 'crossattn' trains a 'cross_attention' model.")
        if self.data.name in ("qa", "fid_qa"):
            reads = {"qa": "crossattn", "fid_qa": "fid"}[self.data.name]
            raise ValueError(f"this recipe would leave the contexts of {self.data.name!r} data unread; recipe {reads!r} reads them.")
        self.require(DECODER)
        return self


def check(config: Config, places: Places) -> None:
    """Raises a UserError for what can be known to fail before anything is loaded."""
    check_all(*checks(config, places))


def run(config: Config, run: Run) -> None:
    """Train to the last step. Scores: train_loss, val_loss (nats per token) and val_perplexity. Collective."""
    from src.data.text import tokenizers
    from src.training.loss import causal_lm_loss

    carry_out(config, run, causal_lm_loss, tokenizers.load)
