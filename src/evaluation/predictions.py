"""The answers of a trained encoder-decoder to the rows of tasks: <run>/predictions/<task>.<split>.jsonl, and GLUE's submissions.

A line is {"index", "input", "target", "prediction"} and, where there are classes, the number of the "class" (null: no label). The folder
is written whole or not at all; until then answers gather in <run>/predictions.part.jsonl, from which a run that was interrupted goes
on, with any number of processes. What they are of stands in its first line, and in the manifest of the folder.
"""

import json
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from src import distributed
from src.errors import RunError
from src.evaluation import partial_results
from src.evaluation.ranking import TextRespondent
from src.files import defect, new_directory, read_manifest, reading, writing
from src.metrics import answers as answered
from src.runs import heartbeat
from src.runs.checkpoints import folder as checkpoints
from src.runs.context import Run

FOLDER, PART = "predictions", "predictions.part.jsonl"
UNLABELLED_SPLIT = "test"

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Asked:
    """The rows of one split of a task."""

    dataset: Any
    """Has `task`, `num_questions`, `row(i)`, `input(i)`, `target(i)`, `answered(i, text)` and a `fingerprint`."""
    split: str

    @property
    def name(self) -> str:
        """Of its file, without ".jsonl"."""
        return f"{self.dataset.task.name}.{self.split}"

    def scores(self, texts: Sequence[str]) -> dict[str, float]:
        """Of the answers to those rows that have a label; none where no row has."""
        pairs = [self.dataset.answered(i, text) for i, text in enumerate(texts) if self.dataset.row(i).get("label") is not None]
        return task_scores(self.dataset.task, pairs) if pairs else {}


def task_scores(task: Any, answers: Sequence[answered.Answered]) -> dict[str, float]:
    """The scores that a task names, and "task_score": the one to optimise, up to 100."""
    found = answered.scores(task.metrics(), answers)
    return {name: found[name] for name in task.task.metrics} | {"task_score": task.hundredths(found)}


def make(run: Run, sets: Sequence[Asked], who: TextRespondent, inputs: Mapping[str, str]) -> dict[str, dict[str, float]]:
    """Answer the rows, where they are not answered yet; scores by "<task>.<split>". Collective.

    To be called when the last checkpoint is written. inputs: what `training.inputs.fingerprints` gives.

    Raises:
        distributed.Stopped: a process was asked to stop meanwhile. What was answered stays.
        RunError: the disk refuses, or another process has taken over the save directory.
    """
    if not sets:
        return {}
    facts = distributed.from_main(lambda: _facts(run, sets, who, inputs))
    texts = distributed.from_main(lambda: _finished(run.path, sets, facts))
    if texts is None:
        texts = _ask(run, sets, who, facts)
    return {asked.name: scores for asked, own in _parts(sets, texts) if (scores := asked.scores(own))}


def _parts(sets: Sequence[Asked], texts: Sequence[str]) -> Iterator[tuple[Asked, Sequence[str]]]:
    """Each set with its answers, of which the last may be missing."""
    start = 0
    for asked in sets:
        end = start + asked.dataset.num_questions
        yield asked, texts[start:end]
        start = end


def _facts(run: Run, sets: Sequence[Asked], who: TextRespondent, inputs: Mapping[str, str]) -> dict[str, Any]:
    """Whose answers to which rows: what was answered is of use where these are the same."""
    folder = checkpoints.newest_whole(run.path)  # None where nothing is trained
    return {
        "step": checkpoints.step_of(folder) if folder else 0,
        "weights": read_manifest(folder, RunError)["files"]["model.safetensors"]["sha256"] if folder else None,
        "inputs": dict(inputs),
        "data": {asked.name: asked.dataset.fingerprint for asked in sets},
        "answers": who.config.model_dump(mode="json"),
        "max_new_tokens": {asked.name: asked.dataset.target_tokens for asked in sets},
        "batch_size": who.batch_size,
    }


def _finished(run: Path, sets: Sequence[Asked], facts: dict[str, Any]) -> list[str] | None:
    """The answers of a whole folder by the same model; None where there is none."""
    folder = run / FOLDER
    if not folder.is_dir() or defect(folder) is not None or not facts.items() <= read_manifest(folder, RunError).items():
        return None
    with reading(folder):
        lines = [line for asked in sets for line in (folder / f"{asked.name}.jsonl").read_bytes().splitlines()]
    return [json.loads(line)["prediction"] for line in lines]


def _ask(run: Run, sets: Sequence[Asked], who: TextRespondent, facts: dict[str, Any]) -> list[str]:
    """Go on from what was answered before an interruption, and write the folder. Collective."""
    part = run.path / PART

    def whole(count: int) -> int:
        """Whole batches: a batch is answered together, so that all are those of an undisturbed run."""
        total = 0
        for asked in sets:
            if count < asked.dataset.num_questions:
                return total + count // who.batch_size * who.batch_size
            count -= asked.dataset.num_questions
            total += asked.dataset.num_questions
        return total

    def begin() -> list[str]:
        run.dir.confirm()
        return partial_results.begin(part, facts, whole)

    def note(some: Sequence[str]) -> None:
        partial_results.add(part, some)
        heartbeat.still(run.path, run.dir.attempt, facts["step"])

    texts = distributed.from_main(begin)
    if texts:
        log.info("%s: goes on after %d of %d rows.", part, len(texts), sum(asked.dataset.num_questions for asked in sets))
    for asked, own in list(_parts(sets, texts)):
        for some in who.rounds(asked.dataset, range(len(own), asked.dataset.num_questions)):
            distributed.from_main(lambda some=some: note(some))
            texts += some
    distributed.from_main(lambda: _write(run, sets, texts, facts))
    return texts


def _write(run: Run, sets: Sequence[Asked], texts: Sequence[str], facts: dict[str, Any]) -> None:
    run.dir.confirm()
    with new_directory(run.path / FOLDER, facts) as folder:
        for asked, own in _parts(sets, texts):
            lines = (json.dumps(_line(asked, i, text), ensure_ascii=False) + "\n" for i, text in enumerate(own))
            (folder / f"{asked.name}.jsonl").write_text("".join(lines), encoding="utf-8", newline="\n")
            wanted = asked.dataset.task.task.submission
            if asked.split == UNLABELLED_SPLIT and wanted is not None:
                (folder / wanted.file).write_text(submission(asked, own), encoding="utf-8", newline="\n")
    with writing(run.path / PART):
        (run.path / PART).unlink(missing_ok=True)


def _line(asked: Asked, index: int, text: str) -> dict[str, Any]:
    data = asked.dataset
    row, labelled = data.row(index), data.row(index).get("label") is not None
    found = {"index": row["index"], "input": data.input(index), "target": data.target(index) if labelled else None, "prediction": text}
    if data.task.task.kind == "classes":
        number = data.task.class_of(text)
        found["class"] = number if number >= 0 else None
    return found


def submission(asked: Asked, texts: Sequence[str]) -> str:
    """What GLUE's server takes: a header and a line of "index" and "prediction" for each row, parted by tabs.

    An answer that is no label is written as class 0, and one that is no number as the lowest: the server takes nothing else.
    """
    task = asked.dataset.task
    lines, unknown = ["index\tprediction"], 0
    for index, text in enumerate(texts):
        if task.task.kind == "regression":
            value, valid = _number(text, *task.task.range)
            shown = f"{value:.3f}"
        else:
            number = task.class_of(text)
            valid = number >= 0
            shown = str(max(number, 0)) if task.task.submission.label == "number" else task.task.labels[max(number, 0)]
        unknown += not valid
        lines.append(f"{asked.dataset.row(index)['index']}\t{shown}")
    if unknown:
        log.warning("%s: %d of %d answers are no label; %s has the first.", asked.name, unknown, len(texts), task.task.submission.file)
    return "\n".join(lines) + "\n"


def _number(text: str, low: float, high: float) -> tuple[float, bool]:
    """The number in a range that a text says, and whether it says one."""
    try:
        value = float(text)
    except ValueError:
        return low, False
    return (low, False) if math.isnan(value) else (min(max(value, low), high), True)
