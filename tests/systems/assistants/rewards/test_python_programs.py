"""Right programs pass their tests and hostile ones pass none."""

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import yaml

from src.systems.assistants.rewards.python import Config
from src.systems.assistants.rewards.sandbox import Limits
from tests.systems.assistants.rewards.rollouts import needs_bubblewrap, rollout

pytestmark = needs_bubblewrap
FOLDER = Path(__file__).parent
_RIGHT = yaml.safe_load((FOLDER / "right_programs.yaml").read_text())
RIGHT = {
    name: (_RIGHT["shared"].get(entry["program"], entry["program"]), entry["tests"])
    for name, entry in _RIGHT["programs"].items()
}
HOSTILE = yaml.safe_load((FOLDER / "hostile_programs.yaml").read_text())
LIMITS = Limits(seconds=60, cpu_seconds=20)


@pytest.mark.parametrize("name", RIGHT)
def test_tests_are_right_without_a_sandbox(name: str):
    namespace: dict[str, Any] = {"__name__": "program", "math": math}
    for source in RIGHT[name]:
        exec(source, namespace)


@pytest.mark.slow
def test_right_programs_score_1():
    scores = Config(by="tests").scores([rollout(program, tests=tests) for program, tests in RIGHT.values()])
    assert [name for name, score in zip(RIGHT, scores, strict=True) if score != 1] == []
    assert len(scores) >= 60


@pytest.mark.slow
def test_programs_without_content_score_0():
    """The tests can fail: each program is replaced by the same names with functions and classes that do nothing."""

    def empty(line: str) -> str:
        for word, value in (("def ", "lambda *_, **__: None"), ("class ", "object")):
            if line.startswith(word):
                return f"{line.removeprefix(word).partition('(')[0].partition(':')[0]} = {value}"
        return ""

    empty_programs = ["\n".join(map(empty, program.split("\n"))) for program, _ in RIGHT.values()]
    tests = [tests for _, tests in RIGHT.values()]
    scores = Config(by="tests").scores(
        [rollout(code, tests=each) for code, each in zip(empty_programs, tests, strict=True)]
    )
    assert [name for name, score in zip(RIGHT, scores, strict=True) if score] == []


def shares_of_tests(programs: dict[str, dict[str, str]], tests: list[str], honest: str) -> dict[str, float]:
    """The share of passed tests of each program; the honest one passes all."""
    secret = 8642 * 10**9 + random.SystemRandom().randrange(10**9)
    tests = [test.replace("SECRET", str(secret)) for test in tests]
    config = Config(by="tests", share=True, limits=LIMITS)
    texts = [*map(source_of, programs.values()), honest.replace("SECRET", str(secret))]
    *scores, right = config.scores([rollout(text, tests=tests) for text in texts])
    assert right == 1
    return dict(zip(programs, scores, strict=True))


def source_of(entry: dict[str, str]) -> str:
    return HOSTILE["prefixes"].get(entry.get("after"), "") + entry["program"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["function", "class"])
def test_hostile_programs_pass_no_test(kind: str):
    programs = HOSTILE["functions" if kind == "function" else "classes"]
    shares = shares_of_tests(programs, HOSTILE[f"{kind}_tests"], HOSTILE[f"honest_{kind}"])
    assert {name: share for name, share in shares.items() if share} == {}


def test_objects_equal_no_plain_data():
    tests = [
        "assert Money(7) == 8642",
        "assert 8642 == Money(7)",
        "assert 8641 < Money(7) < 8643",
        "assert Money(7) in [8642]",
    ]
    scores = Config(by="tests", share=True).scores(
        [rollout(source_of(entry), tests=tests) for entry in HOSTILE["classes"].values()]
    )
    assert scores == [0] * len(scores)


@pytest.mark.slow
def test_all_reference_solutions_of_mbpp_score_1(shared_data: Path):
    rows = [json.loads(line) for line in (shared_data / "instruct/mbpp/mbpp.train.jsonl").read_text().splitlines()]
    tests = [[f"{row['test_setup_code']}\n{test}" for test in row["test_list"]] for row in rows]
    scores = Config(by="tests").scores(
        [rollout(row["code"], tests=each) for row, each in zip(rows, tests, strict=True)]
    )
    assert (sum(scores), len(scores)) == (474, 474)
