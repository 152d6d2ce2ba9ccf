"""Whether an answer is an expression of given numbers and value, as this Python finds; and whether in parentheses."""

import ast
import re
from collections.abc import Sequence

from src.experiments.dataset_protocols import Prediction
from src.experiments.interfaces import MetricConfig

_TASK = re.compile(r"Write an expression of (\d+) and (\d+) that gives (\d+)\.")
_PLAIN = re.compile(r"[0-9+\-* ()]{1,40}")
_OPERATORS = {ast.Add: int.__add__, ast.Sub: int.__sub__, ast.Mult: int.__mul__}


class Config(MetricConfig):
    """Nothing to choose."""

    def score(self, answers: Sequence[Prediction]) -> dict[str, list[float]]:
        """{"solved", "in_parentheses"} of each answer.
        A question is as `ask` writes it; an answer to another is not solved."""
        return {
            "solved": [float(solves(answer.question, answer.text)) for answer in answers],
            "in_parentheses": [float(is_in_parentheses(answer.text)) for answer in answers],
        }


def ask(one: int, other: int, value: int) -> str:
    """The task of two numbers and a value."""
    return f"Write an expression of {one} and {other} that gives {value}."


def solves(question: str, answer: str) -> bool:
    """Whether an answer uses both numbers of the task once, and nothing else, and has the value."""
    task = _TASK.search(question)
    expression = read_expression(answer)
    return bool(
        task
        and expression
        and expression[0] == int(task[3])
        and sorted(expression[1]) == sorted(map(int, task.groups()[:2]))
    )


def is_in_parentheses(answer: str) -> bool:
    """Whether an expression is written in parentheses."""
    return answer.strip().startswith("(") and answer.strip().endswith(")") and read_expression(answer) is not None


def read_expression(text: str) -> tuple[int, list[int]] | None:
    """The value of an expression of whole numbers with +, - and *, and its numbers;
    None where it is none. Nothing is run."""
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
