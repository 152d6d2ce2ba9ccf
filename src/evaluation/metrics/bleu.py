"""Sentence BLEU (Papineni et al. 2002), by sacrebleu."""

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
    """Ignore case."""

    def score_names(self) -> tuple[str, ...]:
        return ("bleu",)

    def score(self, answers: Sequence[Prediction]) -> dict[str, list[float]]:
        """{"bleu"} of each answer, from 0 to 1: sacrebleu's sentence BLEU, tokenizer "13a", exponential smoothing,
        effective order.

        The mean of sentence BLEU differs from corpus BLEU, which sums counts first. The effective order leaves out
        n-grams that an answer is too short to have. The reference with the best score counts. Two empty texts match.
        """
        from sacrebleu.metrics.bleu import BLEU

        scorer = BLEU(lowercase=self.lowercase, effective_order=True)
        return {"bleu": [best_over_references(partial(_score_pair, scorer), answer) for answer in answers]}


def _score_pair(scorer: "BLEU", prediction: str, reference: str) -> float:
    if not prediction.strip() or not reference.strip():
        return float(prediction.strip() == reference.strip())
    return min(1.0, scorer.sentence_score(prediction, [reference]).score / 100)  # it can be 1e-14 too large
