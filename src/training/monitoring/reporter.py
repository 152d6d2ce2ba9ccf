"""Report scores and timings to scores.jsonl, perf.jsonl, status.json, the progress bar and wandb. Rank 0 only."""

from collections.abc import Mapping
from typing import Any, Protocol

from torch import nn

from src.runs import jsonl_records
from src.runs.context import Run
from src.runs.heartbeat import Heartbeat
from src.runs.store import PERF
from src.runs.summary import is_finite
from src.support import distributed
from src.training.config import Evaluation, LoopConfig
from src.training.monitoring.progress import Progress


class Callback(Protocol):
    """Receives every row, and must not change it."""

    def on_row(self, row: Mapping[str, Any], perf: Mapping[str, float], is_durable: bool) -> None:
        """Called for each row. row: scores by name, with "step". perf: rates by name. is_durable: see
        `Reporter.report`."""

    def on_end(self, scores: Mapping[str, float]) -> None:
        """Called with the final scores of the trained model, which are added to the last row."""

    def close(self) -> None:
        """Called at the end of the training, finished or not."""


class Reporter:
    """Writes the files of a run and passes each row to the callbacks. finished: steps done before this start."""

    def __init__(self, run: Run, config: LoopConfig | Evaluation, model: nn.Module, finished: int) -> None:
        self.run, self.config = run, config
        self.callbacks: list[Callback] = []
        if distributed.is_main():
            self.progress, self.heartbeat = Progress(config.steps, finished), Heartbeat(run.path, run.dir.attempt)
            self.callbacks.append(self.progress)
            if run.options.wandb:
                from src.training.monitoring.wandb import Wandb

                self.callbacks.append(Wandb(run, run.options.wandb, model))

    def report(self, row: Mapping[str, Any], perf: Mapping[str, float], is_durable: bool = True) -> None:
        """Append a score row and its timings. Call it on rank 0.

        is_durable: whether the step has an evaluation or a checkpoint. Then the row is synced to disk, and status.json
        and haven's file are updated. Other rows are frequent and must be fast.

        Raises:
            RunError: the disk refuses, or another process has taken over the save directory.
        """
        self.run.dir.confirm()
        self.run.dir.scores.append(row, durable=is_durable)
        jsonl_records.append(self.run.path / PERF, [{"step": row["step"], **perf}], durable=False, allow_nan=True)
        if is_durable:
            self.run.dir.scores.export_haven()
            loss = row.get("train_loss")
            loss = loss if is_finite(loss) else None  # JSON has no NaN
            self.run.dir.set_status("running", step=row["step"], steps=self.config.steps, loss=loss)
        for callback in self.callbacks:
            callback.on_row(row, perf, is_durable)

    def complete(self, scores: Mapping[str, float]) -> None:
        """Add scores of the trained model to the last row. Call it on rank 0.

        Raises:
            RunError: the disk refuses, or another process has taken over the save directory.
        """
        self.run.dir.confirm()
        self.run.dir.scores.add_to_last_row(scores)
        self.run.dir.scores.export_haven()
        for callback in self.callbacks:
            callback.on_end(scores)

    def step(self, step: int, loss: float, tokens_per_second: float, seconds_per_step: float) -> None:
        """Show that `step` optimizer steps are finished, the last with this mean loss."""
        if distributed.is_main():
            self.progress.on_step(step, loss, tokens_per_second, seconds_per_step)
            self.heartbeat.on_step(step)

    def close(self) -> None:
        """Close the callbacks."""
        for callback in self.callbacks:
            callback.close()
