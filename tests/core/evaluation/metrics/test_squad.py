"""SQuAD's exact match and F1: exact small cases and properties."""

import pytest

from src.evaluation.metrics.squad import Config, normalise
from src.experiments.dataset_protocols import Prediction


def one(prediction, *references):
    scores = Config().score([Prediction(prediction, list(references))])
    return {name: value for name, (value,) in scores.items()}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The  Quick, brown-fox!", "quick brownfox"),
        ("an a the", ""),
        ("Another theme", "another theme"),
        ("a.b", "ab"),
        ("\tone\n two ", "one two"),
        ("Straße 12", "straße 12"),
    ],
)
def test_normalise(text, expected):
    assert normalise(text) == expected
    assert normalise(expected) == expected


@pytest.mark.parametrize(
    ("prediction", "reference", "em", "precision", "recall"),
    [
        ("the cat", "Cat.", 1, 1, 1),
        ("cat sat", "cat", 0, 1 / 2, 1),
        ("cat", "cat sat down", 0, 1, 1 / 3),
        ("dog", "cat", 0, 0, 0),
        ("x x y", "x y y", 0, 2 / 3, 2 / 3),
        ("", "", 1, 1, 1),
        ("the", "!", 1, 1, 1),
        ("", "cat", 0, 0, 0),
        ("cat", "", 0, 0, 0),
    ],
)
def test_one_reference(prediction, reference, em, precision, recall):
    f1 = 2 * precision * recall / (precision + recall) if precision + recall else 0
    assert one(prediction, reference) == pytest.approx({"em": em, "f1": f1, "precision": precision, "recall": recall})


def test_best_reference_gives_precision_and_recall_too():
    assert one("a b c d e f", "b", "b c d x", "y") == pytest.approx(
        {"em": 0, "f1": 2 / 3, "precision": 3 / 5, "recall": 3 / 4}
    )


def test_exact_match_of_any_reference():
    assert one("right", "wrong", "right")["em"] == 1


def test_each_answer_has_its_score():
    scores = Config().score([Prediction("cat", ["cat"]), Prediction("cat", ["dog"]), Prediction("x y", ["x"])])
    assert scores == {
        "em": [1, 0, 0],
        "f1": [1, 0, pytest.approx(2 / 3)],
        "precision": [1, 0, 1 / 2],
        "recall": [1, 0, 1],
    }


def test_word_order_counts_for_exact_match_only():
    assert one("b c", "c b") == {"em": 0.0, "f1": 1.0, "precision": 1.0, "recall": 1.0}


def test_real_squad_answers_score_fully_against_themselves(shared_data):
    import json

    articles = json.loads((shared_data / "squad" / "squad_v1.1-dev-shared.json").read_text())["data"]
    answers = [
        [a["text"] for a in q["answers"]] for article in articles for p in article["paragraphs"] for q in p["qas"]
    ]
    assert len(answers) > 80
    scores = Config().score([Prediction(a[-1], a) for a in answers])
    assert {name: set(values) for name, values in scores.items()} == {
        "em": {1.0},
        "f1": {1.0},
        "precision": {1.0},
        "recall": {1.0},
    }
