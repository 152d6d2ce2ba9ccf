"""Recipe `seq2seq`: an encoder-decoder is fine-tuned on tasks that are written as text, such as those of GLUE and SuperGLUE."""

from typing import Any

from src.config import Places
from src.errors import check_all
from src.recipes.text_to_text import Table, TextToText, carry_out, checks
from src.registry import Part
from src.runs.context import Run


class Config(TextToText):
    """An experiment of this recipe, without its "recipe" key."""


def check(config: Config, places: Places) -> None:
    """Raises a UserError for what can be known to fail before anything is loaded."""
    check_all(*checks(config, places, _table()))


def run(config: Config, run: Run) -> None:
    """Train to the last step, or score the model as it stands; and then make the predictions. Collective."""
    from src.training.loss import seq2seq_loss

    carry_out(config, run, seq2seq_loss, _table())


def _table() -> Table:
    from src.data import jsonl
    from src.data.tasks import registry as tasks
    from src.data.text import tokenizers

    def named(part: Part, places: Places) -> Any:
        found: Any = part.config
        return tasks.of_corpus(found.task, jsonl.corpus(places, found.corpus))

    def has(part: Part, places: Places, split: str) -> bool:
        return (jsonl.corpus(places, part.config.model_dump()["corpus"]) / f"{split}.jsonl").is_file()

    return Table(named, has, tokenizers.load)
