"""A progress bar in a terminal, and log lines at evaluations, checkpoints, and regular intervals."""

import logging
import sys
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

from tqdm import tqdm

log = logging.getLogger(__name__)
QUIET_SECONDS = 30.0
"""Minimum time since the last log line before a row without evaluation or checkpoint is logged."""
NO_SCORES = ("step", "grad_norm", "clip_rate", "skipped_steps", "learning_rate", "tokens")


class Progress:
    """Shows step, losses, tokens/s, the remaining time, and the scores of the last evaluation. clock: in seconds."""

    def __init__(self, steps: int, finished: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.steps, self.finished, self.clock = steps, finished, clock
        self.logged, self.scores = clock(), ""
        self.bar = tqdm(total=steps, initial=finished, unit="step", leave=False) if sys.stderr.isatty() else None

    def on_step(self, step: int, loss: float, tokens_per_second: float, seconds_per_step: float) -> None:
        """Advance the bar. Without one, log the remaining time of a long training after the second step. It is rather
        too long, as the first steps are the slowest."""
        if self.bar is not None:
            self.bar.set_postfix_str(f"loss {loss:.4f}  {tokens_per_second:,.0f} tokens/s{self.scores}", refresh=False)
            self.bar.update(step - self.bar.n)
        elif step == self.finished + 2 and (seconds_left := seconds_per_step * (self.steps - step)) >= QUIET_SECONDS:
            log.info("step %d/%d  about %s left", step, self.steps, timedelta(seconds=round(seconds_left)))

    def on_row(self, row: Mapping[str, Any], perf: Mapping[str, float], is_durable: bool) -> None:
        """Log the scores, if `is_durable` or after QUIET_SECONDS. With speed and remaining time if `perf` has them."""
        scores = {name: value for name, value in row.items() if name.partition("/")[0] not in NO_SCORES}
        score_text = "".join(f"  {_spell(name, value)}" for name, value in scores.items() if name != "train_loss")
        self.scores = score_text or self.scores
        if not is_durable and self.clock() - self.logged < QUIET_SECONDS:
            return
        self.logged = self.clock()
        if self.bar is not None:
            self.bar.clear()
        line = "  ".join(_spell(name, value) for name, value in scores.items())
        if not self.steps:
            log.info("nothing is trained  %s", line)
            return
        step, speed = row["step"], ""
        if steps_per_second := perf.get("steps_per_second"):
            time_left = timedelta(seconds=round((self.steps - step) / steps_per_second))
            speed = f"  {perf['tokens_per_second']:,.0f} tokens/s  {time_left} left"
        log.info("step %d/%d  %s%s", step, self.steps, line, speed)

    def on_end(self, scores: Mapping[str, float]) -> None:
        """Log the scores, without parts such as "inference/em/nq"."""
        log.info("%s", "  ".join(f"{name} {value:.4g}" for name, value in scores.items() if name.count("/") < 2))

    def close(self) -> None:
        """Remove the bar."""
        if self.bar is not None:
            self.bar.close()


def _spell(name: str, value: float) -> str:
    return f"{name} {value:.4f}" if "loss" in name else f"{name} {value:.4g}"
