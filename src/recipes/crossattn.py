"""Recipe `crossattn`: train cross-attention layers in a frozen language model, to answer questions about a context that they read."""

from pydantic import model_validator

from src import distributed
from src.config import Places
from src.errors import check_all
from src.recipes.question_answering import QuestionAnswering, carry_out, checks
from src.registry import CROSS_ATTENTION
from src.runs.context import Run


class Config(QuestionAnswering):
    """An experiment of this recipe, without its "recipe" key."""

    @model_validator(mode="after")
    def _reads_contexts(self) -> "Config":
        self.require(CROSS_ATTENTION, "qa")
        return self


def check(config: Config, places: Places) -> None:
    """Raises a UserError for what can be known to fail before anything is loaded."""
    from src.data.qa import row_index

    check_all(
        *checks(config, places, CROSS_ATTENTION, row_index.check),
        lambda: config.data.ask("check_base", places, config.model),
    )


def run(config: Config, run: Run) -> None:
    """Train to the last step, or score the model as it stands; and then make the inference. Collective."""
    from src.data.qa import row_index
    from src.data.text import tokenizers
    from src.training.loss import read_loss

    with distributed.together():
        config.data.ask("check_base", run.places, config.model)  # a parent may have been trained since the check
    carry_out(config, run, read_loss, tokenizers.load, row_index.read)
