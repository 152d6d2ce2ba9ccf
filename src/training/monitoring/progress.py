"""A progress bar in a terminal, and a line of log per score row."""

import logging
import sys
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from tqdm import tqdm

log = logging.getLogger(__name__)


class Progress:
    """Shows step, loss, tokens/s and the remaining time."""

    def __init__(self, steps: int, finished: int) -> None:
        self.steps = steps
        self.bar = tqdm(total=steps, initial=finished, unit="step", leave=False) if sys.stderr.isatty() else None

    def on_step(self, step: int, loss: float, tokens_per_second: float) -> None:
        """Advance the bar."""
        if self.bar is not None:
            self.bar.set_postfix_str(f"loss {loss:.4f}  {tokens_per_second:,.0f} tokens/s", refresh=False)
            self.bar.update(step - self.bar.n)

    def on_row(self, row: Mapping[str, Any], perf: Mapping[str, float]) -> None:
        """Log the losses, the speed and the remaining time."""
        if self.bar is not None:
            self.bar.clear()
        losses = "  ".join(f"{name} {value:.4f}" for name, value in row.items() if "loss" in name)
        if not self.steps:
            log.info("nothing is trained  %s", losses)
            return
        step, rate = row["step"], perf["tokens_per_second"]
        left = timedelta(seconds=round((self.steps - step) / max(perf["steps_per_second"], 1e-9)))
        log.info("step %d/%d  %s  %s tokens/s  %s left", step, self.steps, losses, f"{rate:,.0f}", left)

    def on_end(self, scores: Mapping[str, float]) -> None:
        """Log them, without parts such as "inference/em/nq"."""
        log.info("%s", "  ".join(f"{name} {value:.4g}" for name, value in scores.items() if name.count("/") < 2))

    def close(self) -> None:
        """Remove the bar."""
        if self.bar is not None:
            self.bar.close()
