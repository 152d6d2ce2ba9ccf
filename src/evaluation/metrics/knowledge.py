"""Overlap of an answer with its contexts: K-Precision, K-Recall and K-F1, and their ++ variants.

K-Precision is the share of an answer's words that occur in the knowledge, here the contexts. It is the word-based
metric that agrees best with human judgments of faithfulness (Adlakha et al. 2023, "Evaluating Correctness and
Faithfulness of Instruction-Following Models for Question Answering", arXiv 2307.16877). The ++ variants first remove
the question's words from the answer, as in the authors' code (github.com/McGill-NLP/instruct-qa).
"""

from collections.abc import Sequence
from typing import ClassVar

from src.evaluation.metrics.squad import normalise, overlap
from src.experiments.dataset_protocols import Prediction
from src.experiments.interfaces import MetricConfig

_PLAIN = ("k_f1", "k_precision", "k_recall")
_PLUS_PLUS = ("k_f1_plus_plus", "k_precision_plus_plus", "k_recall_plus_plus")


class Config(MetricConfig):
    """No settings."""

    needs_contexts: ClassVar[bool] = True

    def score(self, answers: Sequence[Prediction]) -> dict[str, list[float]]:
        """{"k_precision", "k_recall", "k_f1" and each with "_plus_plus"} of each answer, from 0 to 1. References are
        ignored.

        Words are normalized by `squad.normalise` and counted with multiplicity; the knowledge is all contexts of the
        question. Precision is over the words of the answer, recall over those of the knowledge. An answer without words
        scores 0, unless the knowledge is also empty. An answer with only words of the question scores 1 in the ++
        variants.
        """
        rows = [_score(answer) for answer in answers]
        return {name: [row[place] for row in rows] for place, name in enumerate(_PLAIN + _PLUS_PLUS)}


def _score(answer: Prediction) -> tuple[float, ...]:
    words = normalise(answer.text).split()
    knowledge = normalise(" ".join(answer.contexts)).split()
    question_words = set(normalise(answer.question).split())
    new_words = [word for word in words if word not in question_words]
    return *overlap(words, knowledge), *(overlap(new_words, knowledge) if new_words else (1.0, 1.0, 1.0))
