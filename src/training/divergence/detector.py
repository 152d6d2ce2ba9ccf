"""Detect divergence, step by step, from the loss, the gradient norm and skipped steps.

Every limit is relative to recent steps of the same run and uses robust statistics, independent of model and task:

- level: median of the last quarter of a window of losses. On a falling curve it is above the current loss.
- noise: 1.4826 times the median absolute deviation (MAD) of the window from its trend, which for a normal distribution
  is the standard deviation (Rousseeuw and Croux, Alternatives to the median absolute deviation, 1993). The trend is the
  line through the medians of the window's two halves.
- a short history widens limits: after n values by the factor (1 + 10 / n)^2.

`Detector` is deterministic: ranks with equal values, and restored detectors, make the same decisions.
"""

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

from pydantic import Field, model_validator

from src.errors import CheckpointError
from src.experiments import config
from src.training.divergence.spike_tracker import SpikeTracker

Action = Literal["warn", "save_batch", "skip_batch", "stop", "rewind"]
Kind = Literal["non_finite", "loss_spike", "loss_jump", "loss_climb", "loss_drift", "grad_norm", "skipped", "kl"]

SEVERITY: tuple[Action, ...] = ("warn", "save_batch", "skip_batch", "rewind", "stop")
"""Actions in order of severity. The most severe action of a step is executed. Every action warns, and all except "warn"
save the batch."""
MAX_SUSPECTS = 8
CLIMB_STEPS, CLIMB_DEVIATIONS = 8, 4.0
"""A climb: number of losses per median, and minimum rise of the median in multiples of the noise."""
NORMAL = 1.4826
"""Standard deviation of a normal distribution divided by its MAD."""


class Config(config.Config):
    """Limits and actions. benchmarks/training/divergence.py tunes the defaults on real curves."""

    window: int = Field(default=100, ge=16)
    """Number of previous steps to compare with."""
    noise_floor: float = Field(default=0.005, gt=0)
    """Minimum noise, relative to max(level, 1)."""
    loss_deviations: float = Field(default=3.0, gt=0)
    """A spike: loss this many times the noise above the level."""
    loss_steps: int = Field(default=3, gt=0)
    """Spike: loss > level + loss_deviations * noise, for loss_steps consecutive steps."""
    jump_deviations: float = Field(default=30.0, gt=0)
    """Jump: loss > level + jump_deviations * noise, in a single step."""
    climb_ratio: float = Field(default=0.3, gt=0)
    """Climb, before the window is full: the median of the last 8 losses exceeds the lowest such median by climb_ratio *
    max(lowest, 1)."""
    drift_deviations: float = Field(default=2.0, gt=0)
    """Drift: the median of the window exceeds its lowest value by drift_deviations * noise."""
    grad_norm_ratio: float = Field(default=5.0, gt=1)
    """An explosion: gradient norm above this multiple of the median."""
    grad_norm_steps: int = Field(default=3, gt=0)
    """Explosion: gradient norm > grad_norm_ratio * median for grad_norm_steps consecutive steps, or > grad_norm_ratio^2
    * median in one step."""
    skipped_steps: int = Field(default=25, gt=0)
    """Plateau: skipped_steps steps without an update among the last `2 * skipped_steps`. A float16 loss scale can need
    18 steps to settle."""
    on_non_finite: Literal["skip_batch", "stop", "rewind"] = "stop"
    """Never "warn", as the update would make the weights non-finite."""
    on_loss_spike: Action = "warn"
    """Action at a spike."""
    on_loss_jump: Action = "warn"
    """Action at a jump."""
    on_loss_climb: Literal["warn", "stop", "rewind"] = "warn"
    """Action at a climb."""
    on_loss_drift: Literal["warn", "stop", "rewind"] = "warn"
    """No "skip_batch", as the drift is over many batches."""
    on_grad_norm: Action = "warn"
    """Action at an explosion of the gradient norm."""
    on_skipped: Literal["warn", "save_batch", "stop", "rewind"] = "stop"
    """Action at a plateau of skipped steps."""
    max_kl: float | None = Field(default=None, gt=0)
    """Maximum KL divergence of a policy from its reference, in nats per token; None: no limit."""
    on_kl: Literal["warn", "stop", "rewind"] = "stop"
    """Action at a divergence above `max_kl`."""
    max_rewinds: int = Field(default=3, ge=1)
    """Maximum number of branches of a run; then the action "rewind" stops the training."""

    @property
    def actions(self) -> dict[Kind, Action]:
        """The action for each kind of finding."""
        return {
            "non_finite": self.on_non_finite,
            "loss_spike": self.on_loss_spike,
            "loss_jump": self.on_loss_jump,
            "loss_climb": self.on_loss_climb,
            "loss_drift": self.on_loss_drift,
            "grad_norm": self.on_grad_norm,
            "skipped": self.on_skipped,
            "kl": self.on_kl,
        }

    @model_validator(mode="after")
    def _consistent(self) -> "Config":
        for name in ("loss_steps", "grad_norm_steps"):
            if getattr(self, name) > self.window // 4:
                raise ValueError(
                    f"{name}: {getattr(self, name)} is more than a quarter of window = {self.window}. Lower it."
                )
        return self


@dataclass(frozen=True)
class Finding:
    """A suspicious step."""

    kind: Kind
    step: int
    message: str
    """A sentence that starts with the step."""
    action: Action
    first_step: int
    """First step of the rise, or the step of the lowest median before a drift."""

    @property
    def suspects(self) -> range:
        """The steps with suspicious batches, up to 8."""
        # These are caused by many steps; the last one is an example.
        one_batch = self.kind in {
            "loss_climb",
            "loss_drift",
            "skipped",
        }
        return range(self.step if one_batch else max(self.first_step, self.step - MAX_SUSPECTS + 1), self.step + 1)


def severest(findings: Sequence[Finding]) -> Action | None:
    """The most severe action of the findings; None without findings."""
    actions = {finding.action for finding in findings}
    return next((action for action in reversed(SEVERITY) if action in actions), None)


class Detector:
    """Judges each step in turn. `state()` is its complete state."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.losses = SpikeTracker(config.window, config.loss_steps, config.on_loss_spike == "skip_batch")
        self.norms = SpikeTracker(config.window, config.grad_norm_steps, config.on_grad_norm == "skip_batch")
        self.lowest: float | None = None  # lowest median of the window
        self.lowest_step = 0
        self.has_climbed = False  # whether the climb was reported
        self.skips: list[int] = []  # 1 for each recent step without an update, else 0
        self.on_plateau = False
        self.is_far = False  # whether it was reported that the policy is too far from its reference

    def observe(
        self,
        step: int,
        loss: float | None,
        grad_norm: float | None = None,
        skipped: bool = False,
        kl: float | None = None,
    ) -> list[Finding]:
        """Check step number `step` (counted from 1) before its update. Values must be equal on every rank.

        loss: mean over the step's loss tokens; None if unknown.
        grad_norm: norm of the global gradient before clipping; None if unknown, 0 without a gradient.
        kl: KL divergence of a policy from its reference, in nats per token; None without a policy.
        skipped: whether the float16 loss scaler skips the step; then its gradient norm is ignored.
        """
        findings = []
        norm = None if skipped else grad_norm
        for name, value in (("loss", loss), ("gradient norm", norm)):
            if value is not None and not math.isfinite(value):
                findings.append(self._finding("non_finite", step, f"the {name} is {value}", step))
        if loss is not None and math.isfinite(loss):
            findings += [*self._spike(step, loss), *self._climb(step, loss), *self._drift(step)]
        if norm is not None and math.isfinite(norm):
            findings += self._explosion(step, norm)
        if kl is not None:
            findings += self._departure(step, kl)
        return findings + self._plateau(step, skipped or severest(findings) == "skip_batch")

    def _spike(self, step: int, loss: float) -> list[Finding]:
        watch, config = self.losses, self.config
        if not watch.values:
            watch.rose(step, loss, math.inf)
            return []
        level = _median(watch.values[-(config.window // 4) :])
        limit = level + config.loss_deviations * self._floor(level)
        noise, findings = 0.0, list[Finding]()
        if loss > limit:  # else the noise does not matter
            noise = self._noise(level)
            limit = level + config.loss_deviations * noise
            if loss > level + config.jump_deviations * noise and not (
                watch.is_reported and config.on_loss_jump == "warn"
            ):
                times = (loss - level) / noise
                text = (
                    f"the loss is {loss:.4g}, "
                    f"{times:.0f} times the noise above its level (level {level:.4g}, noise {noise:.2g})"
                )
                findings.append(self._finding("loss_jump", step, text, step))
        if not watch.rose(step, loss, limit):
            return findings
        text = (
            f"the loss is {loss:.4g}, "
            f"above {limit:.4g} since step {watch.first_step} (level {level:.4g}, noise {noise:.2g})"
        )
        return [*findings, self._finding("loss_spike", step, text, watch.first_step)]

    def _climb(self, step: int, loss: float) -> list[Finding]:
        values, ratio = self.losses.values + self.losses.rising, self.config.climb_ratio
        lowest = min(values)
        if (
            self.has_climbed
            or not CLIMB_STEPS < len(values) < self.config.window
            or loss <= lowest + ratio * max(lowest, 1.0)
        ):
            return []
        medians = [_median(values[i : i + CLIMB_STEPS]) for i in range(len(values) - CLIMB_STEPS + 1)]
        lowest = min(medians)
        # The noise is the deviation of changes from their median.
        changes = [after - before for before, after in pairwise(values)]
        noise = NORMAL / math.sqrt(2) * _median([abs(change - _median(changes)) for change in changes])
        if medians[-1] - lowest <= max(ratio * max(lowest, 1.0), CLIMB_DEVIATIONS * noise):
            return []
        self.has_climbed = True
        steps = len(medians) - 1 - medians.index(lowest)
        text = (
            f"the median of {CLIMB_STEPS} losses has risen to {medians[-1]:.4g} from {lowest:.4g} within {steps} steps"
        )
        return [self._finding("loss_climb", step, text, max(1, step - steps - CLIMB_STEPS + 1))]

    def _drift(self, step: int) -> list[Finding]:
        values, config = self.losses.values, self.config
        if len(values) < config.window:
            return []
        level = _median(values)
        if self.lowest is None or level < self.lowest:
            self.lowest, self.lowest_step = level, step
            return []
        rise = level - self.lowest
        if rise <= config.drift_deviations * self._floor(level) or rise <= config.drift_deviations * self._noise(level):
            return []
        text = (
            f"the median of {config.window} "
            f"losses has risen to {level:.4g} from {self.lowest:.4g} at step {self.lowest_step}"
        )
        finding = self._finding("loss_drift", step, text, self.lowest_step)
        self.lowest, self.lowest_step = level, step  # the next drift must rise as far again
        return [finding]

    def _explosion(self, step: int, norm: float) -> list[Finding]:
        watch, ratio = self.norms, self.config.grad_norm_ratio
        middle = _median(watch.values) if watch.values else 0.0
        unit = middle * _widening(len(watch.values)) if middle > 0 else math.inf  # 0: the norm is not measured
        if not watch.rose(step, norm, ratio * unit, ratio**2 * unit):
            return []
        text = (
            f"the gradient norm is {norm:.4g}, {norm / middle:.0f} times the median of the steps before ({middle:.4g})"
        )
        return [self._finding("grad_norm", step, text, watch.first_step)]

    def _departure(self, step: int, kl: float) -> list[Finding]:
        most, before = self.config.max_kl, self.is_far
        self.is_far = most is not None and not kl <= most
        if not self.is_far or before:
            return []
        return [
            self._finding(
                "kl", step, f"the KL divergence of the policy is {kl:.4g} nats per token, more than {most:g}", step
            )
        ]

    def _plateau(self, step: int, skipped: bool) -> list[Finding]:
        most = self.config.skipped_steps
        self.skips = [*self.skips, int(skipped)][-2 * most :]
        count = sum(self.skips)
        if count < most:
            self.on_plateau = self.on_plateau and count > most // 2
            return []
        if self.on_plateau:
            return []
        self.on_plateau = True
        first = step - len(self.skips) + 1 + self.skips.index(1)
        return [
            self._finding(
                "skipped", step, f"{count} of the last {len(self.skips)} steps did not move the weights", first
            )
        ]

    def _finding(self, kind: Kind, step: int, text: str, first_step: int) -> Finding:
        return Finding(kind, step, f"step {step}: {text}.", self.config.actions[kind], first_step)

    def _floor(self, level: float) -> float:
        """Minimum of `_noise`."""
        return self.config.noise_floor * max(abs(level), 1.0) * _widening(len(self.losses.values))

    def _noise(self, level: float) -> float:
        values = self.losses.values
        return max(self._floor(level), NORMAL * _mad_about_trend(values) * _widening(len(values)))

    def state(self) -> dict[str, Any]:
        """The state as JSON values; floats survive JSON exactly."""
        return {
            "losses": self.losses.state(),
            "norms": self.norms.state(),
            "lowest": self.lowest,
            "lowest_step": self.lowest_step,
            "skips": list(self.skips),
            "on_plateau": self.on_plateau,
            "has_climbed": self.has_climbed,
            "is_far": self.is_far,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from `state()` of a detector with the same config; {} resets.

        Raises:
            CheckpointError: the state is from another version of this code.
        """
        fresh = Detector(self.config)
        if state:
            parts = {"losses": fresh.losses, "norms": fresh.norms}
            same = state.keys() == fresh.state().keys() and all(
                state[name].keys() == part.state().keys() for name, part in parts.items()
            )
            if not same:
                raise CheckpointError(
                    "the state of the divergence detector is from another version of this code. Start over with -r 1."
                )
            for name, part in parts.items():
                vars(part).update({key: copy.copy(value) for key, value in state[name].items()})
            vars(fresh).update({key: copy.copy(value) for key, value in state.items() if key not in parts})
        vars(self).update(vars(fresh))


def _widening(count: int) -> float:
    """Factor that widens a limit based on only `count` values."""
    return (1 + 10 / count) ** 2


def _median(values: Sequence[float]) -> float:
    """Like statistics.median, but several times as fast."""
    sorted_values, half = sorted(values), len(values) // 2
    return sorted_values[half] if len(sorted_values) % 2 else (sorted_values[half - 1] + sorted_values[half]) / 2


def _mad_about_trend(values: Sequence[float]) -> float:
    """Median absolute deviation from the line through both halves' medians; with fewer than eight values, from the
    median."""
    half = len(values) // 2
    slope = (_median(values[half:]) - _median(values[:half])) / (len(values) - half) if len(values) >= 8 else 0.0
    flat = [value - slope * i for i, value in enumerate(values)]
    middle = _median(flat)
    return _median([abs(value - middle) for value in flat])
