"""The learning rate as a pure function of the step: warm-up and schedules of transformers, bitwise equal.

Changes by a rewind are applied on top; see `runs.history.branches.override_learning_rate`.
"""

import math
from collections.abc import Callable

from src.training.config import POLYNOMIAL_END, LoopConfig

DEFAULT_TIMESCALE = 10_000
"""Timescale of inverse_sqrt without a warm-up, in steps, as in transformers."""


def learning_rate(config: LoopConfig) -> Callable[[int], float]:
    """Return a function from the number of finished steps to the learning rate of the next step."""
    warmup = round(config.warmup_rate * config.steps)
    decay = _DECAYS[config.schedule]
    start, end = config.warmup_start, config.final_rate

    def share(step: int) -> float:
        if step < warmup:
            rise = step / warmup
            return start + (1 - start) * rise if start else rise
        factor = decay(step, warmup, config)
        return end + (1 - end) * factor if end else factor

    return lambda step: config.learning_rate * share(step)


def _progress(step: int, warmup: int, config: LoopConfig) -> float:
    """Finished share of the steps after the warm-up."""
    return (step - warmup) / max(1, config.steps - warmup)


def _constant(step: int, warmup: int, config: LoopConfig) -> float:
    return 1.0


def _linear(step: int, warmup: int, config: LoopConfig) -> float:
    return max(0.0, (config.steps - step) / max(1, config.steps - warmup))


def _cosine(step: int, warmup: int, config: LoopConfig) -> float:
    return max(0.0, 0.5 * (1.0 + math.cos(math.pi * _progress(step, warmup, config))))


def _cosine_with_restarts(step: int, warmup: int, config: LoopConfig) -> float:
    progress = _progress(step, warmup, config)
    return 0.0 if progress >= 1.0 else max(0.0, 0.5 * (1.0 + math.cos(math.pi * (progress % 1.0))))


def _polynomial(step: int, warmup: int, config: LoopConfig) -> float:
    if step > config.steps:
        return POLYNOMIAL_END / config.learning_rate
    remaining = 1 - (step - warmup) / (config.steps - warmup)
    return ((config.learning_rate - POLYNOMIAL_END) * remaining + POLYNOMIAL_END) / config.learning_rate


def _inverse_sqrt(step: int, warmup: int, config: LoopConfig) -> float:
    timescale = warmup or DEFAULT_TIMESCALE
    return 1.0 / math.sqrt((step + timescale - warmup) / timescale)


def _wsd(step: int, warmup: int, config: LoopConfig) -> float:
    """1 until the decay, then a fall to 0 in the shape of the decay (Hu et al. 2024, MiniCPM)."""
    decay = round(config.decay_rate * config.steps)
    x = min(1.0, max(0, step - (config.steps - decay)) / decay)
    if config.decay_shape == "cosine":
        return max(0.0, 0.5 * (1.0 + math.cos(math.pi * x)))
    return 1.0 - (math.sqrt(x) if config.decay_shape == "sqrt" else x)


_DECAYS: dict[str, Callable[[int, int, LoopConfig], float]] = {
    "constant": _constant,
    "constant_with_warmup": _constant,
    "linear": _linear,
    "cosine": _cosine,
    "cosine_with_restarts": _cosine_with_restarts,
    "polynomial": _polynomial,
    "inverse_sqrt": _inverse_sqrt,
    "wsd": _wsd,
}
"""Schedule -> function of (step, warm-up steps, config) that returns the share of the learning rate after the
warm-up."""
