"""Duplicates in conversations, also with evaluation sets: `python -m data_prep.assistants.conversation_overlap gsm8k
alpaca`.

python -m data_prep.assistants.conversation_overlap gsm8k --questions --near 0.7
python -m data_prep.assistants.conversation_overlap gsm8k alpaca --against webgpt test.jsonl --output_path overlap.csv

Exact duplicates say the same words, whatever their case and punctuation. Near ones share most of their runs of five
words (Jaccard's index, computed exactly for the candidates that MinHash finds). A question of an evaluation set is
found where half of its runs of 13 words stand in rows to train on; of a shorter one all its words, five at least. Names
are folders below --data_path, of which those after --against give their val.jsonl; or, there, files of JSON. Nothing is
changed: what was found is listed in a file.
"""

import argparse
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from data_prep import command
from data_prep.assistants.check_dataset_counts import write_table
from data_prep.crossattn.qa_releases import json_stream
from src.data import jsonl
from src.errors import ConfigError, DataError
from src.experiments.config import Places
from src.support.command_line import aligned_lines
from src.systems.assistants.conversations.entries import read_entry
from src.systems.assistants.conversations.rows import read_rows

COMMAND = "python -m data_prep.assistants.conversation_overlap"
QUESTIONS = ("question", "prompt", "instruction", "input", "text", "turns")
"""Columns of an evaluation set in which a question may be; the first that is there counts."""
_WORD = re.compile(r"\w+")
_RUN, _QUESTION_RUN, _LEAST_WORDS, _FOUND_RATE = 5, 13, 5, 0.5
_PERMUTATIONS, _WEIGHTS, _MARGIN = (
    128,
    (0.1, 0.9),
    0.75,
)  # hardly one is missed; those that are no duplicates are left out again
_BATCH = 1024


class Place(NamedTuple):
    """Where a row is."""

    name: str
    split: str
    line: int
    """From 1."""

    def __str__(self) -> str:
        return f"{self.name}/{self.split}.jsonl:{self.line}"


class Duplicate(NamedTuple):
    """A row that says what one before it says."""

    row: int
    """Its number in `Texts.places`."""
    other: int
    """The number of the first one."""
    rate: float
    """Jaccard's index of their runs of words."""
    kind: str
    """exact or near."""


class Texts:
    """The words of prepared conversations, read on access: rows to train on first."""

    def __init__(self, data_path: Path, names: Sequence[str], questions: bool = False) -> None:
        """questions: what is asked first is read, instead of whole conversations.

        Raises:
            DataError: a data set is missing or damaged, or its rows are no conversations.
        """
        self._questions, self._rows, self.places = (
            questions,
            dict[tuple[str, str], Sequence[dict[str, Any]]](),
            list[Place](),
        )
        for split in jsonl.SPLITS:
            for name in dict.fromkeys(names):
                jsonl.require_splits(Places(data=data_path, runs=data_path), name)
                rows = read_rows(data_path / name / f"{split}.jsonl")
                self._rows[name, split] = rows
                self.places += [Place(name, split, number) for number in range(1, len(rows) + 1)]

    def words(self, row: int) -> list[str]:
        """The words of a row, by its number in `places`, in small letters."""
        name, split, line = self.places[row]
        entry = read_entry(self._rows[name, split][line - 1], str(self.places[row]))
        texts = [message.content for message in entry.conversation] or [entry.text or ""]
        if self._questions:
            texts = [message.content for message in entry.messages if message.role == "user"][:1] or texts
        return [word for text in texts for word in split_words(text)]


def split_words(text: str) -> list[str]:
    """The words of a text in small letters, without what is between them."""
    return _WORD.findall(text.casefold())


def list_runs(words: Sequence[str], length: int) -> set[str]:
    """All runs of `length` words; of fewer words, the one that they are."""
    return {" ".join(words[begin : begin + length]) for begin in range(max(1, len(words) - length + 1))}


def find_duplicates(texts: Texts, near: float) -> Iterator[Duplicate]:
    """Each row that says the same as one before it, or nearly the same: with an index of `near` and more."""
    from datasketch import MinHash, MinHashLSH

    first, index = dict[str, int](), MinHashLSH(threshold=_MARGIN * near, num_perm=_PERMUTATIONS, weights=_WEIGHTS)
    for begin in range(0, len(texts.places), _BATCH):
        new = dict[int, set[str]]()
        for row in range(begin, min(begin + _BATCH, len(texts.places))):
            words = texts.words(row)
            other = first.setdefault(" ".join(words), row)
            if other != row:
                yield Duplicate(row, other, 1.0, "exact")
            elif words:
                new[row] = list_runs(words, _RUN)
        hashes = MinHash.generator([[run.encode() for run in runs] for runs in new.values()], num_perm=_PERMUTATIONS)
        for (row, runs), own in zip(new.items(), hashes, strict=True):
            for other in sorted(int(str(key)) for key in index.query(own)):
                theirs = list_runs(texts.words(other), _RUN)
                rate = len(runs & theirs) / len(runs | theirs)
                if rate >= near:
                    yield Duplicate(row, other, rate, "near")
                    break
            index.insert(row, own)


def find_questions(texts: Texts, questions: Sequence[str]) -> Iterator[tuple[int, int, float]]:
    """Questions found in training rows: their number, the first such row's, and the share of their word runs there."""
    runs_of, lengths = list[set[str]](), set[int]()
    for text in questions:
        words = split_words(text)
        length = min(len(words), _QUESTION_RUN)
        runs_of.append(list_runs(words, length) if length >= _LEAST_WORDS else set())
        lengths |= {length} if length >= _LEAST_WORDS else set()
    wanted, seen = set[str]().union(*runs_of), dict[str, int]()
    for row, place in enumerate(texts.places):
        if place.split == "train":
            words = texts.words(row)
            for run in (run for length in lengths if length <= len(words) for run in list_runs(words, length) & wanted):
                seen.setdefault(run, row)
    for number, runs in enumerate(runs_of):
        shared = runs & seen.keys()
        if shared and len(shared) >= _FOUND_RATE * len(runs):
            yield number, min(seen[run] for run in shared), len(shared) / len(runs)


def read_questions(data_path: Path, source: str) -> list[tuple[str, str]]:
    """(where, what is asked) of each row of an evaluation set: a folder below `data_path`, or a file.

    Raises:
        DataError: it is missing or damaged, or has no column in which a question may be.
    """
    path = data_path / source / "val.jsonl" if (data_path / source).is_dir() else Path(source)
    found = list[tuple[str, str]]()
    for where, row in json_stream.records(path):
        text = next((row[name] for name in QUESTIONS if isinstance(row.get(name), str | list)), None)
        text = "\n".join(map(str, text)) if isinstance(text, list) else text
        if isinstance(row.get("messages"), list):
            entry = read_entry(row, where)
            text = "\n".join(message.content for message in entry.messages if message.role == "user")
        if text is None:
            raise DataError(
                f"{where}: no messages, and no column {', '.join(QUESTIONS)}; the row has "
                f"{', '.join(row) or 'nothing'}."
            )
        found.append((where, text))
    return found


def _add_options(parser: argparse.ArgumentParser) -> None:
    command.add_data_path(parser)
    add = parser.add_argument
    add("names", nargs="+", metavar="NAME", help="folders of prepared conversations")
    add("--against", nargs="+", default=[], metavar="SET", help="folders or files of evaluation sets")
    add("--questions", action="store_true", help="compare what is asked first, instead of whole conversations")
    add(
        "--near",
        type=float,
        default=0.8,
        metavar="INDEX",
        help="Jaccard's index of near duplicates, and more (default: %(default)s)",
    )
    add("--output_path", type=Path, default=Path("overlap.csv"), help="what was found (default: %(default)s)")


def report(
    data_path: Path, names: Sequence[str], against: Sequence[str], questions: bool, near: float, output_path: Path
) -> None:
    """Write what is found, and print how many rows of each split, and questions of each evaluation set, it is.

    Raises:
        ConfigError: an option is wrong.
        DataError: a data set is missing, damaged or of another kind.
    """
    if not 0 < near < 1:
        raise ConfigError(f"--near: expected a number between 0 and 1, got {near:g}.")
    asked = {source: read_questions(data_path, source) for source in against}
    texts = Texts(data_path, names, questions)
    found, counts = list[tuple[str, str, str, str]](), Counter((*place[:2], "rows") for place in texts.places)
    for row, other, rate, kind in find_duplicates(texts, near):
        place, first = texts.places[row], texts.places[other]
        counts.update([(*place[:2], kind), (*place[:2], first.split)])
        found.append((kind, str(place), str(first), f"{rate:.3f}"))
    rows = [
        (f"{name}/{split}.jsonl", *(str(counts[name, split, kind]) for kind in ("rows", "exact", "near", "train")))
        for name in dict.fromkeys(names)
        for split in jsonl.SPLITS
    ]
    rows.insert(0, ("rows of", "rows", "exact", "near", "of rows to train on"))
    print("\n".join(aligned_lines(rows)))
    whole = Texts(data_path, names)
    for source, questions_there in asked.items():
        shared = list(find_questions(whole, [text for _, text in questions_there]))
        found += [
            (source, questions_there[number][0], str(whole.places[row]), f"{rate:.3f}") for number, row, rate in shared
        ]
        print(f"{source}: {len(shared)} of {len(questions_there)} questions stand in rows to train on")
    write_table(output_path, ("kind", "place", "other", "rate"), found)


main = command.main_of(COMMAND, __doc__, _add_options, report)

if __name__ == "__main__":
    sys.exit(main())
