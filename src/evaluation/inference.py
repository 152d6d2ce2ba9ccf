"""The inference of a trained model: the questions of a split with its answers, <run>/inference/<split>.jsonl, and their scores.

A line is a row of the prepared data and `answer_pred`.
"""

import hashlib
import json
import logging
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from src import distributed
from src.evaluation import speed
from src.evaluation.config import Inference
from src.evaluation.generation import AnswerGenerator
from src.evaluation.outputs import OutputFile, ResumableOutputs
from src.files import write_json
from src.interfaces import Prediction, QuestionDataset
from src.metrics import answers
from src.metrics.answers import PREDICTION
from src.runs.context import Run

FOLDER = "inference"
PREFIX = "inference/"
"""Of the names of the scores of an inference."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class InferenceJob:
    """A checked inference: its errors are found before the training."""

    config: Inference
    dataset: QuestionDataset
    """Of the split."""
    indices: list[int]
    """Which of its questions are asked."""


def prepare(config: Inference, dataset: QuestionDataset, row_indices: list[int] | None) -> InferenceJob:
    """The job that `config` describes. Call it before the training. row_indices: content of the index file, if given.

    Raises:
        UserError: there are no such rows.
        ImportError: a library of a metric is missing.
    """
    answers.scores(config.metrics, [Prediction("a word", ["a word"], "a question", ["a context"], "a source")], config.best_answer)
    return InferenceJob(config, dataset, config.select(dataset, row_indices))


def make(run: Run, job: InferenceJob, generator: AnswerGenerator, inputs: Mapping[str, str]) -> dict[str, float]:
    """Answer the questions that have no answer yet; returns the scores, {"inference/em": …, "inference/em/nq": …}. Collective.

    inputs, Raises: see `ResumableOutputs.make`.
    """
    config, most = job.config, job.config.max_new_tokens
    tokens, seconds = 0, 0.0

    def generate(first: int) -> Iterator[list[str]]:
        nonlocal tokens, seconds
        began = time.perf_counter()
        for batch in generator.batches(job.indices[first:], most):
            seconds += time.perf_counter() - began
            tokens += sum(count for _, count in batch)
            yield [text for text, _ in batch]
            began = time.perf_counter()

    def line(number: int, text: str) -> str:
        return json.dumps({**job.dataset.row(job.indices[number]), PREDICTION: text})

    file = OutputFile(config.split, len(job.indices), generate, line)
    settings = {
        "data": job.dataset.fingerprint,
        "questions": hashlib.sha256(json.dumps([config.split, *job.indices]).encode()).hexdigest(),
        "max_new_tokens": most,
    }
    (texts,) = ResumableOutputs(run, FOLDER, PREDICTION, [file], generator.batch_size).make(inputs, settings)
    if tokens:
        measured = speed.measure(generator, job.indices[0], most, tokens, seconds)
        log.info("%.4g tokens/s, %.3g s to the first token.", measured["tokens_per_second"], measured["seconds_to_first_token"])
        distributed.broadcast_from_rank0(lambda: write_json(run.path / speed.FILE, measured))
    predictions = generator.predictions(job.indices, texts)
    scores = distributed.broadcast_from_rank0(lambda: answers.scores(config.metrics, predictions, config.best_answer))
    return {f"{PREFIX}{name}": value for name, value in scores.items()}
