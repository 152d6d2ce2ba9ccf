"""From the scores of single answers to those of many: means, parts, and rows that ask the same."""

from collections.abc import Sequence

import pytest

from src.evaluation.metrics.answers import make_prediction, scores
from src.experiments.dataset_protocols import Prediction
from src.experiments.interfaces import MetricConfig


class Right(MetricConfig):
    """Whether a prediction is one of the references, and its length."""

    def score(self, answers: Sequence[Prediction]) -> dict[str, list[float]]:
        return {
            "right": [float(a.text in a.references) for a in answers],
            "length": [float(len(a.text)) for a in answers],
        }


def test_means_over_all_and_over_each_source():
    answers = [
        Prediction("a", ["a"], source="nq"),
        Prediction("b", ["a"], source="nq"),
        Prediction("cc", ["cc"], source="squad"),
    ]
    assert scores([Right()], answers) == {
        "right": 2 / 3,
        "right/nq": 1 / 2,
        "right/squad": 1,
        "length": 4 / 3,
        "length/nq": 1,
        "length/squad": 2,
    }


def test_one_source_has_no_parts():
    assert scores([Right()], [Prediction("a", ["a"], source="nq")]) == {"right": 1, "length": 1}


def test_rows_that_ask_the_same_count_once_with_the_best_of_their_scores():
    answers = [
        Prediction("a", ["x"], "who", ["c"]),
        Prediction("bb", ["y", "a"], "who", ["c"]),  # makes the first one right
        Prediction("a", ["x"], "who", ["another context"]),
        Prediction("a", ["x"], "when", ["c"]),
    ]
    assert scores([Right()], answers) == {"right": 0, "length": 5 / 4}
    assert scores([Right()], answers, best_answer=True) == {"right": 1 / 3, "length": 4 / 3}


def test_rows_of_prepared_data():
    row = {"context": "c", "question": "q", "answer": "a", "dataset": "nq"}
    assert make_prediction(row, "p") == Prediction("p", ["a"], "q", ["c"], "nq")
    more = {**row, "answers": ["a", "b"], "contexts_list": ["c", "d"], "kind": "long"}
    assert make_prediction(more, "p") == Prediction("p", ["a", "b"], "q", ["c", "d"], "nq_long")
    assert make_prediction({**row, "answers": None, "contexts_list": None, "kind": None}, "p") == Prediction(
        "p", ["a"], "q", ["c"], "nq"
    )


def test_refusals():
    with pytest.raises(ValueError, match=r"references: expected a list of one or more answers, got \[\]"):
        Prediction("a", [])
    with pytest.raises(ValueError, match=r"references: expected a list of one or more answers, got 'a'"):
        Prediction("a", "a")
    with pytest.raises(ValueError, match="no answers to score"):
        scores([Right()], [])
