"""Track the best step by `loop.best_metric`, and stop when it no longer improves."""

import math
from collections.abc import Mapping
from typing import Any

from src.errors import ConfigError
from src.training.config import LoopConfig


class ModelSelection:
    """Tracks `loop.best_metric` over the evaluations. `state()` is its complete state."""

    def __init__(self, config: LoopConfig) -> None:
        self.config = config
        self.best_value: float | None = None
        self.best_step: int | None = None
        self.without_gain = 0

    def update(self, step: int, scores: Mapping[str, float]) -> None:
        """Add one evaluation. A non-finite value is never an improvement.

        Raises:
            ConfigError: `loop.best_metric` is not a score of the evaluation.
        """
        metric = self.config.best_metric
        if metric not in scores:
            error = ConfigError(f"loop.best_metric: unknown score {metric!r}. Scores: {', '.join(sorted(scores))}.")
            error.everywhere = True  # the scores are equal on every rank
            raise error
        value = scores[metric]
        sign = 1 if self.config.best_mode == "max" else -1
        if not math.isfinite(value):
            gain = -math.inf
        elif self.best_value is None:
            gain = math.inf
        else:
            gain = sign * (value - self.best_value)
        stopping = self.config.early_stopping
        self.without_gain = 0 if gain > (stopping.min_gain if stopping else 0.0) else self.without_gain + 1
        if gain > 0:
            self.best_value, self.best_step = value, step

    def stop(self) -> bool:
        """Whether early stopping's patience is exhausted."""
        stopping = self.config.early_stopping
        return stopping is not None and self.without_gain >= stopping.patience

    def state(self) -> dict[str, Any]:
        """State for `restore`, as JSON values."""
        return {"best_value": self.best_value, "best_step": self.best_step, "without_gain": self.without_gain}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from `state()`."""
        self.best_value, self.best_step, self.without_gain = (
            state["best_value"],
            state["best_step"],
            state["without_gain"],
        )
