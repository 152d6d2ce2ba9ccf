"""Text-to-text tasks: inputs, targets and metrics.

A task is an entry of a YAML file in resources/tasks, or of a user's file. The model reads "PREFIX COLUMN: value COLUMN:
value", like T5 on GLUE (Raffel et al. 2020, arXiv 1910.10683, appendix D; Google's t5.data.preprocessors.glue), and
predicts a label as text.
"""

import hashlib
import json
from collections.abc import Mapping
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from src.errors import ConfigError
from src.experiments.config import Config, drop_absences, unknown_text
from src.experiments.config import load as load_config
from src.experiments.interfaces import MetricConfig
from src.experiments.registry import METRICS, bind
from src.files import ROOT, read_yaml

FOLDER = ROOT / "resources" / "tasks"
TASK_FILE = "task.yaml"
"""File of a prepared data set with a user's task."""
MISSING_LABEL = "<unk>"
"""T5's target for a row without a label."""

FIELDS = ("index", "label", "answers", "group")
"""Fields of a prepared row in addition to its columns."""

_CLASS_METRICS, _NUMBER_METRICS = (
    {"accuracy", "f1", "macro_f1", "matthews", "f1a", "question_match"},
    {"pearson", "spearman", "accuracy"},
)
_TEXT_METRICS = {
    "em": "squad",
    "f1": "squad",
    "bleu": "bleu",
    "meteor": "meteor",
    "rouge1": "rouge",
    "rouge2": "rouge",
    "rougeL": "rouge",
}
_IN_HUNDREDS = {"matthews", "pearson", "spearman"}
_STEPS = 5  # steps per 1.0 of a regression's labels


class Submission(Config):
    """Format of a submission file: GLUE's has lines of "index" and "prediction", SuperGLUE's objects with "idx" and
    "label"."""

    file: str = Field(pattern=r"^\w[\w.-]*\.(tsv|jsonl)$")
    label: Literal["text", "number", "lower"]
    """Format of a class. lower: its text in lower case."""


class Task(Config):
    """One entry of the table, without its name."""

    columns: list[str] = Field(min_length=1)
    """The columns that the model reads, in this order."""
    kind: Literal["classes", "regression", "text"] = "classes"
    """Target. regression: a number, rounded to 0.2 and with one decimal. text: the row's label."""
    labels: list[str] = []
    """Texts of the classes 0, 1, 2…"""
    range: list[float] | None = None
    """Minimum and maximum of a regression's labels."""
    metrics: list[str] = Field(min_length=1)
    """Metrics over complete sets of answers. The metric to optimise is the first, or `optimise`."""
    optimise: str | None = None
    weight: float | None = Field(gt=0)
    """Relative number of examples of the task in T5's mixtures; null if they do not include it."""
    trained: bool = True
    """Whether there are training rows; if not, the task evaluates a model trained on another task."""
    prefix: str | None = Field(default=None, min_length=1)
    """Prefix of the input; null for the name of the task."""
    separator: str = " "
    """Text between two columns."""
    titles: bool = True
    """Whether a column's name precedes its value in the input."""
    stemmer: bool = False
    """Whether ROUGE compares words by their stems."""
    only: dict[str, str] = {}
    """Required values by column of the release; rows with other values are skipped."""
    names: dict[str, list[str]] = {}
    """Names in releases of a column, "label" or "index", if they differ."""
    plain: list[list[str]] = []
    """Columns of a tsv file without a header, "_" for an ignored column; one list per number of columns."""
    form: Literal["multirc", "record", "wsc", "wsc_simple", "dpr"] | None = None
    """Conversion of a row of the release, by its name in `data_prep.t5.superglue.FORMS`."""
    submission: Submission | None = None

    @model_validator(mode="after")
    def _consistent(self) -> "Task":
        _require_distinct("columns", self.columns)
        for name in self.columns:
            if name in FIELDS:
                raise ValueError(
                    f"columns: {name!r} is reserved for a field of every row. "
                    "Rename the column, and add the original name to `names`."
                )
        _require_distinct("labels", self.labels)
        if (self.kind == "classes") != (len(self.labels) > 1):
            raise ValueError(
                f"labels: expected two or more for kind 'classes', else no labels; got {len(self.labels)} for "
                f"{self.kind!r}."
            )
        if any(not text or text != text.strip() or text == MISSING_LABEL for text in self.labels):
            raise ValueError(
                f"labels: expected texts without outer white space and not {MISSING_LABEL!r}, got {self.labels}."
            )
        if (self.kind == "regression") != (self.range is not None):
            action = "Add it" if self.range is None else "Remove it"
            raise ValueError(
                f"range: required for kind 'regression' and only allowed for it, got {self.kind!r}. {action}."
            )
        if self.range is not None and not (len(self.range) == 2 and self.range[0] < self.range[1]):
            raise ValueError(f"range: expected [lowest, highest], got {self.range}.")
        known_metrics = {"classes": _CLASS_METRICS, "regression": _NUMBER_METRICS, "text": set(_TEXT_METRICS)}[
            self.kind
        ]
        for name in self.metrics:
            if name not in known_metrics:
                raise ValueError(f"metrics: {unknown_text(f'metric of kind {self.kind!r}', name, known_metrics)}")
        if self.optimise is not None and self.optimise not in self.metrics:
            raise ValueError(f"optimise: {unknown_text('metric of this task', self.optimise, self.metrics)}")
        if {"f1", "f1a"} & set(self.metrics) and self.kind == "classes" and len(self.labels) != 2:
            raise ValueError(f"metrics: f1 needs two classes, got {len(self.labels)}. Use macro_f1.")
        self._layouts_fit()
        return self

    def _layouts_fit(self) -> None:
        known_columns = [*self.columns, "label", "index"]
        for name in self.names:
            if name not in known_columns:
                raise ValueError(f"names: {unknown_text('column', name, known_columns)}")
        for line in self.plain:
            for name in line:
                if name not in [*known_columns, "_"]:
                    raise ValueError(f"plain: {unknown_text('column', name, [*known_columns, '_'])}")
            if missing := [name for name in self.columns if name not in line]:
                raise ValueError(f"plain: missing column {missing[0]!r} in {line}.")
        if len({len(line) for line in self.plain}) < len(self.plain):
            raise ValueError("plain: two lists have the same number of columns. Remove one.")


def _require_distinct(field: str, values: list[str]) -> None:
    duplicates = sorted({value for value in values if values.count(value) > 1})
    if duplicates:
        raise ValueError(f"{field}: duplicate {', '.join(map(repr, duplicates))}. Remove one.")


class NamedTask:
    """A task with its name, which converts rows to text."""

    def __init__(self, name: str, task: Task) -> None:
        self.name, self.task = name, task

    @property
    def fingerprint(self) -> str:
        """Digest of everything that samples and scores depend on."""
        options = drop_absences(self.task.model_dump(mode="json"), self.task)
        if self.task.submission and self.task.submission.file.endswith(".jsonl"):
            options["submission"] = None  # so that runs from before SuperGLUE's tasks had it can resume
        return hashlib.sha256(json.dumps([self.name, options], sort_keys=True).encode()).hexdigest()

    @property
    def optimised_metric(self) -> str:
        """The metric to optimise."""
        return self.task.optimise or self.task.metrics[0]

    def percent(self, scores: Mapping[str, float]) -> float:
        """The value of the metric to optimise, from 0 (or -100) to 100."""
        value = scores[self.optimised_metric]
        return value if self.optimised_metric in _IN_HUNDREDS else 100 * value

    def input(self, row: Mapping[str, str]) -> str:
        """Text of a row's input."""
        title = "{}: {}" if self.task.titles else "{1}"
        pairs = self.task.separator.join(title.format(column, row[column]) for column in self.task.columns)
        return f"{self.task.prefix or self.name} {pairs}"

    def target(self, label: str | float | None) -> str:
        """Text of a row's target.
        label: a class, an answer or a number; None if there is no label."""
        if label is None:
            return MISSING_LABEL
        if self.task.kind == "regression":
            return f"{round(float(label) * _STEPS) / _STEPS:.1f}"
        return str(label)

    @cached_property
    def answers(self) -> list[str]:
        """All possible targets: the labels, or the steps of a regression. Empty for free text."""
        if self.task.range is None:
            return self.task.labels
        low, high = (round(end * _STEPS) for end in self.task.range)
        return [self.target(step / _STEPS) for step in range(low, high + 1)]

    def class_of(self, text: str) -> int:
        """Number of the class with this text; -1 if there is no such class."""
        return self.task.labels.index(text) if text in self.task.labels else -1

    def metrics(self) -> list[MetricConfig]:
        """The metric configs of the task's scores."""
        if self.task.kind == "text":
            names = dict.fromkeys(_TEXT_METRICS[metric] for metric in self.task.metrics)
            stems = {"rouge": {"stemmer": True}} if self.task.stemmer else {}
            return [bind(METRICS, {"name": name, **stems.get(name, {})}) for name in names]
        return [bind(METRICS, {"name": "classification", "scores": self.task.metrics, "labels": self.task.labels})]


def find(name: str, user_file: Path | None = None) -> NamedTask:
    """The task called `name`. user_file: a file with tasks in addition to resources/tasks.

    Raises:
        ConfigError: the task is unknown, or a file is invalid; reports the file, the task and the field.
    """
    paths: dict[str, Path] = {}
    entries: dict[str, Any] = {}
    for path in [*sorted(FOLDER.glob("*.yaml")), *([user_file] if user_file else [])]:
        for task, raw in _read_tasks(path).items():
            if task in paths:
                raise ConfigError(f"{path}: {task}: duplicate name, also in {paths[task]}. Rename one.")
            paths[task], entries[task] = path, raw
    if name not in entries:
        raise ConfigError(
            f"task: {unknown_text('task', name, paths, str(FOLDER))} To add a task, add an entry to a file in {FOLDER}."
        )
    return NamedTask(name, load_config(Task, entries[name], f"{paths[name]}: {name}"))


def find_in_corpus(name: str, folder: Path) -> NamedTask:
    """The task `name`, which the prepared data set in `folder` can define."""
    return find(name, folder / TASK_FILE if (folder / TASK_FILE).is_file() else None)


def _read_tasks(path: Path) -> dict[str, Any]:
    return _parse_tasks(path, path.stat().st_mtime_ns if path.is_file() else 0)


@lru_cache(maxsize=16)
def _parse_tasks(path: Path, mtime: int) -> dict[str, Any]:
    """The entries of a file with this modification time, which is part of the cache's key."""
    del mtime
    raw = read_yaml(path, "tasks by name")
    wrong = [name for name in raw if not isinstance(name, str)]
    if wrong:
        raise ConfigError(f"{path}: expected tasks by name, got {wrong[0]!r} ({type(wrong[0]).__name__}).")
    return raw
