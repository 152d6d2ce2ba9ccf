"""How many words of an answer are in place: for answers read word by word, such as digits from images."""

from collections.abc import Sequence

from src.evaluation.metrics.squad import normalise
from src.experiments.dataset_protocols import Prediction
from src.experiments.interfaces import MetricConfig


class Config(MetricConfig):
    """Nothing to choose."""

    def score(self, answers: Sequence[Prediction]) -> dict[str, list[float]]:
        """{"word_accuracy"} of each answer: the share of its reference's words that it has at the same place;
        the best over references.

        Words are those of `squad.normalise`. Of a reference without words it is 1 where the answer has none either.
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
