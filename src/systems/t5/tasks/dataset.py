"""Rows of a text-to-text task: an encoder-decoder reads the columns of a row and predicts its label."""

import hashlib
import logging
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypedDict

from pydantic import Field

from src.data import jsonl, row_counts
from src.data.text import tokenizers
from src.data.text.tokenizers import SafeTokenizer
from src.errors import ConfigError, DataError
from src.experiments.batches import Seq2SeqBatch
from src.experiments.config import Places
from src.experiments.dataset_protocols import Prediction
from src.experiments.interfaces import DatasetConfig, NewTokens, require_fit
from src.experiments.kinds import ENCODER_DECODER, TokenizerSource
from src.files import reading
from src.systems.t5.denoising import sentinels
from src.systems.t5.tasks import task_table

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerFast

log = logging.getLogger(__name__)
Row = dict[str, Any]
_NUM_CHECKED_ROWS = 1000
"""Number of rows at the start of a file that a check reads."""
OPTIONAL = {"label": str, "index": int, "answers": list[str], "group": str}


class Config(DatasetConfig):
    """A task of resources/tasks, in a folder written by data_prep.t5.prepare_task with train.jsonl, val.jsonl and
    optionally test.jsonl."""

    has_questions: ClassVar[bool] = True

    task: str = Field(min_length=1)
    """Name of the task, such as "rte"."""
    corpus: str = Field(min_length=1)
    """Folder below `--data_path`."""
    input_tokens: int = Field(default=512, gt=1)
    """Maximum tokens of an input with its end token; longer inputs are truncated."""
    target_tokens: int = Field(default=64, gt=1)
    """Maximum tokens of a target with its end token."""
    long_targets: Literal["refuse", "cut", "drop"] = "refuse"
    """Handling of longer targets. refuse: raise an error. cut: truncate. drop: skip the row, in every split."""
    max_new_tokens: int | None = Field(default=None, gt=0)
    """Maximum tokens of a generated answer; None for target_tokens."""
    sentinel: bool = False
    """Whether inputs end and targets start with <extra_id_0>, as in pre-training (T5's tasks `*_1_sentinel`)."""
    val_samples: int | None = Field(default=None, gt=0)
    """Number of validation rows to use, the same rows for every seed; None for all."""

    @property
    def reader(self) -> str:
        return ENCODER_DECODER

    def check(self, places: Places) -> None:
        self.check_splits(places, jsonl.SPLITS)
        row_counts.require_lines("data.val_samples", self.val_samples, places.data / self.corpus / "val.jsonl")

    def find_task(self, places: Places) -> task_table.NamedTask:
        """The task, defined by its corpus or resources/tasks."""
        return task_table.find_in_corpus(self.task, jsonl.corpus_folder(places, self.corpus))

    def has_split(self, places: Places, split: str) -> bool:
        """Whether the data set has a split."""
        return (jsonl.corpus_folder(places, self.corpus) / f"{split}.jsonl").is_file()

    def check_splits(self, places: Places, splits: Sequence[str]) -> task_table.NamedTask:
        """Like `check`, for these splits; returns the task."""
        folder = jsonl.corpus_folder(places, self.corpus)
        task = task_table.find_in_corpus(self.task, folder)
        for split in splits:
            if split == "train" and not task.task.trained:
                raise ConfigError(f"data.task: {self.task!r} has no training rows. Use it in predictions.extra_tasks.")
            _require_columns(task, jsonl.require_file(folder, f"{split}.jsonl"))
        return task

    def check_targets(self, places: Places, source: TokenizerSource | None) -> None:
        """Raise a UserError if an answer of the task, or a target among the first thousand rows, is refused by `build`.

        Loads the tokenizer only if a target has more bytes than it can have tokens.
        """
        task = self.find_task(places)
        rows, texts = list[Row](), list(task.answers)
        if not texts and self.long_targets == "refuse":
            for split in jsonl.SPLITS if task.task.trained else ("val",):
                path = places.data / self.corpus / f"{split}.jsonl"
                fields = dict.fromkeys(task.task.columns, str)
                rows += islice(row_counts.iterate(path, fields, OPTIONAL), _NUM_CHECKED_ROWS)
            texts = [task.target(row.get("label")) for row in rows]
        room = min(self.target_tokens, self.max_new_tokens or self.target_tokens) - 1 - self.sentinel
        if source and any(len(text.encode()) >= room for text in texts):
            TaskDataset(self, task, rows, tokenizers.load(source.folder, source.new_tokens), "")

    def weight(self, places: Places) -> float | None:
        """Relative number of examples of the task in T5's mixtures; None if they do not include it."""
        return task_table.find_in_corpus(self.task, jsonl.corpus_folder(places, self.corpus)).task.weight

    def check_tokenizer(self, places: Places, source: TokenizerSource | None) -> None:
        if self.sentinel and source:
            sentinels.require_in_folder(source.folder, 1, "data.sentinel")

    def check_length(self, max_positions: int | None, new_tokens: int = 0) -> None:
        require_fit("data.input_tokens", self.input_tokens, max_positions)
        require_fit("data.target_tokens", self.target_tokens, max_positions)
        require_fit("data.max_new_tokens", self.max_new_tokens or 0, max_positions)
        require_fit(NewTokens.name(new_tokens), new_tokens, max_positions)

    def build(self, places: Places, tokenizer: "PreTrainedTokenizerFast", split: str, seed: int) -> "TaskDataset":
        """The rows of one split, tokenised on access. They do not depend on `seed`.

        Raises:
            DataError: the data set is missing, incomplete or malformed, or has fewer than `val_samples` rows; a row
                outside of the "test" split has no label; the tokenizer cannot encode a label; or a target is too long
                and `long_targets` is "refuse".
            ConfigError: the task is unknown.
        """
        task = self.check_splits(places, [split])
        folder = places.data / self.corpus
        path = folder / f"{split}.jsonl"

        def check_row(row: Row, where: str) -> None:
            label = row.get("label")
            if label is None and split != "test":
                raise DataError(f"{where}: no label. Only rows of the split 'test' can omit it.")
            if label is not None and task.task.kind == "classes" and label not in task.task.labels:
                raise DataError(
                    f"{where}: expected a label of {self.task!r}: {', '.join(task.task.labels)}; got {label!r}. "
                    "Prepare the data again."
                )
            if label is not None and task.task.kind == "regression":
                require_number(label, task.task, where)

        fields, rules = dict.fromkeys(task.task.columns, str), f"task 1 {task.fingerprint}"
        rows: Sequence[Row] = jsonl.read_rows(path, fields, OPTIONAL, check_row, rules=rules)
        if split == "val" and self.val_samples is not None:
            rows = [rows[i] for i in jsonl.select_validation_rows(len(rows), self.val_samples, path)]
        fingerprint, content = (
            hashlib.sha256(f"{digest} {task.fingerprint}".encode()).hexdigest()
            for digest in (jsonl.fingerprint(folder), jsonl.fingerprint(folder, split))
        )
        dataset = TaskDataset(self, task, rows, tokenizer, fingerprint)
        dataset.content = content
        return dataset


class Sample(TypedDict):
    """Ids of an input and its target, each with an end token. The target of a prompt is only the end token."""

    inputs: list[int]
    targets: list[int]


def _require_columns(task: task_table.NamedTask, path: Path) -> None:
    """Raises DataError if the first row of a file has not all columns of the task, as in the file of another task."""
    with reading(path, DataError), open(path, "rb") as file:
        row = jsonl.parse(file.readline(), f"{path}:1")
    for column in task.task.columns:
        if column not in row:
            raise DataError(
                f"{path}:1: missing column {column!r} of task {task.name!r}, got {', '.join(row)}. "
                "Prepare this task with data_prep.t5.prepare_task, or set data.corpus to its folder."
            )


def require_number(label: str, task: task_table.Task, where: str) -> None:
    """Raises DataError, with `where`, unless `label` is a number in the range of a regression task."""
    low, high = task.range or [0.0, 0.0]
    try:
        value = float(label)
    except ValueError:
        raise DataError(f"{where}: expected a number from {low:g} to {high:g} as label, got {label[:60]!r}.") from None
    if not low <= value <= high:
        raise DataError(f"{where}: expected a label from {low:g} to {high:g}, got {label[:60]!r}.")


class TaskDataset:
    """Samples are the same in every epoch."""

    def __init__(
        self,
        config: Config,
        task: task_table.NamedTask,
        rows: Sequence[Row],
        tokenizer: "PreTrainedTokenizerFast",
        fingerprint: str,
    ) -> None:
        self.task, self.fingerprint, self.content = task, fingerprint, fingerprint
        self.answer_tokens = config.max_new_tokens or config.target_tokens
        self._config, self._encoder = config, SafeTokenizer(tokenizer)
        self._sentinel = sentinels.require(tokenizer, 1, "data.sentinel") if config.sentinel else []
        self.collation = "task", self._encoder.pad_id
        self.answer_ids = [self._encode_target(text) for text in task.answers]
        """Ids of every possible answer, each with its end token; empty for free text."""
        self._require_writable_answers(tokenizer)
        self._rows = rows if self.answer_ids else self._rows_that_fit(rows)
        self._seen, self._read, self._cut, self._next = bytearray(len(self._rows)), 0, 0, 1

    def _require_writable_answers(self, tokenizer: "PreTrainedTokenizerFast") -> None:
        """Raises DataError if an answer is too long, or the tokenizer does not decode it to the same text."""
        place = f"task {self.task.name!r}"
        for text, ids in zip(self.task.answers, self.answer_ids, strict=True):
            back = str(tokenizer.decode(ids[:-1], skip_special_tokens=True)).strip()
            if back != text:
                raise DataError(
                    f"{place}: the tokenizer decodes the label {text!r} to {back!r}. Use another tokenizer."
                )
            if len(ids) > min(self._config.target_tokens, self.answer_tokens):
                field = "target_tokens" if len(ids) > self._config.target_tokens else "max_new_tokens"
                raise DataError(self._too_long(text, len(ids), field) + " Raise it, as labels are never truncated.")

    def _rows_that_fit(self, rows: Sequence[Row]) -> Sequence[Row]:
        """Drop the rows with targets that are too long, if `long_targets` is "drop".

        Raises:
            DataError: a target is too long and `long_targets` is "refuse"; or all rows are dropped.
        """
        config = self._config
        if config.long_targets == "cut":
            return rows
        texts = [self.task.target(row.get("label")) for row in rows]
        lengths = [len(self._sentinel) + len(ids) + 1 for ids in self._encoder.encode_all(texts)]
        long = [i for i, length in enumerate(lengths) if length > config.target_tokens]
        if long and config.long_targets == "refuse":
            message = self._too_long(texts[long[0]], lengths[long[0]], "target_tokens")
            rest = f" {len(long) - 1} more targets are too long." if len(long) > 1 else ""
            raise DataError(
                f"{message}{rest} Raise it, or set data.long_targets to 'drop' (skip the rows) or 'cut' (truncate)."
            )
        if len(long) == len(rows):
            raise DataError(
                f"task {self.task.name!r}: "
                f"every target is longer than data.target_tokens, {config.target_tokens}. Raise it."
            )
        if long:
            log.warning(
                "%s: %d of %d rows are skipped, as their targets are longer than %d tokens.",
                config.corpus,
                len(long),
                len(rows),
                config.target_tokens,
            )
        dropped = set(long)
        return [row for i, row in enumerate(rows) if i not in dropped] if long else rows

    def _too_long(self, text: str, length: int, field: str) -> str:
        limit = getattr(self._config, field)
        return (
            f"task {self.task.name!r}: the target {text[:60]!r} has {length} tokens with its end token, but "
            f"data.{field} is {limit}."
        )

    def __len__(self) -> int:
        """Samples in one epoch."""
        return len(self._rows)

    @property
    def num_questions(self) -> int:
        """Number of rows."""
        return len(self._rows)

    @property
    def sources(self) -> list[str]:
        """Every `source`."""
        return [self.task.name]

    def source(self, index: int) -> str:
        """Name of the score group: the task."""
        del index
        return self.task.name

    def sample_source(self, epoch: int, index: int) -> str:
        """See `source`."""
        return self.task.name

    def row(self, index: int) -> Row:
        """Row `index` of the prepared data."""
        return self._rows[index]

    def sample(self, epoch: int, index: int) -> Sample:
        """Input and target of a row, the same in every epoch."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        return {"inputs": self._encode_input(index), "targets": self._encode_target(self.target(index))}

    def prompt(self, index: int) -> Sample:
        """A sample without its target."""
        return {"inputs": self._encode_input(index), "targets": [self._encoder.eos_id]}

    def input(self, index: int) -> str:
        """Text of the input, before truncation."""
        return self.task.input(self._rows[index])

    def target(self, index: int) -> str:
        """Text of the target; `task_table.MISSING_LABEL` for a row without a label."""
        return self.task.target(self._rows[index].get("label"))

    def prediction(self, index: int, text: str) -> Prediction:
        """The model's answer `text` to row `index`, for scoring."""
        row = self._rows[index]
        return Prediction(
            text, row.get("answers") or [self.target(index)], row.get("group") or "", source=self.task.name
        )

    def collate(self, samples: Sequence[Sample]) -> Seq2SeqBatch:
        """Pad on the right. The decoder starts with the padding token, like T5's."""
        from src.data import collate

        pad = self._encoder.pad_id
        return collate.seq2seq([s["inputs"] for s in samples], [s["targets"] for s in samples], pad, pad)

    def collate_prompts(self, samples: Sequence[Sample]) -> "dict[str, Tensor]":
        """Inputs for `generate`: "input_ids" and "attention_mask" of `collate`."""
        batch = self.collate(samples)
        return {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}

    def collate_answers(self, samples: Sequence[Sample], answer: Sequence[int]) -> Seq2SeqBatch:
        """The prompts, each with the target `answer`, one of `answer_ids`."""
        return self.collate([{"inputs": sample["inputs"], "targets": list(answer)} for sample in samples])

    def _encode_input(self, index: int) -> list[int]:
        ids, most = self._encoder.encode(self.input(index)), self._config.input_tokens - 1 - len(self._sentinel)
        if not self._seen[index]:
            self._seen[index] = 1
            self._read += 1
            self._cut += len(ids) > most
            if self._cut >= self._next:
                self._warn()
        return [*ids[:most], *self._sentinel, self._encoder.eos_id]

    def _warn(self) -> None:
        """Log the number of truncated inputs; called at the first, the 10th, the 100th and so on."""
        summary = f"truncated {self._cut} of {self._read} inputs read by this process"
        log.warning("%s: %s: data.input_tokens is %d.", self._config.corpus, summary, self._config.input_tokens)
        self._next = 10 ** len(str(self._cut))

    def _encode_target(self, text: str) -> list[int]:
        ids, cuts = self._encoder.encode(text), self._config.long_targets == "cut" and not self.task.answers
        most = self._config.target_tokens - 1 - len(self._sentinel)
        return [*self._sentinel, *(ids[:most] if cuts else ids), self._encoder.eos_id]
