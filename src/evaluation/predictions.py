"""Predictions of a trained encoder-decoder for the rows of tasks: <run>/predictions/<task>.<split>.jsonl, and
submission files.

A line is {"index", "input", "target", "prediction"} and, for classes, the number of the "class" (null: invalid label).
"""

import json
import logging
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from src.evaluation.metrics import answers
from src.evaluation.outputs import OutputFile, ResumableOutputs
from src.evaluation.ranking import TaskPredictor
from src.experiments.config import drop_absences
from src.experiments.dataset_protocols import Prediction, TaskDataset
from src.runs.context import Run

FOLDER = "predictions"
UNLABELLED_SPLIT = "test"
_GROUPS = {"multirc": re.compile(r"\d+-\d+"), "record": re.compile(r"\d+")}
"""Format of a row's group: numbers of paragraph and question, or of the question, in the release."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TaskSplit:
    """The rows of one split of a task."""

    dataset: TaskDataset
    split: str

    @property
    def name(self) -> str:
        """Name of the file, without ".jsonl"."""
        return f"{self.dataset.task.name}.{self.split}"

    def has_label(self, index: int) -> bool:
        """Whether a row has a label."""
        return self.dataset.row(index).get("label") is not None

    def scores(self, texts: Sequence[str]) -> dict[str, float]:
        """Scores of the answers to rows with a label; {} if no row has a label."""
        predictions = [self.dataset.prediction(i, text) for i, text in enumerate(texts) if self.has_label(i)]
        return task_scores(self.dataset.task, predictions) if predictions else {}

    def line(self, index: int, text: str) -> str:
        """The line of a row in the file."""
        data, row = self.dataset, self.dataset.row(index)
        target = data.target(index) if self.has_label(index) else None
        fields = {"index": row["index"], "input": data.input(index), "target": target, "prediction": text}
        if data.task.task.kind == "classes":
            number = data.task.class_of(text)
            fields["class"] = number if number >= 0 else None
        return json.dumps(fields, ensure_ascii=False)


def task_scores(task: Any, predictions: Sequence[Prediction]) -> dict[str, float]:
    """The task's scores, and "task_score", the score to optimize, at most 100."""
    scores = answers.scores(task.metrics(), predictions)
    return {name: scores[name] for name in task.task.metrics} | {"task_score": task.percent(scores)}


def make(
    run: Run, splits: Sequence[TaskSplit], predictor: TaskPredictor, inputs: Mapping[str, str], best: bool = False
) -> dict[str, dict[str, float]]:
    """Answer the remaining rows; returns scores by "<task>.<split>". Collective.

    inputs, best, Raises: see `ResumableOutputs`.
    """
    if not splits:
        return {}
    files = [
        OutputFile(
            some.name,
            some.dataset.num_questions,
            lambda first, data=some.dataset: predictor.batches(data, range(first, data.num_questions)),
            some.line,
        )
        for some in splits
    ]
    settings = {
        "data": {some.name: some.dataset.fingerprint for some in splits},
        "answers": drop_absences(predictor.config.model_dump(mode="json"), predictor.config),
        "max_new_tokens": {some.name: some.dataset.answer_tokens for some in splits},
    }
    write_more = partial(_write_submissions, splits)
    outputs = ResumableOutputs(run, FOLDER, "prediction", files, predictor.batch_size, write_more, best)
    texts = outputs.make(inputs, settings)
    return {
        some.name: scores
        for some, split_texts in zip(splits, texts, strict=True)
        if (scores := some.scores(split_texts))
    }


def _write_submissions(splits: Sequence[TaskSplit], folder: Path, texts: Sequence[Sequence[str]]) -> None:
    for some, split_texts in zip(splits, texts, strict=True):
        layout = some.dataset.task.task.submission
        if some.split == UNLABELLED_SPLIT and layout is not None:
            groups = _GROUPS.get(some.dataset.task.task.form or "")
            if groups and not all(
                groups.fullmatch(some.dataset.row(i).get("group") or "") for i in range(len(split_texts))
            ):
                log.warning(
                    "%s: cannot write %s, as its rows have no numbers of the release. Prepare it again.",
                    some.name,
                    layout.file,
                )
                continue
            (folder / layout.file).write_text(submission(some, split_texts), encoding="utf-8", newline="\n")


def submission(some: TaskSplit, texts: Sequence[str]) -> str:
    """Content of a submission: for GLUE tab-separated "index" and "prediction" with a header, for SuperGLUE JSON lines.

    The server accepts only valid values, so an invalid label is written as class 0, and an invalid number as the
    lowest.
    """
    task, layout = some.dataset.task, some.dataset.task.task.submission
    rows = [some.dataset.row(number) for number in range(len(texts))]
    values, unknown = list[str | int](), 0
    for text in texts:
        if task.task.kind == "text":
            value, valid = text, True
        elif task.task.kind == "regression":
            value, valid = _number(text, *task.task.range)
            value = f"{value:.3f}"
        else:
            number = task.class_of(text)
            value, valid = max(number, 0), number >= 0
            if layout.label != "number":
                label = task.task.labels[value]
                value = label.lower() if layout.label == "lower" else label
        unknown += not valid
        values.append(value)
    if unknown:
        log.warning(
            "%s: %d of %d answers are not valid; %s has the first valid value for them.",
            some.name,
            unknown,
            len(texts),
            layout.file,
        )
    if layout.file.endswith(".tsv"):
        lines = ["index\tprediction", *(f"{row['index']}\t{value}" for row, value in zip(rows, values, strict=True))]
    elif task.task.form == "multirc":
        lines = _multirc_lines(rows, values)
    else:
        numbers = [int(row["group"]) if task.task.form == "record" else row["index"] for row in rows]
        lines = [json.dumps({"idx": number, "label": value}) for number, value in zip(numbers, values, strict=True)]
    return "\n".join(lines) + "\n"


def _multirc_lines(rows: Sequence[Mapping[str, Any]], labels: Sequence[str | int]) -> list[str]:
    """One line per paragraph, with its questions and their answers. A row's group is "PARAGRAPH-QUESTION"."""
    paragraphs: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for row, label in zip(rows, labels, strict=True):
        paragraph, question = row["group"].split("-")
        paragraphs.setdefault(paragraph, {}).setdefault(question, []).append({"idx": row["index"], "label": label})
    return [
        json.dumps(
            {
                "idx": int(paragraph),
                "passage": {"questions": [{"idx": int(q), "answers": answers} for q, answers in questions.items()]},
            }
        )
        for paragraph, questions in paragraphs.items()
    ]


def _number(text: str, low: float, high: float) -> tuple[float, bool]:
    """The number in `text`, clipped to [low, high], and whether it is valid."""
    try:
        value = float(text)
    except ValueError:
        return low, False
    return (low, False) if math.isnan(value) else (min(max(value, low), high), True)
