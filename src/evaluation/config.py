"""What an experiment says of the questions that its model is asked: some at each evaluation, and the inference after the training.

For recipes whose data set has `num_questions`, `row(i)`, `source(i)`, `prompt(i)` and `collate_prompts`, and whose model has transformers'
`generate`.
"""

from collections import Counter
from typing import Any

from pydantic import Field, model_validator

from src.config import Config, unknown_text
from src.errors import ConfigError, DataError
from src.metrics import answers as answered
from src.registry import Metric, Part

PREFIX = "inference/"
"""Of the names of the scores of an inference."""


def names(metrics: list[Part]) -> list[str]:
    """The scores that `metrics` give. One whose library takes long to load has a function `names`; the others are given no answers."""
    return [name for metric in metrics for name in metric.ask("names") or metric([])]


def _each_once(metrics: list[Part]) -> None:
    twice = [name for name, count in Counter(names(metrics)).items() if count > 1]
    if twice:
        raise ValueError(f"metrics: {', '.join(twice)} would be measured twice, and one of the values lost. Name each metric once.")


class Answers(Config):
    """Questions answered by greedy generation at each evaluation, and how the answers are scored."""

    questions: int = Field(gt=0)
    """The first ones of the validation set."""
    max_new_tokens: int = Field(gt=0)
    metrics: list[Metric] = Field(min_length=1)
    best_answer: bool = False
    """Rows that ask one question on the same contexts count as one, with the best of their scores."""

    @model_validator(mode="after")
    def _measured_once(self) -> "Answers":
        _each_once(self.metrics)
        return self

    def require(self, dataset: Any) -> None:
        """Raises DataError where `dataset` has fewer questions than are asked."""
        if self.questions > dataset.num_questions:
            raise DataError(f"answers.questions: {self.questions} of a validation set of {dataset.num_questions}. Ask for fewer.")


class Inference(Config):
    """All questions of a split, or some of them, answered by the trained model: <run>/inference/<split>.jsonl, and how they are scored.

    Which questions: first the `index_file` chooses, then `datasets`, then `rows`.
    """

    max_new_tokens: int = Field(gt=0)
    metrics: list[Metric] = Field(min_length=1)
    split: str = Field(default="val", pattern=r"^\w[\w.-]*$")
    """Of the prepared data: <split>.jsonl."""
    rows: int | None = Field(default=None, gt=0)
    """The first ones; None for all."""
    datasets: list[str] | None = Field(default=None, min_length=1)
    """Only the rows of these sources, named as in "em/<source>"; None for all."""
    index_file: str | None = Field(default=None, pattern=r"^\w[\w.-]*$")
    """A file in the folder of the prepared data, with the number of a row of the split on each line, counted from 0; None for all rows."""
    best_answer: bool = False
    """Rows that ask one question on the same contexts count as one, with the best of their scores."""

    @model_validator(mode="after")
    def _measured_once(self) -> "Inference":
        _each_once(self.metrics)
        return self

    def chosen(self, dataset: Any, listed: list[int] | None = None) -> list[int]:
        """Which questions of `dataset` are asked. listed: the numbers in `index_file`, where there is one.

        Raises:
            ConfigError: a source that no row is of.
            DataError: nothing is left to ask, there are fewer rows than `rows`, or `listed` has a number that is no row's, or one twice.
        """
        assert (listed is None) == (self.index_file is None)
        if self.datasets is not None:
            known = {dataset.source(i) for i in range(dataset.num_questions)}
            for name in self.datasets:
                if name not in known:
                    raise ConfigError(f"inference.datasets: {unknown_text('source', name, known)}")
        place = f"inference.index_file: {self.index_file}"
        found = answered.chosen(dataset.source, dataset.num_questions, listed, self.datasets, place)
        if not found:
            raise DataError("inference: no row of the split is in inference.index_file and of inference.datasets: nothing to ask.")
        if self.rows is not None and self.rows > len(found):
            raise DataError(f"inference.rows: {self.rows} of {len(found)} that there are to choose from. Ask for fewer, or for null.")
        return found[: self.rows]


def most_new_tokens(answers: Answers | None, inference: Inference | None) -> int:
    """Most tokens that are generated after a prompt; 0 where nothing is asked."""
    return max((asked.max_new_tokens for asked in (answers, inference) if asked), default=0)


def measured(answers: Answers | None) -> set[str]:
    """The scores that an evaluation has of `answers`."""
    return set(names(answers.metrics)) if answers else set()
