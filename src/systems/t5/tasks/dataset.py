"""Rows of a task as text to text: an encoder-decoder reads the columns of a row and writes its label."""

import hashlib
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypedDict

from pydantic import Field

from src.data import jsonl
from src.data.text.tokenizers import SafeTokenizer
from src.errors import ConfigError, DataError
from src.experiments.batches import Seq2SeqBatch
from src.experiments.config import Places
from src.experiments.dataset_protocols import Prediction
from src.experiments.interfaces import DatasetConfig, require_fit
from src.experiments.kinds import ENCODER_DECODER
from src.files import reading
from src.systems.t5.denoising import sentinels
from src.systems.t5.tasks import task_table

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerFast

log = logging.getLogger(__name__)
Row = dict[str, Any]
OPTIONAL = {"label": str, "index": int, "answers": list[str], "group": str}


class Config(DatasetConfig):
    """A folder of data_prep.t5.prepare_task, with train.jsonl, val.jsonl maybe test.jsonl: a task of
    resources/tasks."""

    has_questions: ClassVar[bool] = True

    task: str = Field(min_length=1)
    """Name of an entry, as "rte"."""
    corpus: str = Field(min_length=1)
    """Folder below `--data_path`."""
    input_tokens: int = Field(default=512, gt=1)
    """Most tokens of an input and its end token; a longer one loses its end."""
    target_tokens: int = Field(default=64, gt=1)
    """Most tokens of a target and its end token."""
    long_targets: Literal["refuse", "cut", "drop"] = "refuse"
    """What becomes of a longer text: refuse: the data are refused. cut: it loses its end.
    drop: its row is left out, in every split."""
    max_new_tokens: int | None = Field(default=None, gt=0)
    """Most tokens of a generated answer; None: target_tokens."""
    sentinel: bool = False
    """Whether inputs end and targets begin with <extra_id_0>, as in pre-training: tasks `*_1_sentinel` of T5."""
    val_samples: int | None = Field(default=None, gt=0)
    """Rows of the validation split that are used, the same ones whatever the seed; None for all."""

    @property
    def reader(self) -> str:
        return ENCODER_DECODER

    def check(self, places: Places) -> None:
        self.check_splits(places, jsonl.SPLITS)

    def find_task(self, places: Places) -> task_table.NamedTask:
        """The task, as its corpus or resources/tasks defines it."""
        return task_table.find_in_corpus(self.task, jsonl.corpus_folder(places, self.corpus))

    def has_split(self, places: Places, split: str) -> bool:
        """Whether there are rows of a split."""
        return (jsonl.corpus_folder(places, self.corpus) / f"{split}.jsonl").is_file()

    def check_splits(self, places: Places, splits: Sequence[str]) -> task_table.NamedTask:
        """`check` of some splits; the task."""
        folder = jsonl.corpus_folder(places, self.corpus)
        task = task_table.find_in_corpus(self.task, folder)
        for split in splits:
            if split == "train" and not task.task.trained:
                raise ConfigError(f"data.task: {self.task!r} has no rows to train on. Name it in predictions.also.")
            _require_columns(task, jsonl.require_file(folder, f"{split}.jsonl"))
        return task

    def weight(self, places: Places) -> float | None:
        """Examples of the task in T5's mixtures, in proportion to those of others; None where they leave it out."""
        return task_table.find_in_corpus(self.task, jsonl.corpus_folder(places, self.corpus)).task.weight

    def check_tokenizer(self, folder: Path | None) -> None:
        if self.sentinel:
            sentinels.require_in_folder(folder, 1, "data.sentinel")

    def check_length(self, max_positions: int | None, new_tokens: int = 0) -> None:
        require_fit("data.input_tokens", self.input_tokens, max_positions)
        require_fit("data.target_tokens", max(self.target_tokens, self.max_new_tokens or 0, new_tokens), max_positions)

    def build(self, places: Places, tokenizer: "PreTrainedTokenizerFast", split: str, seed: int) -> "TaskDataset":
        """The rows of one split, tokenised on access. They do not depend on `seed`, which every data set is given.

        Raises:
            DataError: the data set is missing, incomplete or malformed, or smaller than `val_samples`; a row of another
                split than "test" has no label; the tokenizer cannot write a label, or a target is too long and to be
                refused.
            ConfigError: the task is unknown.
        """
        task = self.check_splits(places, [split])
        folder = places.data / self.corpus
        path = folder / f"{split}.jsonl"

        def check_row(row: Row, where: str) -> None:
            label = row.get("label")
            if label is None and split != "test":
                raise DataError(f"{where}: no label. Only rows of the split 'test' may have none.")
            if label is not None and task.task.kind == "classes" and label not in task.task.labels:
                raise DataError(
                    f"{where}: label {label!r} is none of {self.task!r}: "
                    f"{', '.join(task.task.labels)}. Prepare it again."
                )
            if label is not None and task.task.kind == "regression":
                require_number(label, task.task, where)

        fields, rules = dict.fromkeys(task.task.columns, str), f"task 1 {task.fingerprint}"
        rows: Sequence[Row] = jsonl.read_rows(path, fields, OPTIONAL, check_row, rules=rules)
        if split == "val" and self.val_samples is not None:
            rows = [rows[i] for i in jsonl.select_validation_rows(len(rows), self.val_samples, path)]
        digest = hashlib.sha256(f"{jsonl.fingerprint(folder)} {task.fingerprint}".encode()).hexdigest()
        return TaskDataset(self, task, rows, tokenizer, digest)


class Sample(TypedDict):
    """Ids of an input and of its target, each with its end token. The target of a prompt is the end token alone."""

    inputs: list[int]
    targets: list[int]


def _require_columns(task: task_table.NamedTask, path: Path) -> None:
    """Raises DataError where the first row of a file lacks a column of the task: likely the file of another task."""
    with reading(path, DataError), open(path, "rb") as file:
        row = jsonl.parse(file.readline(), f"{path}:1")
    for column in task.task.columns:
        if column not in row:
            raise DataError(f"{path}:1: no column {column!r} of task {task.name!r}. It has: {', '.join(row)}.")


def require_number(label: str, task: task_table.Task, where: str) -> None:
    """Raises DataError, which names `where`, unless `label` is a number in the range of a regression."""
    low, high = task.range or [0.0, 0.0]
    try:
        value = float(label)
    except ValueError:
        raise DataError(
            f"{where}: expected a number from {low:g} to {high:g} as the label, got {label[:60]!r}."
        ) from None
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
        self.task, self.fingerprint = task, fingerprint
        self.answer_tokens = config.max_new_tokens or config.target_tokens
        self._config, self._encoder = config, SafeTokenizer(tokenizer)
        self._sentinel = sentinels.require(tokenizer, 1, "data.sentinel") if config.sentinel else []
        self.collation = "task", self._encoder.pad_id
        self.answer_ids = [self._encode_target(text) for text in task.answers]
        """Ids of every text that may be written, each with its end token; empty where they cannot be listed."""
        self._require_writable_answers(tokenizer)
        self._rows = rows if self.answer_ids else self._rows_that_fit(rows)
        self._seen, self._read, self._cut, self._next = bytearray(len(self._rows)), 0, 0, 1

    def _require_writable_answers(self, tokenizer: "PreTrainedTokenizerFast") -> None:
        """Raises DataError where an answer is too long, or the tokenizer decodes it to another text."""
        place = f"task {self.task.name!r}"
        for text, ids in zip(self.task.answers, self.answer_ids, strict=True):
            back = str(tokenizer.decode(ids[:-1], skip_special_tokens=True)).strip()
            if back != text:
                raise DataError(
                    f"{place}: this tokenizer writes label {text!r} as {back!r}, "
                    "so no answer could be right. Take another."
                )
            if len(ids) > min(self._config.target_tokens, self.answer_tokens):
                field = "target_tokens" if len(ids) > self._config.target_tokens else "max_new_tokens"
                raise DataError(self._too_long(text, len(ids), field) + " Labels are never cut: allow more.")

    def _rows_that_fit(self, rows: Sequence[Row]) -> Sequence[Row]:
        """`rows`, without those whose target is too long if these are to be dropped.

        Raises:
            DataError: a target is too long, and is to be refused; or all are dropped.
        """
        config = self._config
        if config.long_targets == "cut":
            return rows
        texts = [self.task.target(row.get("label")) for row in rows]
        lengths = [len(self._sentinel) + len(ids) + 1 for ids in self._encoder.encode_all(texts)]
        long = [i for i, length in enumerate(lengths) if length > config.target_tokens]
        if long and config.long_targets == "refuse":
            message = self._too_long(texts[long[0]], lengths[long[0]], "target_tokens")
            rest = f" So have {len(long) - 1} more." if len(long) > 1 else ""
            raise DataError(
                f"{message}{rest} Allow more, or set data.long_targets: "
                "'drop' leaves such rows out, 'cut' cuts their targets."
            )
        if len(long) == len(rows):
            raise DataError(
                f"task {self.task.name!r}: "
                f"every target is longer than data.target_tokens, {config.target_tokens}. Allow more."
            )
        if long:
            log.warning(
                "%s: %d of %d rows are left out: their targets are longer than %d.",
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
            f"task {self.task.name!r}: the target {text[:60]!r} has {length} tokens with its end token, and "
            f"data.{field} is {limit}."
        )

    def __len__(self) -> int:
        """Samples in one epoch."""
        return len(self._rows)

    @property
    def num_questions(self) -> int:
        """Rows that can be asked."""
        return len(self._rows)

    @property
    def sources(self) -> list[str]:
        """Every `source`."""
        return [self.task.name]

    def source(self, index: int) -> str:
        """What scores are grouped by: the task."""
        del index
        return self.task.name

    def sample_source(self, epoch: int, index: int) -> str:
        """The task."""
        return self.task.name

    def row(self, index: int) -> Row:
        """Row `index` of the prepared data."""
        return self._rows[index]

    def sample(self, epoch: int, index: int) -> Sample:
        """Input and target of a row, whatever the epoch."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        return {"inputs": self._encode_input(index), "targets": self._encode_target(self.target(index))}

    def prompt(self, index: int) -> Sample:
        """A sample without its target."""
        return {"inputs": self._encode_input(index), "targets": [self._encoder.eos_id]}

    def input(self, index: int) -> str:
        """Text that the model reads, before it is cut to `input_tokens`."""
        return self.task.input(self._rows[index])

    def target(self, index: int) -> str:
        """Text that the model should write; `tasks.UNLABELLED` for a row without a label."""
        return self.task.target(self._rows[index].get("label"))

    def prediction(self, index: int, text: str) -> Prediction:
        """The model's `text` for row `index`, ready to be scored."""
        row = self._rows[index]
        return Prediction(
            text, row.get("answers") or [self.target(index)], row.get("group") or "", source=self.task.name
        )

    def collate(self, samples: Sequence[Sample]) -> Seq2SeqBatch:
        """Pad on the right. The decoder starts with the padding token, as T5's."""
        from src.data import collate

        pad = self._encoder.pad_id
        return collate.seq2seq([s["inputs"] for s in samples], [s["targets"] for s in samples], pad, pad)

    def collate_prompts(self, samples: Sequence[Sample]) -> "dict[str, Tensor]":
        """What `generate` takes: "input_ids" and "attention_mask" of `collate`."""
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
        """Called at the first input that is cut, the 10th, the 100th and so on."""
        summary = f"{self._cut} of {self._read} inputs that this process has read so far lost their end"
        log.warning("%s: %s: data.input_tokens is %d.", self._config.corpus, summary, self._config.input_tokens)
        self._next = 10 ** len(str(self._cut))

    def _encode_target(self, text: str) -> list[int]:
        ids, cuts = self._encoder.encode(text), self._config.long_targets == "cut" and not self.task.answers
        most = self._config.target_tokens - 1 - len(self._sentinel)
        return [*self._sentinel, *(ids[:most] if cuts else ids), self._encoder.eos_id]
