"""Rules that detect incidents in log lines, from resources/log_rules.yaml."""

import re
from collections.abc import Iterator
from functools import cache
from typing import Literal, NamedTuple

from src.files import ROOT, read_yaml

FILE = ROOT / "resources" / "log_rules.yaml"


class Rule(NamedTuple):
    """A rule for one kind of incident."""

    name: str
    severity: Literal["info", "warning", "error"]
    advice: str
    aftermath: bool
    """Whether ranks report it as a consequence of another rank's failure."""
    patterns: list[tuple[bytes, "re.Pattern[bytes]"]]
    """(literal text to search first, pattern that contains it), as bytes: logs need not be UTF-8.
    A pattern matches within one line."""


@cache
def rules() -> tuple[Rule, ...]:
    """All rules, by priority: the first match in a line counts.

    Raises:
        ConfigError: the file is missing or damaged.
    """

    def compile_signs(signs: dict[str, str]) -> list[tuple[bytes, "re.Pattern[bytes]"]]:
        return [
            (text.encode(), re.compile((pattern or re.escape(text)).encode(), re.MULTILINE))
            for text, pattern in signs.items()
        ]

    raw = read_yaml(FILE, "the rules of logs by name")
    return tuple(
        Rule(name, rule["severity"], rule["advice"], rule.get("aftermath", False), compile_signs(rule["signs"]))
        for name, rule in raw.items()
    )


def is_aftermath(name: object) -> bool:
    """Whether the rule `name` detects a consequence of another failure."""
    return any(rule.name == name and rule.aftermath for rule in rules())


def matches(text: bytes) -> Iterator[tuple[int, int, Rule]]:
    """(start, end without newline, rule) of each line of `text` that a rule matches, in order, each line once.

    Carriage returns, as in progress bars, also end lines.
    """
    lines = text.replace(b"\r", b"\n")
    order_at: dict[int, int] = {}
    for order, rule in enumerate(rules()):
        for sign, pattern in rule.patterns:
            if sign not in lines:
                continue
            for match in pattern.finditer(lines):
                start = lines.rfind(b"\n", 0, match.start()) + 1
                order_at[start] = min(order, order_at.get(start, order))
    for start in sorted(order_at):
        end = lines.find(b"\n", start)
        yield start, len(lines) if end < 0 else end, rules()[order_at[start]]
