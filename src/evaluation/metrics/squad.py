"""Exact match, F1, precision and recall of short answers, as in SQuAD."""

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
    """No settings."""

    def score(self, answers: Sequence[Prediction]) -> dict[str, list[float]]:
        """{"em", "f1", "precision", "recall"} of each answer, from 0 to 1.

        em is 1 if any reference matches; the other scores use the reference with the best F1. Words are normalized by
        `normalise`; two empty answers match (Rajpurkar et al. 2016, arXiv:1606.05250, section 6.1, and the SQuAD 2.0
        script).
        """
        rows = [_score(answer) for answer in answers]
        return {name: [row[place] for row in rows] for place, name in enumerate(_NAMES)}


def normalise(text: str) -> str:
    """Convert to lower case, and remove ASCII punctuation, articles and extra spaces."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def overlap(predicted_words: Sequence[str], reference_words: Sequence[str]) -> tuple[float, float, float]:
    """(F1, precision, recall) of two bags of words; all 1 if both are empty."""
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
