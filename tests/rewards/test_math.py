"""Answers compared as mathematics, by a process that may be ended."""

import gc
import importlib.util

import psutil
import pytest

from src.errors import ConfigError, DataError
from src.rewards.math import Config, Judge
from tests.rewards.rollouts import rollout, setting


def test_equal_mathematics_is_right():
    score = Config().scorer(setting())
    pairs = [("x = 1/2", "0.5"), ("$1 + x^2$", "x^2+1"), ("1,000 apples", "1000"), ("\\boxed{42}", "#### 42"), ("so 42", 42)]
    assert score([rollout(text, answer=answer) for text, answer in pairs]) == [1.0] * len(pairs)
    pairs = [("x = 1/3", "0.5"), ("$1 - x^2$", "x^2+1"), ("nothing", "7"), ("#### 41", "#### 42"), ("42 #### 41", "42")]
    assert score([rollout(text, answer=answer) for text, answer in pairs]) == [0.0] * len(pairs)


def test_a_computation_without_an_end_is_wrong_and_the_next_answer_is_judged():
    judge = Judge(0.5)
    assert not judge.agrees("9^{9^{9^{9}}}", "5")
    assert judge.agrees("5", "5")


def test_no_process_is_left():
    judge = Judge(1.0)
    assert judge.agrees("1", "1")
    process = judge._process
    assert process is not None
    assert psutil.pid_exists(process.pid)
    del judge
    gc.collect()
    assert process.returncode is not None


def test_a_row_that_has_no_answer_is_named_by_its_keys():
    score = Config().scorer(setting())
    with pytest.raises(DataError, match=r"^a row: a reward reads .answer.*; the row has .solution., .id."):
        score([rollout("1", solution="1", id=3)])
    with pytest.raises(DataError, match=r"^reward 'math': a row's \"answer\" is no mathematics: 'Half of it\.\\n####'$"):
        score([rollout("1", answer="Half of it.\n####")])


def test_missing_package_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("src.rewards.math.find_spec", lambda name: None if name == "math_verify" else importlib.util.find_spec(name))
    with pytest.raises(ConfigError, match=r"math-verify is not installed: pip install -r requirements/math\.txt$"):
        Config().check(setting().places)
