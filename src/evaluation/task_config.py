"""What an experiment says of the answers of an encoder-decoder to the rows of tasks."""

from typing import Literal

from pydantic import Field, model_validator

from src.config import Config
from src.registry import Dataset


class Answering(Config):
    """How a row is answered, in evaluations and in the predictions."""

    by: Literal["generate", "rank", "teacher_forced"] = "generate"
    """generate: written greedily. rank: the likeliest of the task's answers. teacher_forced: the likeliest token at each place, given the
    right ones before; predictions are then generated, as nobody knows the right ones."""
    length_normalised: bool = False
    """Whether answers are ranked by their mean log-probability per token, not by that of the whole."""

    @model_validator(mode="after")
    def _ranked_or_not(self) -> "Answering":
        if self.length_normalised and self.by != "rank":
            raise ValueError(f"length_normalised: only ranked answers are, and by is {self.by!r}.")
        return self


class Predictions(Config):
    """Rows that the trained model answers: <run>/predictions/<task>.<split>.jsonl, and of GLUE's tests the files for its server.

    The weights are those of the last step. For the best, an experiment of its own has `evaluation`, and as its model
    {"name": "experiment", "exp_id": …, "checkpoint": "best"}.
    """

    splits: list[Literal["train", "val", "test"]] = Field(default=["val"], min_length=1)
    """Of every task that has them."""
    also: list[Dataset] = []
    """Tasks that are not trained on."""
