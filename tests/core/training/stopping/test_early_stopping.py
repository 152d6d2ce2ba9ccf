"""Which step is best, and early stopping."""

import pytest

from src.errors import ConfigError
from src.experiments.config import load
from src.training.config import LoopConfig
from src.training.stopping.early_stopping import ModelSelection

LOOP = {"steps": 10, "sequences_per_step": 2, "micro_batch": 2, "learning_rate": 0.1, "eval_every": 1}


def selection(**changes: object) -> ModelSelection:
    return ModelSelection(load(LoopConfig, {**LOOP, **changes}, "loop"))


def follow(model_selection: ModelSelection, values: list[float], metric: str = "val_loss") -> list[bool]:
    stops = []
    for step, value in enumerate(values, start=1):
        model_selection.update(step, {metric: value})
        stops.append(model_selection.stop())
    return stops


def test_the_lowest_loss_is_the_best():
    model_selection = selection()
    assert follow(model_selection, [3.0, 2.0, 2.5, 2.0]) == [False] * 4
    assert (model_selection.best_step, model_selection.best_value) == (2, 2.0)


def test_the_highest_score_is_the_best_with_mode_max():
    model_selection = selection(best_metric="em", best_mode="max")
    follow(model_selection, [0.1, 0.4, 0.3], metric="em")
    assert model_selection.best_step == 2


def test_stops_after_patience_evaluations_without_gain():
    model_selection = selection(early_stopping={"patience": 2})
    assert follow(model_selection, [3.0, 2.0, 2.1, 1.9, 1.95, 1.9]) == [False, False, False, False, False, True]


def test_a_gain_below_min_gain_uses_up_patience_but_is_still_the_best():
    model_selection = selection(early_stopping={"patience": 2, "min_gain": 0.5})
    assert follow(model_selection, [3.0, 2.9, 2.8]) == [False, False, True]
    assert model_selection.best_step == 3


def test_a_restored_selection_resumes_as_if_never_stopped():
    first, second = selection(early_stopping={"patience": 2}), selection(early_stopping={"patience": 2})
    follow(first, [3.0, 3.1])
    second.restore(first.state())
    first.update(3, {"val_loss": 3.2})
    second.update(3, {"val_loss": 3.2})
    assert second.stop() is first.stop() is True
    assert second.state() == first.state()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_value_that_is_not_finite_is_no_gain(bad: float):
    model_selection = selection(early_stopping={"patience": 2})
    assert follow(model_selection, [bad, 3.0, bad, bad]) == [False, False, False, True]
    assert (model_selection.best_step, model_selection.best_value) == (2, 3.0)


def test_a_metric_that_is_not_measured_is_named():
    with pytest.raises(ConfigError, match=r"loop\.best_metric: unknown score 'f1'\. Scores: em, val_loss\."):
        selection(best_metric="f1").update(1, {"val_loss": 1.0, "em": 0.0})
