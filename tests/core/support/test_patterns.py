"""Searches end however a pattern is nested."""

import subprocess
import sys

import pytest

from src.errors import ConfigError
from src.experiments import expressions
from tests.conftest import ROOT

CATASTROPHIC = [
    "(a+)+b",
    "(a|a)*b",
    "(a|aa)+$",
    "(.*a){25}b",
    "a*a*a*a*a*a*a*b",
    "^(([a-z])+.)+[A-Z]([a-z])+$",
    "((a*)*)*b",
]


def test_no_pattern_hangs():
    """In a process of its own, as nothing in this one could end it."""
    code = f"""
from src.experiments import expressions
for pattern in {CATASTROPHIC!r}:
    assert not expressions.compile(f"matches(name, {{pattern!r}})").matches({{"name": "a" * 2000 + "!"}}), pattern
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("pattern", "why"),
    [
        (r"(a)\1", r"invalid escape sequence: \1"),
        ("(?=a)", "invalid perl operator: (?="),
        ("a{100000}", "invalid repetition size"),
        ("(", "missing )"),
    ],
)
def test_invalid_patterns_are_refused(pattern: str, why: str):
    with pytest.raises(ConfigError) as error_info:
        expressions.compile(f"matches(name, {pattern!r})")
    assert f"{pattern!r} is not a valid RE2 expression: {why}" in str(error_info.value)
