"""Answers compared as mathematics, by a process that may be ended."""

import contextlib
import gc
import importlib.util
import re
import subprocess
import sys
from math import comb
from pathlib import Path

import psutil
import pytest

from src.errors import ConfigError, DataError
from src.evaluation.metrics import math
from src.evaluation.metrics.math import Judge
from src.experiments.dataset_protocols import Prediction
from src.experiments.grid import override
from src.systems.assistants.rewards.math import Config
from tests import toy
from tests.systems.assistants.rewards.rollouts import rollout, setting
from tests.systems.assistants.train_assistants import SFT, write_data


def test_equal_mathematics_is_right():
    score = Config().scorer(setting())
    pairs = [
        ("x = 1/2", "0.5"),
        ("$1 + x^2$", "x^2+1"),
        ("1,000 apples", "1000"),
        ("\\boxed{42}", "#### 42"),
        ("so 42", 42),
    ]
    assert score([rollout(text, answer=answer) for text, answer in pairs]) == [1.0] * len(pairs)
    pairs = [("x = 1/3", "0.5"), ("$1 - x^2$", "x^2+1"), ("nothing", "7"), ("#### 41", "#### 42"), ("42 #### 41", "42")]
    assert score([rollout(text, answer=answer) for text, answer in pairs]) == [0.0] * len(pairs)


@pytest.mark.slow
def test_a_computation_without_an_end_is_wrong_and_the_next_answer_is_judged():
    judge = Judge(0.5)
    assert not judge.agrees("9^{9^{9^{9}}}", "5")
    assert judge.agrees("5", "5")


@pytest.mark.slow
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
    with pytest.raises(DataError, match=r"^a row: a reward reads .answer.*, but the row has the keys .solution., .id."):
        score([rollout("1", solution="1", id=3)])
    with pytest.raises(DataError, match=r"^reward 'math': cannot parse a row's \"answer\": 'Half of it\.\\n####'\."):
        score([rollout("1", answer="Half of it.\n####")])


def test_missing_package_is_refused_before_the_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(
        "src.evaluation.metrics.math.find_spec",
        lambda name: None if name == "math_verify" else importlib.util.find_spec(name),
    )
    advice = r"math-verify is not installed\. Run: pip install -r requirements/math\.txt"
    with pytest.raises(ConfigError, match=advice):
        Config().check(setting().places)
    write_data(tmp_path / "data")
    exp = override(SFT, {"answers.metrics": [{"name": "math"}]})
    assert toy.main(["-e", "all", "--dry-run"], {"all": [exp]}, tmp_path) != 0
    assert re.search(rf"metric 'math': {advice}", capsys.readouterr().err)


SELF = [
    "A",
    "yes",
    "No",
    "True",
    r"\frac{1}{2}",
    r"\sqrt{2}",
    r"\pi",
    "x^2+1",
    "(1,2)",
    r"\{1,2\}",
    "[0, 1)",
    r"\infty",
    "Paris",
    "(B)",
]
SELF += [
    r"\text{yes}",
    r"\begin{pmatrix}1\\2\end{pmatrix}",
    r"50\%",
    "x=1",
    "42",
    "-7",
    "1,000",
    "New York",
    "3.14",
    r"$\frac{3}{4}$",
]


def test_answers_equal_themselves():
    score = Config().scorer(setting())
    assert score([rollout(text, answer=text) for text in SELF]) == [1.0] * len(SELF)
    for form in ("So it is\n#### {}", r"So \boxed{{{}}}", "The answer is {}."):
        assert score([rollout(form.format(text), answer=text) for text in SELF]) == [1.0] * len(SELF), form


def test_words_are_compared_as_text():
    score = Config().scorer(setting())
    pairs = [
        ("Yes.", "yes"),
        (r"\boxed{yes}", "yes"),
        ("The answer is yes.", "Yes"),
        ("(A)", "A"),
        ("A)", "A"),
        ("$A$", "A"),
        ("A.", "A"),
    ]
    pairs += [
        ("**A**", "A"),
        ("The answer is A.", "A"),
        ("Answer: (B)", "B"),
        ("So the answer is **Yes**.", "yes"),
        ("yes!", "yes"),
    ]
    pairs += [(r"\boxed{\text{no solution}}", r"\text{no solution}"), (r"\boxed{\textbf{(C)}}", "C")]
    assert score([rollout(text, answer=answer) for text, answer in pairs]) == [1.0] * len(pairs)
    pairs = [
        ("pairs", "Paris"),
        ("$sey$", "yes"),
        ("no", "yes"),
        ("B", "A"),
        ("yes or no", "yes"),
        ("", "yes"),
        ("The answer is no", "on"),
    ]
    pairs += [("The answer is B.", "A"), (r"\boxed{A} or \boxed{B}", "A"), ("I am A student", "A"), ("**B**", "A")]
    assert score([rollout(text, answer=answer) for text, answer in pairs]) == [0.0] * len(pairs)


HOSTILE = ["9^{9^{9^{9}}}"]
HOSTILE += [
    r"\sum_{n=1}^{10^{12}} \sin(n^n)",
    "(x+1)^{(y+1)^{99999}}",
    "factorial(10**9)",
    r"10^{10^{10}}",
    r"\sqrt{9^{9^{9}}}",
]


@pytest.mark.slow
def test_slow_answers_of_a_batch_share_one_limit():
    """In processor time, whatever else runs: 16 endless answers cost a limit per core, and not one each."""
    judge = Judge(2.0)
    assert judge.agrees("1", "1")
    process = judge._process
    assert process is not None
    pairs = [("9^{9^{9^{9}}}", str(n)) if n % 4 == 0 else (f"x = {n}/2", str(n / 2)) for n in range(64)]
    assert judge.agree(pairs) == [n % 4 != 0 for n in range(64)]
    assert judge._process is process, "a slow answer does not end the process"
    children = psutil.Process(process.pid).cpu_times()
    cores = len(psutil.Process().cpu_affinity())
    assert children.children_user + children.children_system < 2.0 * cores + 64 * 0.3 + 1


@pytest.mark.slow
def test_a_busy_machine_changes_no_verdict():
    """The right answer takes about a second of processor time, and its share is a seventh of a core."""
    expected = "+".join(f"{comb(60, k)}x^{{{k}}}" for k in range(61))
    judge = Judge(4.0)
    assert judge.agrees("1", "1")
    busy = [sys.executable, "-c", "while True: pass"]
    with contextlib.ExitStack() as stack:
        for _ in range(6 * len(psutil.Process().cpu_affinity())):
            process = stack.enter_context(subprocess.Popen(busy))
            stack.callback(process.kill)
        assert judge.agree([("(x+1)^{60}", expected), ("(x+1)^{61}", expected)]) == [True, False]


@pytest.mark.slow
@pytest.mark.parametrize("text", HOSTILE)
def test_endless_computations_are_wrong(text: str):
    judge = Judge(0.5)
    assert judge.agree([(text, "5"), ("5", text), ("5", "5")])[-1]


def test_judge_survives_the_end_of_its_process():
    judge = Judge(1.0)
    assert judge.agrees("1", "1")
    assert judge._process is not None
    judge._process.kill()
    judge._process.wait()
    assert judge.agrees("2", "2")


def test_the_metric_accepts_any_reference():
    texts, references = ["7 + 6 = 13", "13", "12"], ["#### 41", "7 and 6 make 13.\n#### 13", "None.\n####"]
    answers = [Prediction(text, references, "7 + 6?", [], "sums") for text in texts]
    assert math.Config().score(answers) == {"solved": [1.0, 1.0, 0.0]}
    assert math.Config().score([]) == {"solved": []}
    with pytest.raises(DataError, match=r"metric 'math': .*'None\.\\n####'"):
        math.Config().score([Prediction("1", references[2:], "?", [], "sums")])
