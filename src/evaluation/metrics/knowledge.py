"""How much of an answer is taken from the contexts: K-Precision, K-Recall and K-F1, and their ++ forms.

K-Precision is the share of an answer's words that occur in the knowledge, here the contexts: of all measures by words
it agrees best with what people think of an answer's faithfulness (Adlakha et al. 2023, "Evaluating Correctness and
Faithfulness of Instruction-Following Models for Question Answering", arXiv 2307.16877). The ++ forms first take the
question's words out of the answer, as these say nothing of where the rest is from (as in the code published with it,
github.com/McGill-NLP/instruct-qa).
"""

from collections.abc import Sequence

from src.evaluation.metrics.squad import normalise, overlap
from src.experiments.dataset_protocols import Prediction
from src.experiments.interfaces import MetricConfig

_PLAIN = ("k_f1", "k_precision", "k_recall")
_PLUS_PLUS = ("k_f1_plus_plus", "k_precision_plus_plus", "k_recall_plus_plus")


class Config(MetricConfig):
    """Nothing to choose."""

    def score(self, answers: Sequence[Prediction]) -> dict[str, list[float]]:
        """{"k_precision", "k_recall", "k_f1" and each with "_plus_plus"}, of each answer, between 0 and 1.
        References do not count.

        Words are those of `squad.normalise`, each as often as it occurs in both; the knowledge is all contexts of the
        question. Precision is over the words of the answer, recall over those of the knowledge. An answer without words
        has 0, unless the knowledge has none either. One that has none left without those of the question has 1 in the
        ++ forms: it claims nothing.
        """
        rows = [_score(answer) for answer in answers]
        return {name: [row[place] for row in rows] for place, name in enumerate(_PLAIN + _PLUS_PLUS)}


def _score(answer: Prediction) -> tuple[float, ...]:
    words = normalise(answer.text).split()
    knowledge = normalise(" ".join(answer.contexts)).split()
    question_words = set(normalise(answer.question).split())
    new_words = [word for word in words if word not in question_words]
    return *overlap(words, knowledge), *(overlap(new_words, knowledge) if new_words else (1.0, 1.0, 1.0))
