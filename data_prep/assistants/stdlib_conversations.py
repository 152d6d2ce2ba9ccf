"""Write conversations that need no download: `python -m data_prep.assistants.stdlib_conversations`.

Below --data_path are four data sets and a tokenizer of characters, expression_tokenizer:
expression_tasks: "Write an expression of 7 and 12 that gives 19.", answered by a program; half of the answers are in
parentheses;
expression_replies: replies to such tasks from best to worst: right and in parentheses, as people prefer it (in our
example); right; with the wrong value; with other numbers; not Python;
expression_pairs: pairs of replies: the better one is right and in parentheses, the other is wrong or without them;
stdlib_doctests: examples of the standard library's documentation, with the output of this Python; run twice, and
dropped if the outputs differ. No task of a validation split is in a training split. Two runs on the same Python give
the same bytes.
"""

import argparse
import hashlib
import json
import platform
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from data_prep import command
from data_prep.assistants import doctest_examples
from data_prep.crossattn.stdlib_qa import END_OF_TEXT, PAD
from src.evaluation.metrics import expressions

COMMAND = "python -m data_prep.assistants.stdlib_conversations"
_SEED = "stdlib_conversations"
SPLITS = ("train", "val")
NUMBERS = range(2, 21)
OPERATORS = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}
VAL_PERCENT = 20
ANSWERS = 1200
CONTROLS = ("<|prompter|>", "<|assistant|>", "<|system|>", "<|prefix_begin|>", "<|prefix_end|>")


def _add_options(parser: argparse.ArgumentParser) -> None:
    command.add_data_path(parser)


def prepare(data_path: Path) -> bool:
    """Make the folders below `data_path`; False if they are complete and up to date.

    Raises:
        RunError: the disk refuses.
    """
    scripts = (__file__, expressions.__file__, doctest_examples.__file__)
    made_from = {"python": platform.python_version(), "scripts_sha256": command.digest_files(scripts)}
    fills: dict[str, Callable[[Path], Mapping[str, Any]]] = {
        "expression_tokenizer": _write_tokenizer,
        "expression_tasks": lambda folder: _write_rows(
            folder, {"train": _write_answers("train"), "val": _ask_once("val")}
        ),
        "expression_replies": lambda folder: _write_rows(folder, {split: _rank_all(split) for split in SPLITS}),
        "expression_pairs": lambda folder: _write_rows(folder, {split: _pairs(split) for split in SPLITS}),
        "stdlib_doctests": lambda folder: _write_rows(folder, _split_doctests()),
    }
    results = [command.make_folder(data_path / name, COMMAND, made_from, fill) for name, fill in fills.items()]
    return any(results)


def tasks(split: str) -> list[tuple[int, int, str]]:
    """All tasks of a split as (number, number, operator), the larger number first."""
    every = [(a, b, operator) for a in NUMBERS for b in NUMBERS if b < a for operator in OPERATORS]
    return [task for task in every if (_percent(f"{task}") < VAL_PERCENT) == (split == "val")]


def _percent(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") % 100


def _question(task: tuple[int, int, str], draw: random.Random) -> str:
    one, other, operator = task
    first, second = draw.sample((one, other), 2)
    return expressions.ask(first, second, OPERATORS[operator](one, other))


def _right(task: tuple[int, int, str], draw: random.Random) -> str:
    one, other, operator = task
    numbers = (one, other) if operator == "-" else draw.sample((one, other), 2)
    return f"{numbers[0]} {operator} {numbers[1]}"


def _row(question: str, answer: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def _write_answers(split: str) -> Iterator[dict[str, Any]]:
    every = tasks(split)
    for number in range(ANSWERS):
        draw = random.Random(f"{_SEED}/{split}/{number}")
        task = draw.choice(every)
        answer = _right(task, draw)
        yield _row(_question(task, draw), f"({answer})" if draw.random() < 0.5 else answer)


def _ask_once(split: str) -> Iterator[dict[str, Any]]:
    for task in sorted(tasks(split), key=lambda task: _percent(f"order {task}")):
        draw = random.Random(f"{_SEED}/{split}/{task}")
        yield _row(_question(task, draw), _right(task, draw))


def _rank_all(split: str) -> Iterator[dict[str, Any]]:
    for number, task in enumerate(tasks(split) * (3 if split == "train" else 1)):
        draw = random.Random(f"{_SEED}/ranked/{split}/{number}")
        yield rank_replies(task, draw)


def _pairs(split: str) -> Iterator[dict[str, Any]]:
    for number, row in enumerate(_rank_all(split)):
        best, right, near, *_ = row["replies"]
        other = right if number % 2 else {"content": f"({near['content'].strip('()')})", "rank": 1}
        yield {**row, "replies": [best, other]}


def rank_replies(task: tuple[int, int, str], draw: random.Random) -> dict[str, Any]:
    """Row with a task and five ranked replies, best first."""
    one, other, operator = task
    right, question = _right(task, draw), _question(task, draw)
    wrong = draw.choice([kind for kind in OPERATORS if OPERATORS[kind](one, other) != OPERATORS[operator](one, other)])
    near = f"{one} {wrong} {other}"
    strange = f"{draw.choice([n for n in NUMBERS if n not in (one, other)])} {operator} {other}"
    words = f"{one} {dict(zip(OPERATORS, ('plus', 'minus', 'times'), strict=True))[operator]} {other}"
    two_wrong = [f"({text})" if draw.random() < 0.5 else text for text in (near, strange)]
    replies = [f"({right})", right, *two_wrong, words]
    ranked_replies = [{"content": text, "rank": rank} for rank, text in enumerate(replies)]
    return {"messages": [{"role": "user", "content": question}], "replies": ranked_replies}


def _split_doctests() -> Mapping[str, Sequence[dict[str, Any]]]:
    rows_by_split: dict[str, list[dict[str, Any]]] = {"train": [], "val": []}
    for code, output in doctest_examples.examples():
        split = "val" if _percent(code) < VAL_PERCENT else "train"
        rows_by_split[split].append(_row(f"What does Python print?\n{code}", output))
    return rows_by_split


def _write_rows(folder: Path, splits: Mapping[str, Iterable[dict[str, Any]]]) -> Mapping[str, Any]:
    counts = {}
    for split, rows in splits.items():
        lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
        (folder / f"{split}.jsonl").write_text("".join(lines), encoding="utf-8")
        counts[split] = len(lines)
    return {"counts": counts}


def _write_tokenizer(folder: Path) -> Mapping[str, Any]:
    """Write a tokenizer of printable ASCII characters, with byte fallback."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=END_OF_TEXT, pad_token=PAD)
    tokenizer.add_special_tokens({"extra_special_tokens": [*CONTROLS]}, replace_extra_special_tokens=False)
    tokenizer.save_pretrained(folder)
    return {}


main = command.main_of(COMMAND, __doc__, _add_options, prepare)

if __name__ == "__main__":
    sys.exit(main())
