"""Answers drawn from a model, several to each question, and what share of them is good."""

import math
from collections.abc import Sequence
from statistics import fmean, stdev

import torch

from src.errors import ConfigError
from src.evaluation.config import SampledAnswers
from src.evaluation.generation import AnswerGenerator, gather_batches

_NORMAL_95 = 1.96


def evaluate(asked: SampledAnswers, generator: AnswerGenerator) -> dict[str, float]:
    """{"solved_mean@8": …, "solved_mean@8_interval": …, "solved_pass@8": …}; see `SampledAnswers.kinds`. Collective.

    What is drawn is the same at every evaluation, for every number of processes and every micro-batch.

    Raises:
        ConfigError: a metric gives all answers one score together.
        distributed.StopTraining: a process was asked to stop meanwhile.
    """
    options = {
        "do_sample": True,
        "temperature": asked.temperature,
        "top_p": asked.top_p,
        "top_k": 0,
        "num_return_sequences": asked.samples,
    }

    def answer(questions: Sequence[int]) -> list[list[str]]:
        torch.manual_seed(questions[0])
        ids = generator.generate(generator.prompts(questions), asked.max_new_tokens, **options)
        texts = [text.strip() for text in generator.tokenizer.batch_decode(ids, skip_special_tokens=True)]
        return [texts[first : first + asked.samples] for first in range(0, len(texts), asked.samples)]

    batches = gather_batches(answer, range(asked.questions), max(1, asked.generation_batch // asked.samples))
    answers = [texts for batch in batches for texts in batch]
    numbers = [index for index in range(asked.questions) for _ in range(asked.samples)]
    predictions = generator.predictions(numbers, [text for texts in answers for text in texts])
    found: dict[str, float] = {}
    for metric in asked.metrics:
        for name, scores in metric.score(predictions).items():
            if not isinstance(scores, list):
                raise ConfigError(
                    f"sampled.metrics: {name!r} is a score of all answers together. Choose metrics of each answer."
                )
            groups = [scores[first : first + asked.samples] for first in range(0, len(scores), asked.samples)]
            means = [fmean(group) for group in groups]
            interval = _NORMAL_95 * stdev(means) / math.sqrt(len(means)) if len(means) > 1 else 0.0
            passed = fmean(max(group) >= 1 for group in groups)
            found |= {
                f"{name}_{kind}": value
                for kind, value in zip(asked.kinds(), (fmean(means), interval, passed), strict=True)
            }
    return found
