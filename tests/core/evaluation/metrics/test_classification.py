"""Scores of sets of answers, against values that are worked out by hand."""

from collections.abc import Sequence

import pytest

from src.errors import ConfigError
from src.evaluation.metrics.answers import scores
from src.evaluation.metrics.classification import Config
from src.experiments.config import load
from src.experiments.dataset_protocols import Prediction

ABC = ["a", "b", "c"]


def of(
    name: str, predictions: str, references: str, labels: Sequence[str] = (), groups: str = ""
) -> float | list[float]:
    config = load(Config, {"scores": [name], "labels": list(labels)}, "metric")
    words = zip(predictions.split(), references.split(), groups.split() or [""] * len(predictions.split()), strict=True)
    return config.score([Prediction(p, [r], question=q) for p, r, q in words])[name]


def test_accuracy_is_of_each_answer():
    assert of("accuracy", "a b c x", "a a c b") == [1.0, 0.0, 1.0, 0.0]
    config = load(Config, {"scores": ["accuracy"]}, "metric")
    assert config.score([Prediction(" a\n", ["a"])]) == {"accuracy": [1.0]}


def test_f1_counts_an_invalid_label_as_the_wrong_class():
    """Of class b: right 1 (first), wrongly b 2 (third, and the fourth that is none of both), missed 2: 2 / (2 + 2 +
    2)."""
    assert of("f1", "b a b x x", "b b a a b", "ab") == pytest.approx(1 / 3)
    assert of("f1", "x x", "a a", "ab") == 0.0


def test_macro_f1_is_the_mean_over_labels():
    """a 2 / 3, b 4 / 5, c 2 / 3."""
    assert of("macro_f1", "a b b b c x", "a a b b c c", ABC) == pytest.approx((2 / 3 + 4 / 5 + 2 / 3) / 3)
    assert of("macro_f1", "a a", "a a", ABC) == pytest.approx(1 / 3)


def test_matthews():
    """TP 2, FN 1, TN 1, FP 1: (2 - 1) / sqrt(3 * 3 * 2 * 2)."""
    assert of("matthews", "b b a a b", "b b b a a", "ab") == pytest.approx(100 / 6)
    assert of("matthews", "b b b", "b a b", "ab") == 0.0
    assert of("matthews", "b b b", "b b b", "ab") == 0.0  # of one class alone, where sklearn warns


def test_nonsense_correlates_with_nothing():
    """Where it stands for every row of one class; as a class of its own it would be worth 50 here."""
    assert of("matthews", "b b x x", "b b a a", "ab") == 0.0
    assert of("matthews", "b x x", "b a b", "ab") == pytest.approx(-50.0)  # as b b a: TP 1, FP 1, FN 1, TN 0


def test_an_invalid_label_is_a_separate_class_among_three():
    """Gorodkin's R: (c s - sum p t) / sqrt((s^2 - sum p^2) (s^2 - sum t^2)) = (1 * 2 - 1) / sqrt((4 - 2) (4 - 2))."""
    assert of("matthews", "b x", "b a", ABC) == pytest.approx(50.0)


def test_pearson_and_spearman():
    """x - mean: -1 0 1; y - mean: -4/3 -1/3 5/3; 3 / sqrt(2 * 14/3)."""
    assert of("pearson", "0 1 3", "0 1 2") == pytest.approx(100 * 3 / (28 / 3) ** 0.5)
    assert of("spearman", "0 1 3", "0 1 2") == pytest.approx(100.0)
    assert of("spearman", "3 1 0", "0 1 2") == pytest.approx(-100.0)


@pytest.mark.parametrize("text", ["x", "nan", "inf", "-inf"])
def test_an_answer_without_a_number_is_minus_one(text: str):
    assert of("pearson", f"{text} 1 3", "0 1 2") == pytest.approx(100.0)
    assert of("pearson", f"{text} 1 4", "0 1 2") == pytest.approx(100 * 5 / (2 * 38 / 3) ** 0.5)


def test_constant_answers_have_correlation_zero():
    assert of("pearson", "2 2 2", "0 1 2") == of("spearman", "0 1 2", "1 1 1") == of("pearson", "1", "1") == 0.0


def test_multirc():
    """Question 1 all right; of question 2 one of two. F1: right 1 of True, none too many, 1 missed."""
    answers_by_question = {
        "predictions": "True False False False",
        "references": "True False True False",
        "labels": ["False", "True"],
    }
    assert of("question_match", **answers_by_question, groups="1 1 2 2") == 0.5
    assert of("f1a", **answers_by_question, groups="1 1 2 2") == pytest.approx(2 / 3)


def test_sets_are_scored_for_each_source_too():
    config = load(Config, {"scores": ["matthews", "accuracy"], "labels": ["a", "b"]}, "metric")
    answers = [Prediction(p, [r], source=s) for p, r, s in ("aax", "bbx", "bay", "aby")]
    values = scores([config], answers)
    assert values["accuracy"] == 0.5
    assert (values["matthews/x"], values["matthews/y"]) == (pytest.approx(100.0), pytest.approx(-100.0))
    assert values["matthews"] == pytest.approx(0.0)
    assert (values["accuracy/x"], values["accuracy/y"]) == (1.0, 0.0)


def test_an_answer_that_is_no_reference_either_is_wrong():
    assert of("accuracy", "x", "y") == [0.0]
    assert of("f1", "x", "y", "ab") == 0.0


def test_names():
    assert load(Config, {"scores": ["pearson", "accuracy"]}, "metric").score_names() == ("pearson", "accuracy")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"scores": []}, r"metric\.scores: expected a list that is not empty"),
        ({"scores": ["mcc"]}, r"metric\.scores\[0\]: unknown value 'mcc'"),
        ({"scores": ["accuracy", "accuracy"]}, r"metric: scores: duplicate entry"),
        ({"scores": ["f1"], "labels": ABC}, r"metric: labels: f1 needs two labels, got 3"),
        ({"scores": ["matthews"]}, r"metric: labels: matthews needs two or more labels"),
        ({"scores": ["accuracy"], "labels": ["a", "a"]}, r"metric: labels: duplicate entry"),
    ],
)
def test_config_refuses(values: dict[str, object], message: str):
    with pytest.raises(ConfigError, match=message):
        load(Config, values, "metric")
