"""Exact match, F1, precision and recall of short answers, as SQuAD counts them."""

import re
import string
from collections import Counter
from collections.abc import Sequence

from src.experiments.dataset_protocols import Prediction
from src.experiments.interfaces import MetricConfig

_NAMES = ("em", "f1", "precision", "recall")
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


class Config(MetricConfig):
    """Nothing to choose."""

    def score(self, answers: Sequence[Prediction]) -> dict[str, list[float]]:
        """{"em", "f1", "precision", "recall"}, of each answer, between 0 and 1.

        em takes any of the references, the others the one with the best F1. Words are those of `normalise`; two empty
        answers agree (Rajpurkar et al. 2016, arXiv:1606.05250, section 6.1, and the SQuAD 2.0 script).
        """
        rows = [_score(answer) for answer in answers]
        return {name: [row[place] for row in rows] for place, name in enumerate(_NAMES)}


def normalise(text: str) -> str:
    """Lower case, no ASCII punctuation, no articles, single spaces."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def overlap(predicted_words: Sequence[str], reference_words: Sequence[str]) -> tuple[float, float, float]:
    """(F1, precision, recall) of two bags of words; all 1 where both are empty."""
    if not predicted_words or not reference_words:
        same = float(predicted_words == reference_words)
        return same, same, same
    shared = (Counter(predicted_words) & Counter(reference_words)).total()
    if not shared:
        return 0.0, 0.0, 0.0
    precision, recall = shared / len(predicted_words), shared / len(reference_words)
    return 2 * precision * recall / (precision + recall), precision, recall


def _score(answer: Prediction) -> tuple[float, float, float, float]:
    predicted_words = normalise(answer.text).split()
    reference_words = [normalise(reference).split() for reference in answer.references]
    return float(predicted_words in reference_words), *max(overlap(predicted_words, words) for words in reference_words)
