"""Check whether an answer is an arithmetic expression of given numbers with a given value."""

import ast
import re
from collections.abc import Sequence

from src.errors import DataError
from src.experiments.config import Places
from src.experiments.dataset_protocols import Prediction
from src.experiments.interfaces import DatasetConfig, MetricConfig

_TASK = re.compile(r"Write an expression of (\d+) and (\d+) that gives (\d+)\.")
_PLAIN = re.compile(r"[0-9+\-* ()]{1,40}")
_OPERATORS = {ast.Add: int.__add__, ast.Sub: int.__sub__, ast.Mult: int.__mul__}


class Config(MetricConfig):
    """No settings."""

    def check_data(self, data: DatasetConfig, places: Places) -> None:
        for each in data.first_questions(places):
            if not _TASK.search(each.question):
                raise DataError(
                    f"metric 'expressions': expected questions such as {ask(2, 3, 6)!r}, got {each.question[:60]!r}. "
                    "Use another metric, such as 'math' or 'squad'."
                )

    def score(self, answers: Sequence[Prediction]) -> dict[str, list[float]]:
        """{"solved", "in_parentheses"} of each answer. Only questions in the format of `ask` can be solved."""
        return {
            "solved": [float(solves(answer.question, answer.text)) for answer in answers],
            "in_parentheses": [float(is_in_parentheses(answer.text)) for answer in answers],
        }


def ask(one: int, other: int, value: int) -> str:
    """The question for two numbers and a value."""
    return f"Write an expression of {one} and {other} that gives {value}."


def solves(question: str, answer: str) -> bool:
    """Whether an answer has the requested value and uses exactly the two numbers, each once."""
    task = _TASK.search(question)
    expression = read_expression(answer)
    return bool(
        task
        and expression
        and expression[0] == int(task[3])
        and sorted(expression[1]) == sorted(map(int, task.groups()[:2]))
    )


def is_in_parentheses(answer: str) -> bool:
    """Whether an answer is an expression in parentheses."""
    return answer.strip().startswith("(") and answer.strip().endswith(")") and read_expression(answer) is not None


def read_expression(text: str) -> tuple[int, list[int]] | None:
    """Value and numbers of an integer expression with +, - and *; None if the text is not one. No code is executed."""
    if not _PLAIN.fullmatch(text.strip()):
        return None
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except (SyntaxError, MemoryError):
        return None
    numbers = list[int]()

    def value_of(node: ast.expr) -> int:
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            return _OPERATORS[type(node.op)](value_of(node.left), value_of(node.right))
        if isinstance(node, ast.Constant) and type(node.value) is int and node.value < 10**9:
            numbers.append(node.value)
            return node.value
        raise ValueError

    try:
        return value_of(tree.body), numbers
    except ValueError:
        return None
