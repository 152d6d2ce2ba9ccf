"""Whether a program that a model wrote computes the right value or passes its tests.

Protection. A program runs in a sandbox (src/systems/assistants/rewards/sandbox.py) that contains no answers. With `by:
value` the program is evaluated there and its value is compared here. With `by: tests` the tests run in a second
sandbox, which the program cannot see, read or kill. The tests use the program through proxies, which send operations
through a pipe. Plain data, values of the standard library, functions and objects can cross the pipe in both directions.
A result of the program equals plain data only if it is plain data of an exact type (for the rules, see
src/systems/assistants/rewards/isolated_remote.py). A test passes if the second sandbox writes the nonce of this run
after it. So a program gains nothing by exiting (exit 0), guessing a nonce, changing builtins, `assert` or `__eq__`,
`atexit`, threads, or searching frames, files and descriptors: it only gets the arguments of its calls. Names of
builtins and, before a dot, of modules of the standard library are never taken from the program.

Limits of the protection. Values can be guessed: half of all guesses pass a test for True or False, so write several
tests. In some tests the program decides: comparisons of two of its results (`assert f(1) == f(1)`), tests that call a
checker of the program, and arithmetic or `in` with an object that the test constructs (`abs(Money(5) - 3) < 1`). Tests
that read the program's source always fail.
"""

import ast
import json
import math
import re
import secrets
import sys
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any, Literal, NoReturn, Self

from pydantic import model_validator

from src.errors import DataError
from src.evaluation.metrics.math import final_answer
from src.experiments.config import Places
from src.systems.assistants.rewards import isolated, isolated_values, sandbox
from src.systems.assistants.rewards.interface import RewardConfig, RewardSetting, Rollout, Scorer, row_entry

_FENCE = re.compile(r"^```(?:python|py)[^\S\n]*\n(.*?)^```", re.DOTALL | re.MULTILINE | re.IGNORECASE)
_NUMBER = re.compile(
    r"[-+]?(\d{1,400}(\.\d{0,400})?|\.\d{1,400})(e[-+]?\d{1,3})?|[-+]?\d{1,400}/0*[1-9]\d{0,400}", re.IGNORECASE
)


class Config(RewardConfig):
    """How a program is judged. A truncated answer is wrong."""

    by: Literal["value", "tests"]
    """value: the last expression, or else the last printed line, must equal the row's "answer".
    tests: the program must pass the row's "tests"."""
    correct: float = 1.0
    """Score of a program that passes all tests."""
    incorrect: float = 0.0
    """Score of a program that fails one."""
    share: bool = False
    """Whether to interpolate between `incorrect` and `correct` by the share of passed tests."""
    limits: sandbox.Limits = sandbox.Limits()

    @model_validator(mode="after")
    def _check_share(self) -> Self:
        if self.share and self.by == "value":
            raise ValueError("share: only for by 'tests'. Remove it.")
        return self

    @property
    def row_key(self) -> str:
        return "answer" if self.by == "value" else "tests"

    def check(self, places: Places) -> None:
        sandbox.require()

    def scorer(self, setting: RewardSetting) -> Scorer:
        sandbox.require()
        return self.scores

    def scores(self, rollouts: Sequence[Rollout]) -> list[float]:
        """One score per rollout."""
        rows = [row_entry(rollout.row, self.row_key) for rollout in rollouts]
        orders = [
            _Value(row) if self.by == "value" else _Tests(rollout.row, row)
            for rollout, row in zip(rollouts, rows, strict=True)
        ]
        run = [place for place, rollout in enumerate(rollouts) if rollout.is_complete]
        programs = [orders[place].make_program(code_of(rollouts[place].text)) for place in run]
        shares = [0.0] * len(rollouts)
        for place, result in zip(run, sandbox.run_programs(programs, self.limits), strict=True):
            shares[place] = orders[place].share(result)
        return [
            self.correct if s == 1 else self.incorrect + (self.correct - self.incorrect) * s * self.share
            for s in shares
        ]


def code_of(text: str) -> str:
    """The last ```python fence of an answer, or all of the answer."""
    fences = _FENCE.findall(text)
    return fences[-1] if fences else text.strip()


class _Value:
    """The value that a program must compute."""

    def __init__(self, answer: Any) -> None:
        self.answer = final_answer(answer) if isinstance(answer, str) else answer

    def make_program(self, code: str) -> sandbox.Program:
        return sandbox.Program("serve", isolated.write_message(["evaluate", code]))

    def share(self, result: sandbox.Result) -> float:
        """1 for the right value, else 0."""
        output = result.output
        if result.end_reason != "exit" or len(output) < 4 or int.from_bytes(output[:4], "big") != len(output) - 4:
            return 0.0
        try:
            value, stdout = isolated_values.read_value(json.loads(output[4:])["value"], _find_nothing)
        except Exception:  # noqa: BLE001  the program can write any bytes; the training must continue
            return 0.0
        if value is None and isinstance(stdout, str):
            lines = stdout.strip().splitlines()
            return float(any(agrees(text, self.answer) for text in (stdout, *lines[-1:])))
        return float(agrees(value, self.answer))


def _find_nothing(kind: str, _: Any) -> NoReturn:
    raise ValueError(f"{kind}: not plain data")


def agrees(value: Any, expected: Any) -> bool:
    """Whether two values are equal. Numbers can be texts, and are compared to nine digits unless both are integers.
    Other values must have the same type, or be equal as texts."""
    one, other = _number(value), _number(expected)
    if one is not None and other is not None:
        are_integers = one.denominator == other.denominator == 1
        return one == other or (not are_integers and abs(one - other) <= max(abs(one), abs(other)) / 10**9)
    if isinstance(expected, str) and not isinstance(value, str):
        try:
            expected = ast.literal_eval(expected)
        except (ValueError, SyntaxError):
            return False
    if isinstance(value, str) and not isinstance(expected, str):
        expected = str(expected)
    if isinstance(value, str) and isinstance(expected, str):
        return value.strip() == expected.strip()
    return type(value) is type(expected) and value == expected


def _number(value: Any) -> Fraction | None:
    if isinstance(value, str):
        text = value.strip().replace(",", "")
        return Fraction(text) if _NUMBER.fullmatch(text) else None
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or (isinstance(value, float) and not math.isfinite(value))
    ):
        return None
    return Fraction(value)


class _Tests:
    """Tests the program must pass."""

    def __init__(self, row: Mapping[str, Any], tests: Any) -> None:
        self.nonce = secrets.token_hex(16)
        try:
            self.tests = split_tests(tests)
            trees = [ast.parse(test) for test in self.tests]
        except (SyntaxError, ValueError) as error:
            raise DataError(
                f'a row with the keys {", ".join(map(repr, row))}: "tests" is not Python: {error}. '
                "Change or remove the row."
            ) from None
        if not self.tests:
            raise DataError(f'a row with the keys {", ".join(map(repr, row))}: "tests" has no tests. Remove the row.')
        before_dots = {name for tree in trees for name in _names_before_dots(tree)}
        self.modules = sorted(before_dots & sys.stdlib_module_names)

    def make_program(self, code: str) -> sandbox.Program:
        order = {"nonce": self.nonce, "tests": self.tests, "modules": self.modules, "program": code}
        return sandbox.Program("judge", json.dumps(order).encode())

    def share(self, result: sandbox.Result) -> float:
        """Share of passed tests; below 1 if the judge did not finish."""
        lines = set(result.output.decode(errors="replace").split("\n"))
        num_passed = sum(f"{self.nonce} {number}" in lines for number in range(len(self.tests)))
        is_complete = f"{self.nonce} end" in lines and result.end_reason == "exit"
        return num_passed / len(self.tests) if is_complete else min(num_passed, len(self.tests) - 1) / len(self.tests)


def _names_before_dots(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            yield node.value.id


def split_tests(tests: Any) -> list[str]:
    """Split tests, given as a list or a text: a test is a top-level assertion or call with the statements before it.

    Raises:
        ValueError: neither a list of texts nor a text.
        SyntaxError: not Python.
    """
    if isinstance(tests, list) and all(isinstance(test, str) for test in tests):
        return tests
    if not isinstance(tests, str):
        raise ValueError(f"expected a text or a list of texts, got {type(tests).__name__}")
    split, waiting = [], []
    for statement in ast.parse(tests).body:
        waiting.append(ast.unparse(statement))
        if isinstance(statement, ast.Assert | ast.Expr) and not _is_text(statement):
            split.append("\n".join(waiting))
            waiting = []
    if waiting and split:
        split[-1] += "\n" + "\n".join(waiting)
    return split or (["\n".join(waiting)] if waiting else [])


def _is_text(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
