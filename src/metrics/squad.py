"""Exact match, F1, precision and recall of short answers, as SQuAD counts them."""

import re
import string
from collections import Counter
from collections.abc import Sequence

from src.config import Config as StrictConfig

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


class Config(StrictConfig):
    """Nothing to choose."""


def score(config: Config, predictions: Sequence[str], references: Sequence[Sequence[str]]) -> dict[str, float]:
    """Means over samples of {"em", "f1", "precision", "recall"}, each between 0 and 1.

    A sample has one or more accepted answers: em takes any of them, the others the one with the best F1. Words are those of
    `normalise`; two empty answers agree (Rajpurkar et al. 2016, arXiv:1606.05250, section 6.1, and the SQuAD 2.0 script).

    Raises:
        ValueError: no samples, unequal lengths, or a sample without references.
    """
    if len(predictions) != len(references):
        raise ValueError(f"{len(predictions)} predictions for {len(references)} lists of references")
    if not predictions:
        raise ValueError("no predictions to score")
    sums = dict.fromkeys(("em", "f1", "precision", "recall"), 0.0)
    for index, (prediction, accepted) in enumerate(zip(predictions, references, strict=True)):
        if isinstance(accepted, str) or not accepted:
            raise ValueError(f"references[{index}]: expected a list of one or more answers, got {accepted!r}")
        predicted = normalise(prediction).split()
        answers = [normalise(answer).split() for answer in accepted]
        f1, precision, recall = max(_overlap(predicted, answer) for answer in answers)
        sums["em"] += predicted in answers
        sums["f1"] += f1
        sums["precision"] += precision
        sums["recall"] += recall
    return {name: total / len(predictions) for name, total in sums.items()}


def normalise(text: str) -> str:
    """Lower case, no ASCII punctuation, no articles, single spaces."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def _overlap(predicted: Sequence[str], answer: Sequence[str]) -> tuple[float, float, float]:
    """(F1, precision, recall) of two bags of words."""
    if not predicted or not answer:
        same = float(predicted == answer)
        return same, same, same
    shared = (Counter(predicted) & Counter(answer)).total()
    if not shared:
        return 0.0, 0.0, 0.0
    precision, recall = shared / len(predicted), shared / len(answer)
    return 2 * precision * recall / (precision + recall), precision, recall
