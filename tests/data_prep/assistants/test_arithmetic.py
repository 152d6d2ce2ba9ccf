"""Arithmetic problems: right answers, no numbers of validation in training, and a control with other answers."""

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

from data_prep.assistants import arithmetic


def rows(folder: Path, split: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / f"{split}.jsonl").read_text().splitlines()]


def numbers(row: dict[str, Any]) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", row["messages"][0]["content"])]


def expected(question: str, read: list[int]) -> int:
    """The answer by the words of the question."""
    if "*" in question or "boxes" in question:
        return read[0] * read[1]
    if "bags" in question:
        return read[0] * read[1] + read[2]
    return read[0] + read[1] if "+" in question or "buys" in question else read[0] - read[1]


def test_answers_are_right_and_kinds_are_mixed(tmp_path: Path):
    assert arithmetic.main(["--data_path", str(tmp_path)]) == 0
    for split in ("train", "val"):
        for row in rows(tmp_path / "arithmetic", split):
            question, answer = (message["content"] for message in row["messages"])
            assert answer == row["answer"] == str(expected(question, numbers(row))), row
    kinds = Counter(
        re.sub(r"\d+", "0", row["messages"][0]["content"])[:8] for row in rows(tmp_path / "arithmetic", "val")
    )
    assert kinds["What is "] == 200
    assert len(kinds) > 8


def test_no_numbers_of_validation_are_in_training(tmp_path: Path):
    arithmetic.main(["--data_path", str(tmp_path)])

    def problems(split: str) -> set[tuple[str, ...]]:
        words = (row["messages"][0]["content"] for row in rows(tmp_path / "arithmetic", split))
        names = "|".join((*arithmetic.NAMES, *arithmetic.THINGS))
        return {tuple(re.split(r"\s", re.sub(names, "_", text))) for text in words}

    assert not problems("train") & problems("val")


def test_the_control_has_the_questions_with_other_answers(tmp_path: Path):
    arithmetic.main(["--data_path", str(tmp_path)])
    train, shuffled = (rows(tmp_path / name, "train") for name in ("arithmetic", "arithmetic_shuffled"))
    assert [row["messages"][0] for row in train] == [row["messages"][0] for row in shuffled]
    assert Counter(row["answer"] for row in train) == Counter(row["answer"] for row in shuffled)
    equal = sum(one["answer"] == other["answer"] for one, other in zip(train, shuffled, strict=True))
    assert equal < 0.05 * len(train)
    assert rows(tmp_path / "arithmetic", "val") == rows(tmp_path / "arithmetic_shuffled", "val")
