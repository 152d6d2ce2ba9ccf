"""BLEU of single answers (Papineni et al. 2002), by the library sacrebleu."""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from src.evaluation.metrics.answers import best_over_references
from src.experiments.dataset_protocols import Prediction
from src.experiments.interfaces import MetricConfig

if TYPE_CHECKING:
    from sacrebleu.metrics.bleu import BLEU


class Config(MetricConfig):
    """How words are compared."""

    lowercase: bool = False
    """Case does not count."""

    def score_names(self) -> tuple[str, ...]:
        return ("bleu",)

    def score(self, answers: Sequence[Prediction]) -> dict[str, list[float]]:
        """{"bleu"} of each answer, between 0 and 1:
        sacrebleu's sentence BLEU, tokenizer "13a", exponential smoothing, effective order.

        Means of it are means of sentences: no corpus BLEU, whose counts are summed before they are divided. The
        effective order leaves out n-grams that an answer is too short to have. Of several references the one with the
        best value counts. Two empty texts agree.
        """
        from sacrebleu.metrics.bleu import BLEU

        scorer = BLEU(lowercase=self.lowercase, effective_order=True)
        return {"bleu": [best_over_references(partial(_score_pair, scorer), answer) for answer in answers]}


def _score_pair(scorer: "BLEU", prediction: str, reference: str) -> float:
    if not prediction.strip() or not reference.strip():
        return float(prediction.strip() == reference.strip())
    return min(1.0, scorer.sentence_score(prediction, [reference]).score / 100)  # it may be 1e-14 too large
