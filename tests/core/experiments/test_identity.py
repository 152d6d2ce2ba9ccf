"""Ids are haven's; what haven cannot hash faithfully is refused."""

import pathlib
import random
import string
import warnings
from typing import Any

import numpy as np
import pytest

from src.errors import ConfigError
from src.experiments.identity import check_values, exp_id

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # haven imports deprecated modules
    from haven.haven_utils import hash_dict

LETTERS = string.ascii_letters + string.digits + " _-/é漢:'\""
LEAVES = [None, True, False, 0, 1, -7, 10**20, 0.1, 1.0, -0.0, 1e-30, 1e300, "", "1", "a/b", "é"]


def leaf(rng: random.Random) -> Any:
    return rng.choice([*LEAVES, rng.random(), rng.randrange(10**6), "".join(rng.choices(LETTERS, k=5))])


def nested_list(rng: random.Random, depth: int) -> list[Any]:
    return [nested_list(rng, depth - 1) if depth and rng.random() < 0.3 else leaf(rng) for _ in range(rng.randrange(4))]


def nested_dict(rng: random.Random, depth: int) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for _ in range(rng.randrange(5)):
        key = "".join(rng.choices(LETTERS, k=rng.randrange(1, 6)))
        kind = rng.randrange(4) if depth else 0
        if kind == 1:
            result[key] = nested_dict(rng, depth - 1)
        elif kind == 2:
            result[key] = [nested_dict(rng, depth - 1) for _ in range(rng.randrange(3))]
        elif kind == 3:
            result[key] = nested_list(rng, depth)
        else:
            result[key] = leaf(rng)
    return result


@pytest.mark.parametrize("seed", range(5))
def test_the_id_is_havens_for_every_accepted_dict(seed: int):
    rng = random.Random(seed)
    for _ in range(400):
        exp = nested_dict(rng, 3)
        check_values(exp, "exp")
        assert exp_id(exp) == hash_dict(exp)
        assert exp_id(dict(reversed(exp.items()))) == exp_id(exp)


def test_a_known_id_never_moves():
    exp = {"recipe": "lm", "seed": 0, "model": {"name": "m", "rates": [0.1, 1e-05]}, "metrics": [{"name": "squad"}, {}]}
    assert exp_id(exp) == "6b9776d7f8a10a1c4b7eae7df16dfec2"


@pytest.mark.parametrize(
    ("exp", "message"),
    [
        ({1: "a"}, r"^g\[0\]: expected keys of type str, got 1 \(int\)\.$"),
        ({"m": {"a.b": 1}}, r"^g\[0\]\.m: a key must not be empty or contain a dot, got 'a\.b'"),
        ({"m": {"": 1}}, r"^g\[0\]\.m: a key must not be empty"),
        (
            {"m": {"t": (1, 2)}},
            r"^g\[0\]\.m\.t: expected a JSON value .*, got \(1, 2\) \(tuple\)\. Write a list instead\.$",
        ),
        ({"t": [1, (2,)]}, r"^g\[0\]\.t\[1\]: expected a JSON value .*\(tuple\)"),
        ({"s": {1}}, r"^g\[0\]\.s: .*\(set\)\. Write a list"),
        ({"x": [{"y": float("nan")}]}, r"^g\[0\]\.x\[0\]\.y: expected a finite number, got nan"),
        ({"x": -float("inf")}, r"^g\[0\]\.x: expected a finite number, got -inf"),
        ({"x": np.float64(0.5)}, r"^g\[0\]\.x: .*\(float64\)"),
        ({"x": np.zeros(2)}, r"^g\[0\]\.x: .*\(ndarray\)"),
        ({"p": pathlib.Path("a")}, r"^g\[0\]\.p: .*Path"),
        ({"f": len}, r"^g\[0\]\.f: .*builtin"),
        ({"l": [{"a": 1}, 2]}, r"^g\[0\]\.l: expected a list with only dicts or no dict, got 1 dicts among 2 values"),
        ({"l": [0, {"a": 1}]}, r"^g\[0\]\.l: expected a list with only dicts or no dict"),
        ({"l": [[1], [{"a": 1, "b": 2}]]}, r"^g\[0\]\.l\[1\]: a list inside a list contains dicts"),
        ({"x": "\ud800"}, r"^g\[0\]\.x: expected text that UTF-8 can encode"),
        ({"\udcff": 1}, r"^g\[0\]: expected text that UTF-8 can encode"),
        ({"x": [10**5000]}, r"^g\[0\]\.x\[0\]: expected a number of at most 300 digits"),
        ([], r"^g\[0\]: expected a dict, got \[\] \(list\)"),
    ],
)
def test_values_without_a_faithful_hash_are_refused(exp: Any, message: str):
    with pytest.raises(ConfigError, match=message):
        check_values(exp, "g[0]")


def nested(depth: int) -> dict[str, Any]:
    value: Any = 1
    for _ in range(depth):
        value = {"x": value}
    return value


def cyclic_dict() -> dict[str, Any]:
    loop: dict[str, Any] = {"a": {}, "b": []}
    loop["a"]["back"] = loop
    loop["b"] += [loop, loop]
    return loop


@pytest.mark.parametrize("exp", [nested(51), nested(100_000), cyclic_dict()], ids=["51", "100000", "loop"])
def test_deep_nesting_is_refused(exp: Any):
    check_values(nested(50), "g[0]")
    for value in (exp, {"l": [exp]}, [exp]):
        with pytest.raises(ConfigError, match=r"^g\[0\]: expected dicts and lists at most 50 deep"):
            check_values(value, "g[0]")
