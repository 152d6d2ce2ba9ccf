"""Settings of generated answers: during evaluations, and after training."""

from collections import Counter
from collections.abc import Sequence
from typing import Literal, Self

from pydantic import Field, model_validator

from src.errors import ConfigError, DataError
from src.evaluation.metrics import answers
from src.experiments.config import Config, unknown_text
from src.experiments.dataset_protocols import ContextDataset, QuestionDataset
from src.experiments.interfaces import DatasetField, MetricConfig, MetricField


def score_names(metrics: Sequence[MetricConfig]) -> list[str]:
    """The names of all scores of `metrics`."""
    return [name for metric in metrics for name in metric.score_names()]


def _require_distinct_scores(metrics: Sequence[MetricConfig]) -> None:
    twice = [name for name, count in Counter(score_names(metrics)).items() if count > 1]
    if twice:
        raise ValueError(
            f"metrics: {', '.join(twice)} would be measured twice, and one of the values lost. Name each metric once."
        )


class Decoding(Config):
    """How an answer is searched for: token by token the likeliest, or by beams."""

    num_beams: int = Field(default=1, ge=1)
    """Beginnings of an answer that are kept at each token; of the finished ones the best is taken. 1: greedy."""
    length_penalty: float = 1.0
    """Of beams: log-probabilities are divided by length ** length_penalty,
    so above 0 long answers are preferred. T5 has 0.6."""

    @model_validator(mode="after")
    def _penalises_beams(self) -> Self:
        if self.num_beams == 1 and self.length_penalty != 1.0:
            raise ValueError("length_penalty: it is of beams, and without them it would be ignored. Set num_beams.")
        return self

    def decoding(self) -> dict[str, int | float]:
        """The choice, for transformers' `generate`; {} where nothing differs from greedy generation."""
        return {"num_beams": self.num_beams, "length_penalty": self.length_penalty} if self.num_beams > 1 else {}


class Answers(Decoding):
    """Questions answered at each evaluation, and the metrics of the answers."""

    questions: int = Field(gt=0)
    """The first ones of the validation set."""
    max_new_tokens: int = Field(gt=0)
    metrics: list[MetricField] = Field(min_length=1)
    best_answer: bool = False
    """Rows that ask one question on the same contexts count as one, with the best of their scores."""
    shuffled_context: bool = False
    """A control: ask all questions again, each with another question's contexts: scores em_shuffled_context."""

    @model_validator(mode="after")
    def _scores_are_distinct(self) -> "Answers":
        _require_distinct_scores(self.metrics)
        return self

    def score_names(self) -> list[str]:
        """The names of all scores of these answers."""
        names = score_names(self.metrics)
        return names + [name + answers.SHUFFLED for name in names if self.shuffled_context]

    def require(self, dataset: ContextDataset) -> None:
        """Raises DataError if `dataset` has fewer questions than requested, ConfigError without contexts to shuffle."""
        if self.shuffled_context and not dataset.reads_contexts:
            raise ConfigError("answers.shuffled_context: these data are read without contexts. Leave it out.")
        if self.questions > dataset.num_questions:
            raise DataError(
                f"answers.questions: {self.questions} of a validation set of {dataset.num_questions}. Ask for fewer."
            )


class SampledAnswers(Config):
    """Questions answered several times at each evaluation, by drawing from the model, and the answers' metrics."""

    questions: int = Field(gt=0)
    """The first ones of the validation set."""
    samples: int = Field(gt=1)
    """Answers to each."""
    max_new_tokens: int = Field(gt=0)
    metrics: list[MetricField] = Field(min_length=1)
    """Those that give each answer a score."""
    temperature: float = Field(default=1.0, gt=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    generation_batch: int = Field(default=64, gt=0)
    """Answers that are drawn together.
    What is drawn depends on it, and not on the micro-batch or the number of processes."""

    @model_validator(mode="after")
    def _scores_are_distinct(self) -> "SampledAnswers":
        _require_distinct_scores(self.metrics)
        return self

    def score_names(self) -> list[str]:
        """The names of all scores: of "solved" and 8 samples solved_mean@8, solved_mean@8_interval, solved_pass@8."""
        return [f"{name}_{kind}" for name in score_names(self.metrics) for kind in self.kinds()]

    def kinds(self) -> tuple[str, str, str]:
        """Of the scores of a metric: the mean over all answers; half of its 95 % interval, over questions; the share of
        questions of which an answer has the score 1 or more."""
        return f"mean@{self.samples}", f"mean@{self.samples}_interval", f"pass@{self.samples}"

    def require(self, dataset: QuestionDataset) -> None:
        """Raises DataError if `dataset` has fewer questions than requested."""
        if self.questions > dataset.num_questions:
            raise DataError(
                f"sampled.questions: {self.questions} of a validation set of {dataset.num_questions}. Ask for fewer."
            )


class Inference(Decoding):
    """All or some questions of a split, answered by the model (<run>/inference/<split>.jsonl), and their metrics.

    Which questions: first those of the `index_file`, of these the ones of `datasets`, of these the first `rows`.
    """

    max_new_tokens: int = Field(gt=0)
    metrics: list[MetricField] = Field(min_length=1)
    split: str = Field(default="val", pattern=r"^\w[\w.-]*$")
    """Of the prepared data: <split>.jsonl."""
    rows: int | None = Field(default=None, gt=0)
    """The first ones; None for all."""
    datasets: list[str] | None = Field(default=None, min_length=1)
    """Only the rows of these sources, named as in "em/<source>"; None for all."""
    index_file: str | None = Field(default=None, pattern=r"^\w[\w.-]*$")
    """A file in the folder of the prepared data, with the number of a row of the split on each line,
    counted from 0; None for all rows."""
    best_answer: bool = False
    """Rows that ask one question on the same contexts count as one, with the best of their scores."""
    wrong_contexts: bool = False
    """A control: ask all questions again, each with another question's contexts:
    scores em_wrong_context, and em_gain, the difference."""

    @model_validator(mode="after")
    def _scores_are_distinct(self) -> "Inference":
        _require_distinct_scores(self.metrics)
        return self

    def select(self, dataset: QuestionDataset, row_indices: list[int] | None = None) -> list[int]:
        """Indices of the questions to answer. row_indices: content of `index_file`, if given.

        Raises:
            ConfigError: a source that no row is of.
            DataError: nothing is left to ask, there are fewer rows than `rows`, or one of `row_indices` is no row's or
                is given twice.
        """
        assert (row_indices is None) == (self.index_file is None)
        if self.datasets is not None:
            sources = {dataset.source(i) for i in range(dataset.num_questions)}
            for name in self.datasets:
                if name not in sources:
                    raise ConfigError(f"inference.datasets: {unknown_text('source', name, sources)}")
        place = f"inference.index_file: {self.index_file}"
        rows = answers.select_rows(dataset.source, dataset.num_questions, row_indices, self.datasets, place)
        if not rows:
            raise DataError(
                "inference: no row of the split is in inference.index_file and of inference.datasets: nothing to ask."
            )
        if self.rows is not None and self.rows > len(rows):
            raise DataError(
                f"inference.rows: {self.rows} of {len(rows)} that there are to choose from. Ask for fewer, or for null."
            )
        return rows[: self.rows]


class Answering(Decoding):
    """How an encoder-decoder answers the rows of a task, in evaluations and predictions."""

    by: Literal["generate", "rank", "teacher_forced"] = "generate"
    """generate: token by token. rank: the likeliest of the task's answers. teacher_forced: the likeliest token at each
    place, given the right ones before; predictions are then generated, as the right ones are not known there."""
    length_normalised: bool = False
    """Whether answers are ranked by their mean log-probability per token, not by that of the whole."""

    @model_validator(mode="after")
    def _normalises_a_ranking(self) -> "Answering":
        if self.length_normalised and self.by != "rank":
            raise ValueError(f"length_normalised: only ranked answers are, and by is {self.by!r}.")
        if self.num_beams > 1 and self.by == "rank":
            raise ValueError("num_beams: ranked answers are not searched for. Leave it out.")
        return self


class Predictions(Config):
    """Rows of tasks that the trained model answers:
    <run>/predictions/<task>.<split>.jsonl, and of tests the files for GLUE's server."""

    checkpoint: Literal["best", "last"] = "best"
    """Whose weights answer: best, of the evaluation with the best `loop.best_metric`;
    last, of the end of the training."""
    splits: list[Literal["train", "val", "test"]] = Field(default=["val"], min_length=1)
    """Of every task that has them."""
    also: list[DatasetField] = []
    """Tasks that are not trained on."""
