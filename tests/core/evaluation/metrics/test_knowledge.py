"""K-Precision, K-Recall and K-F1: by hand, as defined by Adlakha et al. 2023."""

import pytest

from src.evaluation.metrics.knowledge import Config
from src.experiments.dataset_protocols import Prediction


def one(prediction: str, question: str, *contexts: str) -> dict[str, float]:
    scores = Config().score([Prediction(prediction, ["not looked at"], question, contexts)])
    return {name: value for name, (value,) in scores.items()}


def f1(precision: float, recall: float) -> float:
    return 2 * precision * recall / (precision + recall) if precision + recall else 0.0


@pytest.mark.parametrize(
    ("prediction", "question", "contexts", "plain", "plus_plus"),
    [
        # Of "paris is nice", paris and is are among the 5 words "paris is capital of france"; is stands in the
        # question.
        ("Paris is nice.", "What is it?", ["Paris is the capital of France"], (2 / 3, 2 / 5), (1 / 2, 1 / 5)),
        # A word counts as often as it stands in both.
        ("no no no", "?", ["no, no"], (2 / 3, 1), (2 / 3, 1)),
        # The knowledge is all contexts together.
        ("x y", "z", ["x", "y z"], (1, 2 / 3), (1, 2 / 3)),
        ("UNANSWERABLE", "who", ["nobody knows"], (0, 0), (0, 0)),
        # Nothing but the question's words: nothing is claimed.
        ("the capital", "which capital ?", ["of france"], (0, 0), (1, 1)),
        ("", "who", ["nobody knows"], (0, 0), (1, 1)),
        ("", "who", [""], (1, 1), (1, 1)),
        ("x", "who", [""], (0, 0), (0, 0)),
        ("Łódź", "gdzie", ["w łódź."], (1, 1 / 2), (1, 1 / 2)),
    ],
)
def test_by_hand(prediction, question, contexts, plain, plus_plus):
    expected = {
        f"k_{name}": value for name, value in zip(("precision", "recall", "f1"), (*plain, f1(*plain)), strict=True)
    }
    after = zip(("precision", "recall", "f1"), (*plus_plus, f1(*plus_plus)), strict=True)
    expected |= {f"k_{name}_plus_plus": value for name, value in after}
    assert one(prediction, question, *contexts) == pytest.approx(expected)
