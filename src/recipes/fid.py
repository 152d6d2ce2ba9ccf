"""Recipe `fid`: Fusion-in-Decoder answers questions: an encoder reads each passage on its own, the decoder all of them together."""

from pydantic import model_validator

from src.config import Places
from src.errors import check_all
from src.recipes.question_answering import QuestionAnswering, carry_out, checks
from src.registry import FUSION_IN_DECODER
from src.runs.context import Run


class Config(QuestionAnswering):
    """An experiment of this recipe, without its "recipe" key."""

    @model_validator(mode="after")
    def _reads_passages(self) -> "Config":
        self.require(FUSION_IN_DECODER, "fid_qa")
        return self


def check(config: Config, places: Places) -> None:
    """Raises a UserError for what can be known to fail before anything is loaded."""
    from src.data.qa import row_index

    check_all(*checks(config, places, FUSION_IN_DECODER, row_index.check))


def run(config: Config, run: Run) -> None:
    """Train to the last step, or score the model as it stands; and then make the inference. Collective."""
    from src.data.qa import row_index
    from src.data.text import tokenizers
    from src.training.loss import read_loss

    carry_out(config, run, read_loss, tokenizers.load, row_index.read)
