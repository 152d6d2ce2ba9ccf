"""Inference with a trained model: answers to the questions of a split, <run>/inference/<split>.jsonl, and their scores.

A line is a row of the prepared data with the added field `answer_pred`.
"""

import hashlib
import json
import logging
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from src.errors import ConfigError
from src.evaluation import speed
from src.evaluation.config import Inference
from src.evaluation.generation import AnswerGenerator
from src.evaluation.metrics import answers
from src.evaluation.metrics.answers import INFERENCE, PREDICTION, WRONG
from src.evaluation.outputs import OutputFile, ResumableOutputs
from src.experiments.dataset_protocols import ContextDataset, Prediction, QuestionDataset
from src.files import write_json
from src.runs.context import Run
from src.support import distributed

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class InferenceJob:
    """An inference, checked before the training."""

    config: Inference
    dataset: QuestionDataset
    """The questions of the split."""
    indices: list[int]
    """The questions to answer."""
    control: QuestionDataset | None = None
    """The same questions with wrong contexts."""


def prepare(config: Inference, dataset: ContextDataset, row_indices: list[int] | None) -> InferenceJob:
    """Check the inference that `config` describes, before the training. row_indices: content of the index file, if set.

    Raises:
        UserError: the selected rows do not exist, or there are no contexts to shuffle.
        ImportError: a package of a metric is missing.
    """
    answers.scores(
        config.metrics, [Prediction("a word", ["a word"], "a question", ["a context"], "a source")], config.best_answer
    )
    if config.wrong_contexts and not dataset.reads_contexts:
        raise ConfigError("inference.wrong_contexts: these data have no contexts. Remove it.")
    control = dataset.with_shuffled_contexts() if config.wrong_contexts else None
    return InferenceJob(config, dataset, config.select(dataset, row_indices), control)


def make(run: Run, job: InferenceJob, generator: AnswerGenerator, inputs: Mapping[str, str]) -> dict[str, float]:
    """Answer the remaining questions; returns the scores {"inference/em": …, "inference/em/nq": …}. Collective.

    With `wrong_contexts` also {"inference/em_wrong_context": …, "inference/em_gain": …}.

    inputs, Raises: see `ResumableOutputs.make`.
    """
    config, most = job.config, job.config.max_new_tokens
    tokens, seconds = 0, 0.0

    def generate(asking: AnswerGenerator, first: int) -> Iterator[list[str]]:
        nonlocal tokens, seconds
        began = time.perf_counter()
        for batch in asking.batches(job.indices[first:], most):
            seconds += time.perf_counter() - began
            tokens += sum(count for _, count in batch)
            yield [text for text, _ in batch]
            began = time.perf_counter()

    def line(number: int, text: str) -> str:
        return json.dumps({**job.dataset.row(job.indices[number]), PREDICTION: text})

    files = [OutputFile(config.split, len(job.indices), partial(generate, generator), line)]
    if job.control:
        control = replace(generator, dataset=job.control)
        files.append(OutputFile(f"{config.split}{WRONG}", len(job.indices), partial(generate, control), line))
    settings: dict[str, Any] = {
        "data": job.dataset.fingerprint,
        "questions": hashlib.sha256(json.dumps([config.split, *job.indices]).encode()).hexdigest(),
        "max_new_tokens": most,
        **config.decoding(),
    }
    if job.control:
        settings["wrong_contexts"] = True
    answer_texts = ResumableOutputs(run, INFERENCE, PREDICTION, files, generator.batch_size).make(inputs, settings)
    if tokens:
        speeds = speed.measure(generator, job.indices[0], most, tokens, seconds)
        log.info(
            "%.4g tokens/s, %.3g s to the first token.",
            speeds["tokens_per_second"],
            speeds["seconds_to_first_token"],
        )
        distributed.broadcast_from_rank0(lambda: write_json(run.path / speed.FILE, speeds))
    predictions = [generator.predictions(job.indices, texts) for texts in answer_texts]
    scores, *wrong = distributed.broadcast_from_rank0(
        lambda: [answers.scores(config.metrics, answer_list, config.best_answer) for answer_list in predictions]
    )
    for control in wrong:
        scores |= answers.control_scores(scores, control)
    return {f"{INFERENCE}/{name}": value for name, value in scores.items()}
