"""Sample several answers per question, and score them."""

import math
from collections.abc import Sequence
from statistics import fmean, stdev

import torch

from src.errors import ConfigError
from src.evaluation.config import SampledAnswers
from src.evaluation.generation import AnswerGenerator, gather_batches

_NORMAL_95 = 1.96


def evaluate(config: SampledAnswers, generator: AnswerGenerator) -> dict[str, float]:
    """{"solved_mean@8": …, "solved_mean@8_interval": …, "solved_pass@8": …}; see `SampledAnswers.kinds`. Collective.

    The random numbers are the same at every evaluation, and independent of the number of processes and the micro-batch.

    Raises:
        ConfigError: a metric has only a set-level score.
        distributed.StopTraining: a process received a stop signal.
    """
    options = {
        "do_sample": True,
        "temperature": config.temperature,
        "top_p": config.top_p,
        "top_k": 0,
        "num_return_sequences": config.samples,
    }

    def answer(questions: Sequence[int]) -> list[list[str]]:
        torch.manual_seed(questions[0])
        ids = generator.generate(generator.prompts(questions), config.max_new_tokens, **options)
        texts = [text.strip() for text in generator.tokenizer.batch_decode(ids, skip_special_tokens=True)]
        return [texts[first : first + config.samples] for first in range(0, len(texts), config.samples)]

    batches = gather_batches(answer, range(config.questions), max(1, config.generation_batch // config.samples))
    answers = [texts for batch in batches for texts in batch]
    numbers = [index for index in range(config.questions) for _ in range(config.samples)]
    predictions = generator.predictions(numbers, [text for texts in answers for text in texts])
    all_scores: dict[str, float] = {}
    for metric in config.metrics:
        for name, scores in metric.score(predictions).items():
            if not isinstance(scores, list):
                raise ConfigError(
                    f"sampled.metrics: {name!r} scores all answers together. "
                    "Use a metric that scores each answer, such as em."
                )
            groups = [scores[first : first + config.samples] for first in range(0, len(scores), config.samples)]
            means = [fmean(group) for group in groups]
            interval = _NORMAL_95 * stdev(means) / math.sqrt(len(means)) if len(means) > 1 else 0.0
            pass_rate = fmean(max(group) >= 1 for group in groups)
            all_scores |= {
                f"{name}_{kind}": value
                for kind, value in zip(config.kinds(), (fmean(means), interval, pass_rate), strict=True)
            }
    return all_scores
