"""Expressions that are judged without being run."""

import pytest

from src.evaluation.metrics.expressions import Config, ask, is_in_parentheses, read_expression, solves
from src.experiments.dataset_protocols import Prediction


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ("7 + 12", True),
        (" (12+7) ", True),
        ("12 - 7", False),
        ("7 + 12 + 0", False),
        ("19", False),
        ("7 + 13 - 1", False),
        ("__import__('os')", False),
        ("7 + ", False),
        ("7 plus 12", False),
        ("", False),
        ("7 + 12 # x", False),
        ("(" * 30 + "7 + 12" + ")" * 30, False),
    ],
)
def test_an_answer_is_right_where_python_finds_it_so(answer: str, right: bool):
    assert solves(ask(7, 12, 19), answer) == right


def test_parentheses_are_those_of_an_expression():
    assert is_in_parentheses("(1 + 2)")
    assert not is_in_parentheses("1 + 2")
    assert not is_in_parentheses("(one)")
    assert read_expression("2 * (3 - 5)") == (-4, [2, 3, 5])
    assert read_expression("9" * 12) is None


def test_scores_are_of_each_answer():
    question = ask(2, 3, 6)
    answers = [Prediction(text, ["x"], question) for text in ("2 * 3", "(3 * 2)", "(2 + 3)")]
    assert Config().score(answers) == {"solved": [1, 1, 0], "in_parentheses": [0, 1, 1]}
