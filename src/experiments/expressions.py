"""Conditions on rows, such as `model.stride > 2 and state == 'done'`: parsed by Python, never evaluated.

An expression is made of dotted names, numbers, strings, lists, None (or null), True and False (or true, false), the
comparisons == != < <= > >= in, not in, also chained (0 < x < 1), and, or, not, parentheses, and two calls:
`matches(name, 'regular expression')`, which searches a string (RE2, in linear time), and `value('em/nq')` for a name
that is not a dotted name.

A missing name is None. Ordering None, or a string and a number, gives False. True does not equal 1.
"""

import ast
import operator
import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

from src.errors import ConfigError
from src.support.patterns import compile_pattern

Row = Mapping[str, Any]
_Value = Callable[[Row], Any]
MAX_CHARACTERS = 10_000
MAX_DEPTH = 50
_WORDS = {"null": None, "true": True, "false": False}
_ORDER = {ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge}


@dataclass(frozen=True)
class Query:
    """A parsed expression."""

    text: str
    names: frozenset[str]
    """Every name it reads."""
    _value: _Value = field(repr=False, compare=False)

    def matches(self, row: Row) -> bool:
        """Whether it holds for `row`. Never raises."""
        return bool(self._value(row))


def compile(text: str, where: str = "query") -> Query:  # noqa: A001  as re.compile
    """Parse `text`. Error messages start with `where`.

    Raises:
        ConfigError: not such an expression; names the position in the text.
    """
    return _Parser(text, where).query()


class _Parser:
    def __init__(self, text: str, where: str) -> None:
        self.text, self.where = text, where
        self.line = text.replace("\n", " ").replace("\r", " ").lstrip()
        self.cut = len(text) - len(self.line)
        self.names: set[str] = set()

    def query(self) -> Query:
        if len(self.text) > MAX_CHARACTERS:
            raise ConfigError(
                f"{self.where}: {len(self.text)} characters, at most {MAX_CHARACTERS} can be read. Shorten it."
            )
        if not self.line:
            raise ConfigError(f"{self.where}: expected a comparison such as seed == 0, got nothing.")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of "\d", which is common in regular expressions
                tree = ast.parse(self.line, mode="eval")
            if _depth(tree.body) > MAX_DEPTH:
                raise RecursionError
            value = self.compile_node(tree.body)
        except SyntaxError as error:
            self.refuse_at((error.offset or len(self.line) + 1) - 1, self.advice(error))
        except (RecursionError, MemoryError, ValueError):
            raise ConfigError(
                f"{self.where}: {self.line[:60]!r} is nested more than {MAX_DEPTH} deep or has a zero byte. "
                "Simplify it."
            ) from None
        return Query(self.text, frozenset(self.names), value)

    def compile_node(self, node: ast.expr) -> _Value:
        """The value of `node` as a function of a row."""
        match node:
            case ast.Constant(value=None | bool() | int() | float() | str() as constant):
                return lambda _: constant
            case ast.Name() | ast.Attribute():
                return self.name(node)
            case ast.UnaryOp(
                op=ast.USub() | ast.UAdd() as sign, operand=ast.Constant(value=int() | float() as number)
            ) if not isinstance(number, bool):
                signed_number = -number if isinstance(sign, ast.USub) else number
                return lambda _: signed_number
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                inner = self.compile_node(operand)
                return lambda row: not inner(row)
            case ast.BoolOp(op=op, values=values):
                parts = [self.compile_node(value) for value in values]
                combined = all if isinstance(op, ast.And) else any
                return lambda row: combined(part(row) for part in parts)
            case ast.List(elts=items) | ast.Tuple(elts=items):
                members = [self.compile_node(item) for item in items]
                return lambda row: [member(row) for member in members]
            case ast.Compare():
                return self.comparison(node)
            case ast.Call():
                return self.call(node)
        return self.refuse(node, f"cannot use {ast.unparse(node)[:40]!r}")

    def name(self, node: ast.expr) -> _Value:
        words, inner = [], node
        while isinstance(inner, ast.Attribute):
            words.append(inner.attr)
            inner = inner.value
        if not isinstance(inner, ast.Name):
            self.refuse(node, f"expected a dotted name, got {ast.unparse(node)[:40]!r}")
        if not words and inner.id in _WORDS:
            word = _WORDS[inner.id]
            return lambda _: word
        return self.look_up(".".join([inner.id, *reversed(words)]))

    def look_up(self, name: str) -> _Value:
        self.names.add(name)
        return lambda row: row.get(name)

    def comparison(self, node: ast.Compare) -> _Value:
        values = [self.compile_node(value) for value in (node.left, *node.comparators)]
        tests = []
        for sign, second in zip(node.ops, node.comparators, strict=True):
            if isinstance(sign, ast.Is | ast.IsNot):
                self.refuse(second, "write == or != instead of 'is'")
            tests.append(_test(sign))
        links = list(zip(tests, values[:-1], values[1:], strict=True))
        return lambda row: all(test(first(row), second(row)) for test, first, second in links)

    def call(self, node: ast.Call) -> _Value:
        match node:
            case ast.Call(func=ast.Name(id="value"), args=[ast.Constant(value=str() as name)], keywords=[]):
                return self.look_up(name)
            case ast.Call(
                func=ast.Name(id="matches"), args=[searched, ast.Constant(value=str() as pattern) as given], keywords=[]
            ):
                text = self.compile_node(searched)
                try:
                    search = compile_pattern(pattern).search
                except ValueError as error:
                    self.refuse(given, str(error))
                return lambda row: (
                    isinstance(value := text(row), str) and search(value.encode(errors="replace").decode()) is not None
                )
        return self.refuse(
            node,
            f"the only calls are matches(name, 'regular expression') and value('name'), got {ast.unparse(node)[:40]!r}",
        )

    def advice(self, error: SyntaxError) -> str:
        if "~" in self.line:
            return "to search, write matches(name, 'regular expression') instead of ~"
        if "&&" in self.line or "||" in self.line:
            return "write 'and' and 'or' instead of && and ||"
        if re.search(r"(?<![=!<>])=(?!=)", self.line):
            return "write == to compare"
        return error.msg

    def refuse(self, node: ast.expr, problem: str) -> NoReturn:
        before = self.line.encode()[: node.col_offset]
        self.refuse_at(len(before.decode()), problem)

    def refuse_at(self, place: int, problem: str) -> NoReturn:
        """place: number of characters of `self.line` before the mistake."""
        rest = self.line[place : place + 30]
        at = f"at {rest!r}" if rest else "at the end"
        raise ConfigError(f"{self.where}, character {self.cut + place + 1} ({at}): {problem.rstrip('.')}.") from None


def _depth(tree: ast.expr) -> int:
    depth, level = 0, [tree]
    while level:
        depth, level = (
            depth + 1,
            [child for node in level for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr)],
        )
    return depth


def _test(sign: ast.cmpop) -> Callable[[Any, Any], bool]:
    match sign:
        case ast.Eq():
            return _is_equal
        case ast.NotEq():
            return lambda first, second: not _is_equal(first, second)
        case ast.In():
            return _is_in
        case ast.NotIn():
            return lambda first, second: not _is_in(first, second)
    compare = _ORDER[type(sign)]
    return lambda first, second: _have_order(first, second) and compare(first, second)


def _is_equal(first: Any, second: Any) -> bool:
    """As in Python, but True is not 1."""
    if isinstance(first, bool) or isinstance(second, bool):
        return first is second
    if isinstance(first, list) and isinstance(second, list):
        return len(first) == len(second) and all(map(_is_equal, first, second))
    return first == second


def _is_in(value: Any, container: Any) -> bool:
    if isinstance(container, list):
        return any(_is_equal(value, item) for item in container)
    return isinstance(value, str) and isinstance(container, str) and value in container


def _have_order(first: Any, second: Any) -> bool:
    return (_is_number(first) and _is_number(second)) or (isinstance(first, str) and isinstance(second, str))


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
