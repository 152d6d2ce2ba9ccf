"""Word accuracy by position, for answers such as digits read from images."""

from collections.abc import Sequence

from src.evaluation.metrics.squad import normalise
from src.experiments.dataset_protocols import Prediction
from src.experiments.interfaces import MetricConfig


class Config(MetricConfig):
    """No settings."""

    def score(self, answers: Sequence[Prediction]) -> dict[str, list[float]]:
        """{"word_accuracy"} of each answer: share of the reference's words that the answer has at the same position;
        best over references.

        Words are normalized by `squad.normalise`. If the reference has no words, the score is 1 if the answer has no
        words, else 0.
        """
        return {
            "word_accuracy": [
                max(_agreement(answer.text, reference) for reference in answer.references) for answer in answers
            ]
        }


def _agreement(text: str, reference: str) -> float:
    words, reference_words = normalise(text).split(), normalise(reference).split()
    if not reference_words:
        return float(not words)
    return sum(one == other for one, other in zip(words, reference_words, strict=False)) / len(reference_words)
