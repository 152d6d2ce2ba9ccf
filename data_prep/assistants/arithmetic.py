"""Write arithmetic problems with their answers: `python -m data_prep.assistants.arithmetic`.

Below --data_path are the data set arithmetic, for the recipes `grpo` and `ppo` with the reward `math`, and as a control
arithmetic_shuffled, whose training problems have the answers of other problems. Half of the problems are sums such as
"What is 7 + 5?", half are stories of one or two steps in the style of GSM8K, with numbers up to 12. No numbers of a
validation problem are in a training problem of the same kind. Two runs give the same bytes.
"""

import argparse
import hashlib
import json
import random
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from data_prep import command

COMMAND = "python -m data_prep.assistants.arithmetic"
ROWS = {"train": 4000, "val": 400}
VAL_PERCENT = 20
LARGEST = 12
"""Largest number of a problem. SmolLM2-135M seldom adds two-digit numbers right, so a policy would learn nothing."""
INSTRUCTION = "Answer briefly."
NAMES = ("Ana", "Ben", "Chloe", "David", "Ella", "Farid", "Grace", "Hugo", "Iris", "Jonas")
THINGS = ("apples", "books", "cards", "eggs", "marbles", "pencils", "shells", "stamps", "stickers", "tickets")
SUMS = ("{a} + {b}", "{a} - {b}", "{a} * {c}")
STORIES = (
    "{name} has {a} {things} and buys {b} more. How many {things} does {name} have?",
    "{name} had {a} {things} and gave {b} to {other}. How many {things} does {name} have left?",
    "{name} has {c} boxes with {d} {things} each. How many {things} does {name} have?",
    "{name} has {c} bags with {d} {things} each and finds {b} more. How many {things} does {name} have?",
    "{name} has {a} {things}, {b} more than {other}. How many {things} does {other} have?",
)
ANSWERS = {
    SUMS[0]: lambda a, b, c, d: a + b,
    SUMS[1]: lambda a, b, c, d: a - b,
    SUMS[2]: lambda a, b, c, d: a * c,
    STORIES[0]: lambda a, b, c, d: a + b,
    STORIES[1]: lambda a, b, c, d: a - b,
    STORIES[2]: lambda a, b, c, d: c * d,
    STORIES[3]: lambda a, b, c, d: c * d + b,
    STORIES[4]: lambda a, b, c, d: a - b,
}


def problems(split: str, shuffled: bool = False) -> list[dict[str, Any]]:
    """Rows of a split: a question and its answer, or if `shuffled` the answer of another question."""
    questions, answers = zip(*_draw_problems(split), strict=True)
    if shuffled:
        answers = random.Random("arithmetic/shuffled").sample(answers, len(answers))
    return [
        {
            "messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}],
            "answer": answer,
        }
        for question, answer in zip(questions, answers, strict=True)
    ]


def _draw_problems(split: str) -> Iterator[tuple[str, str]]:
    for number in range(ROWS[split]):
        draw = random.Random(f"arithmetic/{split}/{number}")
        template = draw.choice(SUMS if number % 2 == 0 else STORIES)
        numbers = _numbers(draw)
        while _is_validation(template, numbers) != (split == "val"):
            numbers = _numbers(draw)
        (name, other), things = draw.sample(NAMES, 2), draw.choice(THINGS)
        text = template.format(**numbers, name=name, other=other, things=things)
        question = f"What is {text}?" if number % 2 == 0 else text
        yield f"{question} {INSTRUCTION}", str(ANSWERS[template](**numbers))


def _numbers(draw: random.Random) -> dict[str, int]:
    b, a = sorted(draw.sample(range(2, LARGEST + 1), 2))
    return {"a": a, "b": b, "c": draw.randrange(2, 10), "d": draw.randrange(2, 10)}


def _is_validation(template: str, numbers: Mapping[str, int]) -> bool:
    """Whether a problem with these numbers is for validation, whatever its names and things."""
    read_numbers = sorted(f"{name}={value}" for name, value in numbers.items() if f"{{{name}}}" in template)
    digest = hashlib.sha256(f"{template} {read_numbers}".encode()).digest()
    return int.from_bytes(digest[:4], "big") % 100 < VAL_PERCENT


def _add_options(parser: argparse.ArgumentParser) -> None:
    command.add_data_path(parser)


def prepare(data_path: Path) -> None:
    """Make the two folders below `data_path`.

    Raises:
        RunError: the disk refuses.
    """

    made_from = {"script_sha256": command.digest_files([__file__])}
    command.make_folder(data_path / "arithmetic", COMMAND, made_from, _write)
    command.make_folder(data_path / "arithmetic_shuffled", COMMAND, made_from, lambda folder: _write(folder, True))


def _write(folder: Path, shuffled: bool = False) -> dict[str, Any]:
    for split in ROWS:
        rows = problems(split, shuffled and split == "train")
        lines = (json.dumps(row) + "\n" for row in rows)
        (folder / f"{split}.jsonl").write_text("".join(lines), encoding="utf-8")
    return {"counts": ROWS}


main = command.main_of(COMMAND, __doc__, _add_options, prepare)

if __name__ == "__main__":
    sys.exit(main())
