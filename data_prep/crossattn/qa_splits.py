"""Convert questions of releases to the rows of two splits: filter, assign to splits, and count."""

import dataclasses
import hashlib
import json
import re
import string
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TextIO

from data_prep.crossattn.qa_releases.placing import Placing
from data_prep.crossattn.qa_releases.question import UNANSWERABLE, Question, Skipped
from data_prep.crossattn.qa_releases.release import Release
from src.data import jsonl
from src.errors import DataError
from src.support.command_line import require_at_least

SPLITS = ("train", "val")

_SALT = "prepare_qa/"
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


@dataclass(frozen=True)
class Options:
    """Options that determine the rows."""

    name: str
    train: Sequence[str]
    val: Sequence[str] = ()
    val_percent: float | None = None
    layout: str | None = None
    dataset: str | None = None
    distractors: int | None = None
    distractors_from: str = "release"
    position: str | None = None
    max_rows: int | None = None
    seed: int = 0
    only_questions_of: str | None = None
    without_contexts: bool = False
    skip_duplicates: bool = False
    evidence: Path | None = None

    def __post_init__(self) -> None:
        """Raise DataError for options that contradict each other or have no effect."""
        if not re.fullmatch(r"[A-Za-z0-9][\w.-]*", self.name):
            raise DataError(
                f"--name: expected the name of a folder, of letters, digits, _, - and ., got {self.name!r}."
            )
        if bool(self.val) == (self.val_percent is not None):
            raise DataError(
                "--val, --val_percent: set exactly one of them, to files for validation or to the share of --train "
                "to use for validation."
            )
        if self.val_percent is not None and not 0 < self.val_percent < 100:
            raise DataError(f"--val_percent: expected more than 0 and less than 100, got {self.val_percent}.")
        require_at_least(1, max_rows=self.max_rows)
        if self.distractors_from == "rows" and not self.distractors:
            raise DataError(
                "--distractors_from rows: --distractors is missing or 0. Set it to the number of useless passages."
            )
        if self.without_contexts and (self.distractors is not None or self.position is not None):
            raise DataError(
                "--without_contexts: leaves no passages for --distractors and --position. Remove these options."
            )
        Placing(self.seed, self.distractors, self.position or "given")

    def options_for_manifest(self) -> dict[str, Any]:
        """The options except for the sources, which are identified by their content."""
        values = dataclasses.asdict(self)
        return {
            key: values[key] for key in values if key not in {"name", "train", "val", "evidence", "only_questions_of"}
        }


class Choice:
    """The selected questions with their splits, and counts of skipped questions by reason."""

    def __init__(self, options: Options, releases: Mapping[str, Sequence[Release]], only: Release | None) -> None:
        """only: a source with the questions to select; None selects all.

        Raises:
            DataError: `only` is damaged or of unknown layout.
        """
        self._options = options
        self._releases = releases
        wanted_questions = (question for _, question in only.questions()) if only is not None else ()
        self._only = (
            {_plain(question.text) for question in wanted_questions if isinstance(question, Question)}
            if only is not None
            else None
        )
        self.skipped: dict[str, Counter[str]] = {}
        self._in_val: set[int] | None = None

    def questions(self) -> Iterator[tuple[str, str, Question]]:
        """Yield (split, layout, question) in the order of the sources, up to `max_rows` per split.

        Raises:
            DataError: a source is damaged or has duplicate IDs, questions without contexts, or invalid text.
        """
        self.skipped = {split: Counter() for split in SPLITS}
        most, num_rows = self._options.max_rows, Counter[str]()
        for source_split, releases in self._releases.items():
            ids: set[tuple[str, str]] = set()
            target_splits = SPLITS if self._options.val_percent is not None else (source_split,)
            for layout, question in (pair for release in releases for pair in release.questions()):
                if most is not None and all(num_rows[split] >= most for split in target_splits):
                    break
                question_or_skip = self._filter(question)
                if isinstance(question_or_skip, Skipped):
                    self.skipped[source_split][question_or_skip.reason] += 1
                    continue
                _require_text(question_or_skip)
                if not _is_new(question_or_skip, ids):
                    if not self._options.skip_duplicates:
                        raise DataError(
                            f"{question_or_skip.where}: duplicate id {question_or_skip.id!r}. "
                            "Add --skip_duplicates to use only the first."
                        )
                    self.skipped[source_split]["ids that were there before"] += 1
                    continue
                split = (
                    source_split
                    if self._options.val_percent is None
                    else "val"
                    if self._is_for_val(question_or_skip)
                    else "train"
                )
                if most is None or num_rows[split] < most:
                    num_rows[split] += 1
                    yield split, layout, question_or_skip

    def _filter(self, question: Question | Skipped) -> Question | Skipped:
        if isinstance(question, Skipped):
            return question
        if self._only is not None and _plain(question.text) not in self._only:
            return Skipped("not among --only_questions_of")
        if self._options.without_contexts:
            question = replace(question, passages=())
        elif not question.passages:
            raise DataError(
                f"{question.where}: the question has no contexts. Use the file as --only_questions_of to select these "
                "questions from another source, or add --without_contexts to train without contexts."
            )
        return replace(question, dataset=self._options.dataset) if self._options.dataset else question

    def _is_for_val(self, question: Question) -> bool:
        if self._in_val is None:
            self._in_val = self._choose_val()
        return next(iter(_decisive(question))) in self._in_val

    def _choose_val(self) -> set[int]:
        """Select contexts for validation; return their digests. Questions that share a context are in the same split.

        A group of questions larger than the requested validation set is for training; smaller groups are selected.
        """
        parents: dict[int, int] = {}

        def root(node: int) -> int:
            while parents.setdefault(node, node) != node:
                parents[node] = node = parents[parents[node]]
            return node

        question_nodes: list[int] = []
        for releases in self._releases.values():
            for _, question in (pair for release in releases for pair in release.questions()):
                if not isinstance(question_or_skip := self._filter(question), Skipped):
                    first, *others = _decisive(question_or_skip)
                    question_nodes.append(first)
                    for other in others:  # the smallest digest represents the group
                        low, high = sorted((root(first), root(other)))
                        parents[high] = low
        sizes, target_size = (
            Counter(root(node) for node in question_nodes),
            (self._options.val_percent or 0) / 100 * len(question_nodes),
        )
        small = {group for group, size in sizes.items() if size <= max(target_size, 1)}
        share = target_size / max(1, sum(sizes[group] for group in small))
        alone = Counter(root(node) for node in parents)
        val = {group for group in small if (group if alone[group] == 1 else _digest(f"{_SALT}{group}")) / 2**64 < share}
        return {node for node in parents if root(node) in val}


class SplitFile:
    """Writes the rows of one split, and counts them for the manifest."""

    def __init__(self, output: TextIO, options: Options, pool: Sequence[Any] = ()) -> None:
        """pool: passages to draw distractors from."""
        self._output = output
        self._options = options
        self._pool = pool
        self.rows = Counter[str]()
        self.unanswerable = 0
        self.fewer_distractors = 0
        self.contexts: set[int] = set()

    def add(self, question: Question, shuffled: bool) -> None:
        """Write one row. shuffled: use random order of passages if no position is requested.

        Raises:
            DataError: distractors or positions are requested, but the release does not mark the useful passages.
        """
        options = self._options
        position = options.position or ("random" if shuffled else "given")
        ordered_question = Placing(options.seed, options.distractors, position, self._pool).place(question)
        distractors = sum(not passage.useful for passage in ordered_question.passages)
        self.fewer_distractors += distractors < (options.distractors or 0)
        self.unanswerable += question.answers == (UNANSWERABLE,)
        self.contexts |= {_digest(passage.text) for passage in ordered_question.passages if passage.useful}
        row = row_of(ordered_question, sum(self.rows.values()))
        self.rows[question.dataset] += 1
        self._output.write(json.dumps(row, ensure_ascii=False) + "\n")

    def facts(self) -> dict[str, Any]:
        """Counts for the manifest."""
        return {
            "rows": dict(sorted(self.rows.items())),
            "unanswerable": self.unanswerable,
            "useful_contexts": len(self.contexts),
            "rows_with_fewer_distractors": self.fewer_distractors,
        }


def row_of(question: Question, index: int) -> dict[str, Any]:
    """Convert a question to a row of prepared data. `useful_contexts` is present only if the release marks them."""
    useful = [passage.text for passage in question.passages if passage.useful]
    row = {
        "context": " ".join(useful or [passage.text for passage in question.passages]),
        "contexts_list": [passage.text for passage in question.passages],
        "titles_list": [passage.title for passage in question.passages],
        "question": question.text,
        "answer": question.answers[0],
        "answers": list(question.answers),
        "sample_idx": index,
        "dataset": question.dataset,
    }
    if all(passage.useful is not None for passage in question.passages):
        row["useful_contexts"] = [int(bool(passage.useful)) for passage in question.passages]
    if question.id is not None:
        row["id"] = question.id
    return row


def _require_text(question: Question) -> None:
    """Raise DataError for text with an unpaired surrogate."""
    passages, where = question.passages, question.where
    jsonl.check_type([passage.text for passage in passages], list[str], f"{where}: context")
    jsonl.check_type([passage.title for passage in passages], list[str], f"{where}: title")
    jsonl.check_type([question.text, question.dataset, *question.answers], list[str], f"{where}: question or answer")


def _decisive(question: Question) -> list[int]:
    """Digests that determine the split: of the family, else of the useful passages."""
    if question.family is not None:
        texts = [question.family]
    else:
        useful = [passage.text for passage in question.passages if passage.useful]
        texts = useful or [" ".join(passage.text for passage in question.passages) or question.text]
    return [_digest(_SALT + text) for text in texts]


def _is_new(question: Question, ids: set[tuple[str, str]]) -> bool:
    """Whether a question has no ID or an ID that is not in `ids`. Adds the ID to `ids`."""
    key = (question.dataset, question.id or "")
    if question.id is not None and key in ids:
        return False
    ids.add(key)
    return True


def _plain(question: str) -> str:
    """Normalize case, punctuation and white space, which differ between releases."""
    return " ".join(question.lower().translate(_NO_PUNCTUATION).split())


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
