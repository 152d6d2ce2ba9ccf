"""Searches mean what those of `re` mean, and end however a pattern is nested."""

import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

from src.errors import ConfigError
from src.experiments import expressions
from src.experiments.regular_expressions import Pattern

ROOT = Path(__file__).resolve().parents[2]
CATASTROPHIC = [
    "(a+)+b",
    "(a|a)*b",
    "(a|aa)+$",
    "(.*a){25}b",
    "a*a*a*a*a*a*a*b",
    "^(([a-z])+.)+[A-Z]([a-z])+$",
    "((a*)*)*b",
    "(a?){40}a{40}b",
]
ATOMS = [
    "a",
    "b",
    ".",
    "[ab]",
    "[^a]",
    "[a-c1]",
    r"\d",
    r"\w",
    r"\s",
    r"\W",
    r"\D",
    r"\S",
    r"[\w-]",
    r"\n",
    "^",
    "$",
    r"\b",
    r"\B",
    r"\A",
    r"\Z",
    "é",
    "B",
    "",
]


def pattern(rng: random.Random, depth: int = 3) -> str:
    kind = rng.randrange(7) if depth else 0
    inner = pattern(rng, depth - 1) if kind else ""
    if kind < 2:
        return rng.choice(ATOMS)
    if kind == 2:
        return inner + pattern(rng, depth - 1)
    if kind == 3:
        return f"(?:{inner}|{pattern(rng, depth - 1)})"
    repeated = rng.choice(["*", "+", "?", "{2}", "{1,3}", "{,2}", "{2,}", "*?", "+?"])
    return {4: f"(?:{inner}){repeated}", 5: f"({inner}){repeated}", 6: f"(?{rng.choice(['i', 's', 'm', 'a', 'i-s'])}:{inner})"}[kind]


@pytest.mark.parametrize("seed", range(4))
def test_it_finds_what_re_finds(seed: int):
    rng = random.Random(seed)
    for _ in range(3000):
        text = pattern(rng)
        known = re.compile(text)
        searched = Pattern(text)
        for _ in range(6):
            value = "".join(rng.choice("aabbAB1 -_\né") for _ in range(rng.randrange(8)))
            assert searched.search(value) == (known.search(value) is not None), (text, value)


def test_no_pattern_hangs():
    """In a process of its own, as nothing in this one could end it."""
    code = f"""
from src.experiments import expressions
for pattern in {CATASTROPHIC!r}:
    assert not expressions.compile(f"matches(name, {{pattern!r}})").matches({{"name": "a" * 2000 + "!"}}), pattern
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (r"(a)\1", "backreferences, lookaround and atomic groups may take forever"),
        ("(?=a)", "lookaround"),
        ("(?<!a)b", "lookaround"),
        ("(?>a)", "atomic groups"),
        ("a{100000}", "more than 5000 states"),
        ("((a{99}){99}){99}", "more than 5000 states"),
        ("(", "missing ), unterminated subpattern"),
    ],
)
def test_what_is_refused(text: str, message: str):
    with pytest.raises(
        ConfigError, match=rf"not a regular expression: .*{re.escape(message)}|not a regular expression: {re.escape(message)}"
    ):
        expressions.compile(f"matches(name, {text!r})")
