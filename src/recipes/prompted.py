"""Recipe `prompted`: a decoder answers questions on contexts that stand in its prompt. Trained whole, by adapters, or not at all."""

from pydantic import model_validator

from src.config import Places
from src.errors import check_all
from src.recipes.question_answering import QuestionAnswering, carry_out, checks
from src.registry import DECODER
from src.runs.context import Run


class Config(QuestionAnswering):
    """An experiment of this recipe, without its "recipe" key."""

    @model_validator(mode="after")
    def _prompts_a_decoder(self) -> "Config":
        self.require(DECODER, "prompted_qa")
        return self


def check(config: Config, places: Places) -> None:
    """Raises a UserError for what can be known to fail before anything is loaded."""
    from src.data.qa import row_index

    check_all(*checks(config, places, DECODER, row_index.check))


def run(config: Config, run: Run) -> None:
    """Train to the last step, or score the model as it stands; and then make the inference. Collective."""
    from src.data.qa import row_index
    from src.data.text import tokenizers
    from src.training.loss import causal_lm_loss

    carry_out(config, run, causal_lm_loss, tokenizers.load, row_index.read)
