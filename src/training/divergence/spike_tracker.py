"""Track rises of a value above a limit."""

import math
from typing import Any


class SpikeTracker:
    """Tracks a window of values and rises above it: at least `steps` consecutive values above the limit.

    Values of a rise enter the window when it is over or reported, so that a rise does not raise its own limit.
    """

    def __init__(self, window: int, steps: int, every: bool) -> None:
        self.window, self.steps = window, steps
        self.every = every  # True: after a rise is reported, report each further step too, to skip its batch
        self.values: list[float] = []
        self.rising: list[float] = []
        self.first_step = 0
        self.is_reported = False
        self.calm_steps = 0  # since the last step of a reported rise

    def rose(self, step: int, value: float, limit: float, at_once: float = math.inf) -> bool:
        """Add `value`; returns whether to report a rise at this step."""
        if value <= limit:
            self._take([*self.rising, value])
            self.calm_steps += 1
            if self.calm_steps >= self.steps:
                self.is_reported = False
            return False
        if not self.rising and not self.is_reported:
            self.first_step = step
        self.rising.append(value)
        if self.is_reported:
            self._take(self.rising)
            return self.every
        if len(self.rising) < self.steps and value <= at_once:
            return False
        self._take(self.rising)
        self.is_reported = True
        return True

    def _take(self, values: list[float]) -> None:
        self.values = (self.values + values)[-self.window :]
        if self.rising:
            self.calm_steps = 0
        self.rising = []

    def state(self) -> dict[str, Any]:
        """The state as JSON values."""
        return {
            "values": list(self.values),
            "rising": list(self.rising),
            "first_step": self.first_step,
            "is_reported": self.is_reported,
            "calm_steps": self.calm_steps,
        }
