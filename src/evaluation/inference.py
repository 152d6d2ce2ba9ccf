"""The inference of a trained model: the questions of a split with its answers, <run>/inference/<split>.jsonl, and their scores.

A line is a row of the prepared data and `answer_pred`. The folder is written whole or not at all; until then its lines gather in
<run>/inference.part.jsonl, from which a run that was interrupted goes on, with any number of processes. The first line there, like the
manifest of the folder, says whose answers to which questions these are: what does not fit is begun anew.
"""

import hashlib
import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from src import distributed
from src.errors import RunError
from src.evaluation import partial_results
from src.evaluation import speed as answering_speed
from src.evaluation.config import PREFIX, Inference
from src.evaluation.generation import Respondent
from src.files import defect, new_directory, read_manifest, reading, write_json, writing
from src.metrics import answers as answered
from src.metrics.answers import PREDICTION, Answered
from src.runs import heartbeat
from src.runs.checkpoints import folder as checkpoints
from src.runs.context import Run

FOLDER = "inference"
PART = "inference.part.jsonl"

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Asked:
    """An inference that can be made: what is wrong with it shows before the training."""

    config: Inference
    dataset: Any
    """Of the split. Has `num_questions`, `row(i)`, `source(i)`, `prompt(i)`, `collate_prompts` and a `fingerprint`."""
    indices: list[int]
    """Which of its questions are asked."""


def prepare(config: Inference | None, build: Callable[[str], Any], listed: Callable[[str], list[int]]) -> Asked | None:
    """To be called before the training. build: split -> its data set. listed: name of an index file -> the numbers in it.

    Raises:
        UserError: there are no such rows.
        ImportError: a library of a metric is missing.
    """
    if config is None:
        return None
    dataset = build(config.split)
    chosen = config.chosen(dataset, listed(config.index_file) if config.index_file else None)
    answered.scores(config.metrics, [Answered("a word", ["a word"], "a question", ["a context"], "a source")], config.best_answer)
    return Asked(config, dataset, chosen)


def make(run: Run, asked: Asked | None, respondent: Callable[[Any], Respondent], inputs: Mapping[str, str]) -> dict[str, float]:
    """Ask the questions, where they are not answered yet; the scores, {"inference/em": …, "inference/em/nq": …}. Collective.

    To be called when the last checkpoint is written: the answers are noted as those of its weights. None asked: no scores.
    respondent: data set -> who answers its questions. inputs: what `training.inputs.fingerprints` gives: answers are of use only where
    all that the model is made from is as it was.

    Raises:
        distributed.Stopped: a process was asked to stop meanwhile. What was answered stays.
        RunError: the disk refuses, or another process has taken over the save directory.
    """
    if asked is None:
        return {}
    who = respondent(asked.dataset)
    facts = distributed.from_main(lambda: _facts(run, asked, who.batch_size, inputs))
    predictions = distributed.from_main(lambda: _finished(run.path, asked.config.split, facts))
    if predictions is None:
        predictions = _ask(run, asked, who, facts)
    answers, config = who.answered(asked.indices, predictions), asked.config
    scores = distributed.from_main(lambda: answered.scores(config.metrics, answers, config.best_answer))
    return {f"{PREFIX}{name}": value for name, value in scores.items()}


def _facts(run: Run, asked: Asked, batch_size: int, inputs: Mapping[str, str]) -> dict[str, Any]:
    """Whose answers to which questions: what was answered is of use where these are the same."""
    folder = checkpoints.newest_whole(run.path)  # None where nothing is trained
    return {
        "step": checkpoints.step_of(folder) if folder else 0,
        "weights": read_manifest(folder, RunError)["files"]["model.safetensors"]["sha256"] if folder else None,
        "inputs": dict(inputs),
        "data": asked.dataset.fingerprint,
        "questions": hashlib.sha256(json.dumps([asked.config.split, *asked.indices]).encode()).hexdigest(),
        "max_new_tokens": asked.config.max_new_tokens,
        "batch_size": batch_size,
    }


def _finished(run: Path, split: str, facts: dict[str, Any]) -> list[str] | None:
    """The answers of a whole inference by the same model; None where there is none."""
    folder = run / FOLDER
    if not folder.is_dir() or defect(folder) is not None:
        return None
    if not facts.items() <= read_manifest(folder, RunError).items():
        return None
    with reading(folder):
        lines = (folder / f"{split}.jsonl").read_bytes().splitlines()
    return [json.loads(line)[PREDICTION] for line in lines]


def _ask(run: Run, asked: Asked, who: Respondent, facts: dict[str, Any]) -> list[str]:
    """Go on from what was answered before an interruption, and write the folder. Collective."""
    part = run.path / PART
    predictions = distributed.from_main(lambda: _begin(run, part, facts))
    if predictions:
        log.info("%s: goes on after %d of %d questions.", part, len(predictions), len(asked.indices))
    most, tokens, seconds, began = asked.config.max_new_tokens, 0, 0.0, time.perf_counter()
    for some in who.counted_rounds(asked.indices[len(predictions) :], most):
        seconds += time.perf_counter() - began
        tokens += sum(count for _, count in some)
        texts = [text for text, _ in some]
        distributed.from_main(lambda texts=texts: _note(run, part, texts, facts["step"]))
        predictions += texts
        began = time.perf_counter()
    if tokens:
        speed = answering_speed.of_answers(who, asked.indices[0], most, tokens, seconds)
        log.info("%.4g tokens/s, %.3g s to the first token.", speed["tokens_per_second"], speed["seconds_to_first_token"])
        distributed.from_main(lambda: write_json(run.path / answering_speed.FILE, speed))
    distributed.from_main(lambda: _write(run, asked, predictions, facts))
    return predictions


def _begin(run: Run, part: Path, facts: dict[str, Any]) -> list[str]:
    """The answers in `part`, which holds whole batches of this inference alone when this returns."""
    run.dir.confirm()
    # A batch is answered together, so that all batches are those of an undisturbed inference.
    return partial_results.begin(part, facts, lambda count: count // facts["batch_size"] * facts["batch_size"])


def _note(run: Run, part: Path, texts: Sequence[str], step: int) -> None:
    """Add the answers of one round."""
    partial_results.add(part, texts)
    heartbeat.still(run.path, run.dir.attempt, step)


def _write(run: Run, asked: Asked, predictions: Sequence[str], facts: dict[str, Any]) -> None:
    run.dir.confirm()
    with new_directory(run.path / FOLDER, facts) as folder, open(folder / f"{asked.config.split}.jsonl", "w", encoding="utf-8") as file:
        for i, text in zip(asked.indices, predictions, strict=True):
            line = json.dumps({**asked.dataset.row(i), PREDICTION: text})
            file.write(f"{line}\n")
    with writing(run.path / PART):
        (run.path / PART).unlink(missing_ok=True)
