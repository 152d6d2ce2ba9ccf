"""Settings of generated answers, during evaluations and after training."""

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
    """Names of all scores of `metrics`."""
    return [name for metric in metrics for name in metric.score_names()]


def _require_distinct_scores(metrics: Sequence[MetricConfig]) -> None:
    twice = [name for name, count in Counter(score_names(metrics)).items() if count > 1]
    if twice:
        raise ValueError(f"metrics: duplicate scores {', '.join(twice)}. Use each metric once.")


class Decoding(Config):
    """Greedy decoding or beam search."""

    num_beams: int = Field(default=1, ge=1)
    """Beams of the search; the best finished one is the answer. 1: greedy."""
    length_penalty: float = 1.0
    """Beam search divides log-probabilities by length ** length_penalty, so values above 0 favor long answers. T5:
    0.6."""

    @model_validator(mode="after")
    def _penalises_beams(self) -> Self:
        if self.num_beams == 1 and self.length_penalty != 1.0:
            raise ValueError(
                "length_penalty: ignored without beam search. Set num_beams above 1, or remove length_penalty."
            )
        return self

    def decoding(self) -> dict[str, int | float]:
        """Options for transformers' `generate`; {} for greedy decoding."""
        return {"num_beams": self.num_beams, "length_penalty": self.length_penalty} if self.num_beams > 1 else {}


class Answers(Decoding):
    """Questions answered at each evaluation, and the metrics of the answers."""

    questions: int = Field(gt=0)
    """Number of questions, from the start of the validation set."""
    max_new_tokens: int = Field(gt=0)
    """Maximum tokens of an answer."""
    metrics: list[MetricField] = Field(min_length=1)
    """Metrics of the answers."""
    best_answer: bool = False
    """Rows that ask one question on the same contexts count as one, with the best of their scores."""
    shuffled_context: bool = False
    """A control: answer all questions again, each with another question's contexts. Scores: em_shuffled_context."""

    @model_validator(mode="after")
    def _scores_are_distinct(self) -> "Answers":
        _require_distinct_scores(self.metrics)
        return self

    def score_names(self) -> list[str]:
        """Names of all scores of these answers."""
        names = score_names(self.metrics)
        return names + [name + answers.SHUFFLED for name in names if self.shuffled_context]

    def require(self, dataset: ContextDataset) -> None:
        """Raise DataError if `dataset` has fewer questions than requested, or ConfigError if there are no contexts to
        shuffle."""
        if self.shuffled_context and not dataset.reads_contexts:
            raise ConfigError("answers.shuffled_context: these data have no contexts. Remove it.")
        if self.questions > dataset.num_questions:
            raise DataError(
                f"answers.questions: {self.questions} requested, only {dataset.num_questions} available. "
                f"Set at most {dataset.num_questions}."
            )


class SampledAnswers(Config):
    """Questions with several sampled answers at each evaluation, and the answers' metrics."""

    questions: int = Field(gt=0)
    """Number of questions, from the start of the validation set."""
    samples: int = Field(gt=1)
    """Answers per question."""
    max_new_tokens: int = Field(gt=0)
    """Maximum tokens of an answer."""
    metrics: list[MetricField] = Field(min_length=1)
    """Metrics with a score for each answer."""
    temperature: float = Field(default=1.0, gt=0)
    """Logits are divided by it before sampling."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Sample from the most likely tokens whose probabilities sum to this."""
    generation_batch: int = Field(default=64, gt=0)
    """Answers sampled in one batch. Samples depend on it, but not on the micro-batch or the number of processes."""

    @model_validator(mode="after")
    def _scores_are_distinct(self) -> "SampledAnswers":
        _require_distinct_scores(self.metrics)
        for name in (name for metric in self.metrics for name in metric.set_scores()):
            raise ValueError(f"metrics: {name!r} is not a score of single answers. Use another metric.")
        return self

    def score_names(self) -> list[str]:
        """Names of all scores. For "solved" and 8 samples: solved_mean@8, solved_mean@8_interval, solved_pass@8."""
        return [f"{name}_{kind}" for name in score_names(self.metrics) for kind in self.kinds()]

    def kinds(self) -> tuple[str, str, str]:
        """Suffixes of a metric's scores: mean over all answers; half of its 95 % interval, over questions; share of
        questions with an answer of score 1 or more."""
        return f"mean@{self.samples}", f"mean@{self.samples}_interval", f"pass@{self.samples}"

    def require(self, dataset: QuestionDataset) -> None:
        """Raise DataError if `dataset` has fewer questions than requested."""
        if self.questions > dataset.num_questions:
            raise DataError(
                f"sampled.questions: {self.questions} requested, only {dataset.num_questions} available. "
                f"Set at most {dataset.num_questions}."
            )


class Inference(Decoding):
    """Answer questions of a split after training (<run>/inference/<split>.jsonl), and score the answers.

    Questions are selected by `index_file`, then by `datasets`, then the first `rows` of these.
    """

    max_new_tokens: int = Field(gt=0)
    """Maximum tokens of an answer."""
    metrics: list[MetricField] = Field(min_length=1)
    """Metrics of the answers."""
    split: str = Field(default="val", pattern=r"^\w[\w.-]*$")
    """Name of the file <split>.jsonl of the prepared data."""
    rows: int | None = Field(default=None, gt=0)
    """Maximum number of questions; None for all."""
    datasets: list[str] | None = Field(default=None, min_length=1)
    """Sources to include, named as in "em/<source>"; None for all."""
    index_file: str | None = Field(default=None, pattern=r"^\w[\w.-]*$")
    """A file in the folder of the prepared data with one row number of the split per line, counted from 0; None for all
    rows."""
    best_answer: bool = False
    """Rows that ask one question on the same contexts count as one, with the best of their scores."""
    wrong_contexts: bool = False
    """A control: answer all questions again, each with another question's contexts. Scores: em_wrong_context, and
    em_gain, the difference."""

    @model_validator(mode="after")
    def _scores_are_distinct(self) -> "Inference":
        _require_distinct_scores(self.metrics)
        return self

    def select(self, dataset: QuestionDataset, row_indices: list[int] | None = None) -> list[int]:
        """Select the indices of the questions to answer. row_indices: content of `index_file`, if set.

        Raises:
            ConfigError: no row has one of the sources.
            DataError: no question is left, there are fewer rows than `rows`, or `row_indices` has an invalid or
                duplicate number.
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
                "inference: no row of the split is in both inference.index_file and inference.datasets. "
                "Change one of them."
            )
        if self.rows is not None and self.rows > len(rows):
            raise DataError(f"inference.rows: {self.rows} requested, only {len(rows)} available. Set null for all.")
        return rows[: self.rows]


class Answering(Decoding):
    """How an encoder-decoder answers the rows of a task, for evaluations and predictions."""

    by: Literal["generate", "rank", "teacher_forced"] = "generate"
    """generate: token by token. rank: the most likely of the task's answers. teacher_forced: the most likely token at
    each position, given the target before it; predictions are generated instead, as they have no target."""
    length_normalised: bool = False
    """Whether answers are ranked by mean log-probability per token instead of the sum."""

    @model_validator(mode="after")
    def _normalises_a_ranking(self) -> "Answering":
        if self.length_normalised and self.by != "rank":
            raise ValueError(f"length_normalised: ignored with by {self.by!r}. Remove it, or set by to 'rank'.")
        if self.num_beams > 1 and self.by == "rank":
            raise ValueError("num_beams: ignored with by 'rank'. Remove it, or set by to 'generate'.")
        return self


class Predictions(Config):
    """Predictions of the trained model for rows of tasks: <run>/predictions/<task>.<split>.jsonl, and for test splits
    the files for GLUE's server."""

    checkpoint: Literal["best", "last"] = "best"
    """Checkpoint to predict with. best: by `loop.best_metric`. last: at the end of the training."""
    splits: list[Literal["train", "val", "test"]] = Field(default=["val"], min_length=1)
    """Splits of every task, where available."""
    extra_tasks: list[DatasetField] = []
    """Further tasks that are not in the training data."""
