"""Programs judged by their value or by tests; tests/systems/assistants/rewards/test_sandbox.py has those that cheat."""

import pytest

from src.errors import DataError
from src.experiments.registry import REWARDS, bind
from src.systems.assistants.rewards.python import Config, agrees, code_of, split_tests
from tests.systems.assistants.rewards.rollouts import needs_bubblewrap, rollout


@needs_bubblewrap
def test_values_that_are_computed_or_printed():
    cases = [
        ("7 + 12", "#### 19", 1),
        ("x = 19\nx", 19, 1),
        ("print('so'); print(19.0)", "19", 1),
        ("for _ in range(3):\n    pass\nprint(19)", "19", 1),
        ("import sys\nprint(19)\nsys.exit(0)", "19", 1),
        ("9**999", "19", 0),
        ("[1, {'a': 2}]", [1, {"a": 2}], 1),
        ("from fractions import Fraction\nFraction(1, 2)", "0.5", 1),
        ("0.1 + 0.2", "0.3", 1),
        ("'Paris'", "Paris", 1),
        ("True", "1", 0),
        ("18", "19", 0),
        ("print(19)\nprint(20)", "19", 0),
        ("print(19)\nraise ValueError", "19", 0),
        ("1 +", "1", 0),
        ("", "1", 0),
        ("class E:\n    def __eq__(self, o): return True\nE()", "1", 0),
    ]
    assert Config(by="value").scores([rollout(code, answer=answer) for code, answer, _ in cases]) == [
        score for *_, score in cases
    ]


HONEST = """
class Stack:
    def __init__(self):
        self.items = []
    def push(self, item):
        self.items.append(item)
        return self
    def __len__(self):
        return len(self.items)
    def __getitem__(self, place):
        return self.items[place]
    def __str__(self):
        return f"Stack {self.items}"

def drop_repeats(values):
    values[:] = dict.fromkeys(values)
    return len(values)

def count():
    yield from range(3)

def kinds():
    return [None, True, 2**80, -1.5, 1j, b"a", "ä\\ud800", (1, [2]), {3}, frozenset([4]), {(5,): {6: "x"}}]

def root(x):
    if x < 0:
        raise ValueError("negative")
    return x**0.5

BEST = 7
"""
TESTS = """
import math as m
def check(candidate):
    values = [1, 1, 2]
    assert candidate(values) == 2 and values == [1, 2]
check(drop_repeats)
stack = Stack().push(1).push("b")
assert len(stack) == 2 and stack[1] == "b" and stack.items == [1, "b"] and str(stack) == "Stack [1, 'b']"
assert stack == stack and stack != Stack()
assert list(count()) == [0, 1, 2]
assert kinds() == [None, True, 2**80, -1.5, 1j, b"a", "ä\\ud800", (1, [2]), {3}, frozenset([4]), {(5,): {6: "x"}}]
assert [type(x) for x in kinds()[:4]] == [type(None), bool, int, float]
try:
    root(-1)
except ValueError as error:
    assert str(error) == "negative"
else:
    raise AssertionError
assert m.isclose(root(2), 2**0.5) and math.isclose(root(4), 2)
assert BEST == 7
"""


@needs_bubblewrap
def test_an_honest_program_holds_its_tests():
    assert Config(by="tests").scores([rollout(HONEST, tests=TESTS)]) == [1.0]
    each = split_tests(TESTS)
    assert len(each) == 8
    broken_program = HONEST.replace("x**0.5", "x**0.6").replace("BEST = 7", "BEST = 8")
    config = Config(by="tests", share=True, correct=1.0, incorrect=-1.0)
    assert config.scores([rollout(broken_program, tests=TESTS)]) == [pytest.approx(-1 + 2 * 6 / 8)]


def test_the_code_of_an_answer():
    assert code_of("7 + 12\n") == "7 + 12"
    assert code_of("First\n```python\na = 1\n```\nbetter\n```python\na = 2\n```\nyes") == "a = 2\n"
    assert code_of("```text\nno\n```") == "```text\nno\n```"


def test_equal_values_agree():
    for answer, expected in [
        (1000, "1,000"),
        ("0.50", 0.5),
        (10**30, str(10**30)),
        ("1/2", "0.5"),
        (None, None),
        ((1, 2), "(1, 2)"),
    ]:
        assert agrees(answer, expected)
    for answer, expected in [
        (10**30 + 1, str(10**30)),
        (True, 1),
        ("", "0"),
        ("1/0", "0"),
        (float("nan"), "nan"),
        ([1], (1,)),
        (1, "one"),
    ]:
        assert not agrees(answer, expected)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"answer": "1"}, r"^a row: a reward reads 'tests'.*, but the row has the keys 'answer'\."),
        (
            {"id": 1, "tests": "assert ("},
            r"^a row with the keys 'id', 'tests': \"tests\" is not Python: '\(' was never closed \(.*\)\.",
        ),
        (
            {"tests": [1]},
            r"^a row with the keys 'tests': \"tests\" is not Python: expected a text or a list of texts, got list\.",
        ),
        ({"tests": "# none"}, r"^a row with the keys 'tests': \"tests\" has no tests\."),
    ],
)
def test_rows_that_cannot_judge_are_named(row: dict, message: str):
    with pytest.raises(DataError, match=message):
        Config(by="tests").scores([rollout("1", **row)])


def test_a_share_of_a_value_is_refused():
    with pytest.raises(ValueError, match=r"share: only for by 'tests'\."):
        bind(REWARDS, {"name": "python", "by": "value", "share": True})
