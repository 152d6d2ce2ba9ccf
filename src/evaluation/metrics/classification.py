"""Set-level scores of answers that name a class or a number, as defined by GLUE and SuperGLUE and computed by T5.

An answer that is not a label has class -1, which is always wrong.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal

from pydantic import Field, model_validator

from src.errors import DataError
from src.experiments.config import Places
from src.experiments.dataset_protocols import Prediction
from src.experiments.interfaces import DatasetConfig, MetricConfig

Name = Literal["accuracy", "f1", "macro_f1", "matthews", "pearson", "spearman", "f1a", "question_match"]
_NO_NUMBER = -1.0


class Config(MetricConfig):
    """The scores, and the labels of the classes."""

    scores: list[Name] = Field(min_length=1)
    """Scores to report."""
    labels: list[str] = []
    """Texts of the classes 0, 1, 2…; not for pearson and spearman. f1 is the F1 of class 1."""

    @model_validator(mode="after")
    def _classes_are_named(self) -> "Config":
        if len(set(self.scores)) < len(self.scores):
            raise ValueError(f"scores: duplicate entry in {', '.join(self.scores)}. Name each score once.")
        if len(set(self.labels)) < len(self.labels):
            raise ValueError(f"labels: duplicate entry in {', '.join(self.labels)}. Name each label once.")
        for name in self.scores:
            if name in ("f1", "f1a", "question_match") and len(self.labels) != 2:
                raise ValueError(f"labels: {name} needs two labels, got {len(self.labels)}.")
            if name in ("macro_f1", "matthews") and len(self.labels) < 2:
                raise ValueError(f"labels: {name} needs two or more labels, got {len(self.labels)}.")
        return self

    def score_names(self) -> tuple[str, ...]:
        return tuple(self.scores)

    def set_scores(self) -> tuple[str, ...]:
        return tuple(name for name in self.scores if name != "accuracy")

    def check_data(self, data: DatasetConfig, places: Places) -> None:
        for each in data.first_questions(places):
            label = each.references[0].strip()
            if self.labels and label not in self.labels:
                raise DataError(
                    f"metric 'classification': expected answers that are one of labels {', '.join(self.labels)}, "
                    f"got {label[:60]!r}. Correct labels, or use another metric."
                )

    def score(self, answers: Sequence[Prediction]) -> dict[str, float | list[float]]:
        """Compute the configured scores. The first reference is the correct answer; surrounding white space is ignored.

        accuracy        per answer: 1 if it equals the reference, else 0.
        f1              from 0 to 1, of class 1; an invalid label counts as the wrong class.
        macro_f1        from 0 to 1: mean F1 over the labels.
        matthews        correlation coefficient x 100, as in CoLA; 0 if all are of one class. With two classes, an
                        invalid label counts as the wrong class: as a separate class (as in sklearn and so in
                        T5) it could correlate, so that nonsense for every sentence of one class would score 50
                        without a correct answer. With more classes it is a separate class.
        pearson         correlation x 100 of the numbers; an answer without a number is -1 (as in T5).
        spearman        the same, of their ranks. Both are 0 if all answers, or all references, are equal.
        f1a             MultiRC: `f1` over the answers of all questions.
        question_match  MultiRC: share of questions (source and `Prediction.question`) with only correct answers.
        """
        texts = [(answer.text.strip(), answer.references[0].strip()) for answer in answers]
        scores: dict[str, float | list[float]] = {}
        for name in self.scores:
            if name == "accuracy":
                scores[name] = [float(prediction == reference) for prediction, reference in texts]
            elif name == "question_match":
                scores[name] = _question_match(answers, texts)
            else:
                scores[name] = _OF_SETS[name](texts, self.labels)
        return scores


Texts = Sequence[tuple[str, str]]
"""Predictions and references."""


def _classes(texts: Texts, labels: Sequence[str]) -> tuple[list[int], list[int]]:
    """Classes of predictions and of references; -1 for an invalid label."""
    number = {label: index for index, label in enumerate(labels)}
    return [number.get(prediction, -1) for prediction, _ in texts], [
        number.get(reference, -1) for _, reference in texts
    ]


def _f1(texts: Texts, labels: Sequence[str]) -> float:
    predictions, references = _classes(texts, labels)
    return _mean_f1(references, _flip_invalid(predictions, references), [1])


def _flip_invalid(predictions: Sequence[int], references: Sequence[int]) -> list[int]:
    """Replace invalid labels by the wrong one of two classes."""
    return [p if p >= 0 else int(r == 0) for p, r in zip(predictions, references, strict=True)]


def _macro_f1(texts: Texts, labels: Sequence[str]) -> float:
    predictions, references = _classes(texts, labels)
    return _mean_f1(references, predictions, range(len(labels)))


def _mean_f1(references: Sequence[int], predictions: Sequence[int], classes: Sequence[int]) -> float:
    from sklearn.metrics import f1_score

    mean_f1 = f1_score(references, predictions, labels=classes, average="macro", zero_division=0.0)  # pyright: ignore[reportArgumentType]
    return float(mean_f1)


def _matthews(texts: Texts, labels: Sequence[str]) -> float:
    from sklearn.metrics import matthews_corrcoef

    predictions, references = _classes(texts, labels)
    if len(labels) == 2:
        predictions = _flip_invalid(predictions, references)
    if len({*predictions, *references}) < 2:
        return 0.0
    return 100 * float(matthews_corrcoef(references, predictions))


def _pearson(texts: Texts, labels: Sequence[str]) -> float:
    from scipy.stats import pearsonr

    del labels
    return _correlation(texts, pearsonr)


def _spearman(texts: Texts, labels: Sequence[str]) -> float:
    from scipy.stats import spearmanr

    del labels
    return _correlation(texts, spearmanr)


def _correlation(texts: Texts, statistic: Callable[..., Any]) -> float:
    predictions, references = ([_number(text) for text in column] for column in zip(*texts, strict=True))
    if len(set(predictions)) < 2 or len(set(references)) < 2:
        return 0.0
    return 100 * float(statistic(predictions, references)[0])


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        return _NO_NUMBER
    return value if abs(value) < float("inf") else _NO_NUMBER  # neither "nan" nor "inf"


def _question_match(answers: Sequence[Prediction], texts: Texts) -> float:
    right: dict[tuple[str, str], bool] = {}
    for answer, (prediction, reference) in zip(answers, texts, strict=True):
        key = answer.source, answer.question
        right[key] = right.get(key, True) and prediction == reference
    return sum(right.values()) / len(right)


_OF_SETS: dict[str, Callable[[Texts, Sequence[str]], float]] = {
    "f1": _f1,
    "macro_f1": _macro_f1,
    "matthews": _matthews,
    "pearson": _pearson,
    "spearman": _spearman,
    "f1a": _f1,
}
