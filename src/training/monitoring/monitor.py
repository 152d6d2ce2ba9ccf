"""Statistics of weights, gradients, moments, updates and activations.

Monitoring does not change a bit of the training. For each optimizer step, the loop calls `before_step`, `forward`
around each forward pass, `after_backward` and `after_step`. The cost is negligible in steps without statistics.
"""

import contextlib
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from src.runs import jsonl_records
from src.runs.context import Options
from src.support import distributed
from src.training.monitoring import activation_statistics, parameter_statistics, tensor_statistics
from src.training.monitoring.activation_statistics import Activation
from src.training.monitoring.parameter_statistics import TensorSums

FILE = "statistics.jsonl"
DEFAULT_EVERY = Options().statistics_every
log = logging.getLogger(__name__)


class Monitor:
    """Writes statistics.jsonl in the save directory `folder`:
    {"step", "name", "type" (class of a module), "context", "var_min", …}.

    All ranks must make the same calls; rank 0 writes.

    every: optimizer steps between statistics; 0: off. compiled: whether `model` is compiled, so that it gets no hooks.
    """

    def __init__(self, folder: Path, model: nn.Module, every: int = DEFAULT_EVERY, *, compiled: bool = False) -> None:
        self.folder, self.model, self.every = folder, model, every
        self.no_hooks_reason = "compiled" if compiled or activation_statistics.is_compiled(model) else ""
        self.step = 0
        self.due = False
        self._gradients: list[TensorSums] = []
        self._activations: list[Activation] = []
        if every and self.no_hooks_reason:
            log.info("The model is %s, so activations are not measured.", self.no_hooks_reason)

    def truncate(self, step: int) -> None:
        """Drop the records after `step`, when resuming. Call it on rank 0.

        Raises:
            UserError: the disk refuses, or the file is damaged.
        """
        jsonl_records.truncate_after(self.folder / FILE, step, "a record of statistics")

    def before_step(self, step: int) -> None:
        """Called before optimizer step `step`, counted from 1."""
        self.step = step
        self.due = bool(self.every) and step % self.every == 0
        self._gradients, self._activations = [], []

    def forward(self, last: bool) -> contextlib.AbstractContextManager[None]:
        """Context of a forward pass and its loss, without the backward pass. Measures the `last` pass of a due step, on
        rank 0."""
        uses_hooks = self.due and last and not self.no_hooks_reason and distributed.is_main()
        return (
            activation_statistics.watch_activations(self.model, self._activations)
            if uses_hooks
            else contextlib.nullcontext()
        )

    def after_backward(self) -> None:
        """Called when the gradients are complete and unscaled, before clipping. Collective for sharded models."""
        if self.due:
            self._gradients = parameter_statistics.gradients(self.model)

    def after_step(self, optimizer: Any) -> None:
        """Called after the optimizer's step, while its groups still hold the step's learning rate.
        Collective for sharded models.

        Raises:
            RunError: the disk refuses.
        """
        if not self.due:
            return
        tensor_sums = parameter_statistics.gather_sums(
            self._gradients + parameter_statistics.weights(self.model, optimizer), self.model
        )
        rates = parameter_statistics.learning_rates(self.model, optimizer)
        distributed.broadcast_from_rank0(lambda: self._write(tensor_sums, rates))
        self._gradients, self._activations, self.due = [], [], False

    def _write(self, tensor_sums: Sequence[TensorSums], learning_rates: Mapping[str, float]) -> None:
        """Write one record per tensor."""
        rates = parameter_statistics.update_rates(list(tensor_sums), learning_rates)
        heads: list[dict[str, Any]] = [
            {"step": self.step, "name": item.name, "context": item.context} for item in tensor_sums
        ]
        heads += [{"step": self.step, "name": a.name, "type": a.type, "context": a.context} for a in self._activations]
        tables = [item.sums for item in tensor_sums], [item.sums for item in self._activations]
        rows = [row for table in tables if table for row in tensor_statistics.rows(torch.stack(table))]
        for head, row in zip(heads, rows, strict=True):
            head |= row
            if head["context"] == parameter_statistics.UPDATE:
                head["update_rate"] = rates[head["name"]]
        jsonl_records.append(self.folder / FILE, heads, durable=False)
        bad = [head for head in heads if "nonfinite" in head]
        if bad:
            first = f"{bad[0]['name'] or 'the model'} {bad[0]['context']}"
            log.warning(
                "step %d: %d of %d tensors are not finite, the first %s; see %s.",
                self.step,
                len(bad),
                len(heads),
                first,
                FILE,
            )
