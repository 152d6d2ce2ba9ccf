"""Conversations of the embedded default: their answers are right, and their splits share no task."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from data_prep.assistants import doctest_examples, stdlib_conversations
from src.evaluation.metrics.expressions import is_in_parentheses, solves
from src.systems.assistants.conversations.entries import read_entry


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made of the examples of three modules."""
    folder = tmp_path_factory.mktemp("conversations")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            stdlib_conversations.doctest_examples.stdlib_pages, "modules", lambda: ["difflib", "heapq", "textwrap"]
        )
        assert stdlib_conversations.main(["--data_path", str(folder / "a")]) == 0
        assert stdlib_conversations.main(["--data_path", str(folder / "b")]) == 0
        assert not stdlib_conversations.prepare(folder / "a"), "what is whole is not made again"
    return folder


def rows(folder: Path, name: str, split: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "a" / name / f"{split}.jsonl").read_text().splitlines()]


def test_two_runs_give_the_same_bytes(folder: Path):
    for path in (folder / "a").rglob("*.json*"):
        other = folder / "b" / path.relative_to(folder / "a")
        assert path.name == "manifest.json" or path.read_bytes() == other.read_bytes(), path.name


def test_answers_are_right_and_half_in_parentheses(folder: Path):
    for split in ("train", "val"):
        texts = [[message["content"] for message in row["messages"]] for row in rows(folder, "expression_tasks", split)]
        assert all(solves(question, answer) for question, answer in texts)
    in_parentheses = [
        is_in_parentheses(row["messages"][1]["content"]) for row in rows(folder, "expression_tasks", "train")
    ]
    assert 0.45 < sum(in_parentheses) / len(in_parentheses) < 0.55


def task_of(row: dict[str, Any]) -> tuple[Any, ...]:
    numbers = [int(word.strip(".")) for word in row["messages"][0]["content"].split() if word.strip(".").isdigit()]
    return (*sorted(numbers[:2]), numbers[2])


def test_no_task_is_in_both_splits(folder: Path):
    for name in ("expression_tasks", "expression_replies", "expression_pairs"):
        train, val = ({task_of(row) for row in rows(folder, name, split)} for split in ("train", "val"))
        assert val
        assert not train & val


def test_replies_are_ranked_by_kind(folder: Path):
    for row in rows(folder, "expression_replies", "train"):
        read_entry(row, "here")
        question, replies = row["messages"][0]["content"], [reply["content"] for reply in row["replies"]]
        assert [solves(question, text) for text in replies] == [True, True, False, False, False]
        assert [is_in_parentheses(text) for text in replies[:2]] == [True, False]
    for row in rows(folder, "expression_pairs", "train"):
        question, (better, worse) = row["messages"][0]["content"], [reply["content"] for reply in row["replies"]]
        assert solves(question, better)
        assert is_in_parentheses(better)
        assert solves(question, worse) != is_in_parentheses(worse), "the other lacks one of the two"


def test_examples_print_their_documented_output(folder: Path):
    conversations = [row["messages"] for split in ("train", "val") for row in rows(folder, "stdlib_doctests", split)]
    assert len(conversations) > 10
    answers = {question["content"]: answer["content"] for question, answer in conversations}
    assert all(question.startswith("What does Python print?\n") for question in answers)
    assert all(answers.values())


def test_an_example_that_differs_from_run_to_run_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    code = ">>> 1 + 1\n2\n>>> 1 + 1\n3\n>>> raise ValueError\nTraceback (most recent call last):\nValueError\n"
    (tmp_path / "odd.py").write_text(f'"""\n{code}"""\n')
    monkeypatch.syspath_prepend(tmp_path)
    assert list(doctest_examples.run_module("odd")) == [("1 + 1", "2")]


def test_a_task_has_one_right_operator():
    draw = random.Random(0)
    for split in ("train", "val"):
        for task in stdlib_conversations.tasks(split):
            row = stdlib_conversations.rank_replies(task, draw)
            assert len({reply["content"] for reply in row["replies"]}) == 5
