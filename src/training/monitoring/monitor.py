"""Statistics of weights, gradients, moments, updates and activations, and the loss by source.

It looks and changes nothing: a training ends with the same bits with it and without it. The loop calls, for each optimizer step,
`before_step`, `forward` around each forward pass, `after_backward` and `after_step`; between them it costs next to nothing in the steps
whose statistics are not due. The loss by source costs a cross entropy without gradient, where there are several sources.
"""

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from src import distributed
from src.runs import jsonl_records
from src.runs.context import Options
from src.training.monitoring import activation_statistics, parameter_statistics, tensor_statistics
from src.training.monitoring.activation_statistics import Activation
from src.training.monitoring.parameter_statistics import TensorSums
from src.training.monitoring.source_loss import SourceLoss

FILE = "statistics.jsonl"
DEFAULT_EVERY = Options().statistics_every
log = logging.getLogger(__name__)


class Monitor:
    """Writes statistics.jsonl in the save directory `folder`: {"step", "name", "type" (the class, of a module), "context", "var_min", …}.

    The same calls must come on every rank; rank 0 writes.

    every: optimizer steps between statistics; 0 for none. compiled: whether torch.compile has taken `model`, which is then not hooked.
    sources: names of what the data are from.
    """

    def __init__(
        self, folder: Path, model: nn.Module, every: int = DEFAULT_EVERY, *, compiled: bool = False, sources: Sequence[str] = ()
    ) -> None:
        self.folder, self.model, self.every = folder, model, every
        self.compiled = compiled or activation_statistics.is_compiled(model)
        self.sources = SourceLoss(sources)
        self.step = 0
        self.due = False
        self._gradients: list[TensorSums] = []
        self._activations: list[Activation] = []
        if every and self.compiled:
            log.info("The model is compiled, so its activations are not measured.")

    def truncate(self, step: int) -> None:
        """Drop the records after `step`, where the training continues. Call it on rank 0.

        Raises:
            UserError: the disk refuses, or the file is damaged.
        """
        jsonl_records.truncate_after(self.folder / FILE, step, "a record of statistics")

    def before_step(self, step: int) -> None:
        """Called before optimizer step `step`, counted from 1."""
        self.step = step
        self.due = bool(self.every) and step % self.every == 0
        self._gradients, self._activations = [], []

    @contextlib.contextmanager
    def forward(self, batch: Mapping[str, Tensor], last: bool, sources_B: Tensor | None = None) -> Iterator[None]:
        """Around a forward pass over `batch` and its loss, without its backward pass. Watches the `last` of a due step, on rank 0.

        sources_B: the number of the source of each sequence; None where nobody says.
        """
        hooked = self.due and last and not self.compiled and distributed.is_main()
        looking = activation_statistics.watch_activations(self.model, self._activations) if hooked else contextlib.nullcontext()
        counting = contextlib.nullcontext() if sources_B is None else self.sources.watch(batch["loss_mask"], sources_B)
        with counting, looking:
            yield

    def after_backward(self) -> None:
        """Called when the gradients are complete and unscaled, before clipping. Collective for sharded models."""
        if self.due:
            self._gradients = parameter_statistics.gradients(self.model)

    def after_step(self, optimizer: Any) -> None:
        """Called after the optimizer's step, while its groups still hold the step's learning rate. Collective for sharded models.

        Raises:
            RunError: the disk refuses.
        """
        if not self.due:
            return
        found = parameter_statistics.gather_sums(self._gradients + parameter_statistics.weights(self.model, optimizer), self.model)
        learning_rate = optimizer.param_groups[0]["lr"]
        distributed.broadcast_from_rank0(lambda: self._write(found, learning_rate))
        self._gradients, self._activations, self.due = [], [], False

    def row(self) -> dict[str, float]:
        """Loss and tokens by source since the last call. Collective."""
        return self.sources.row()

    def _write(self, found: Sequence[TensorSums], learning_rate: float) -> None:
        """One record for each tensor."""
        rates = parameter_statistics.update_rates(list(found), learning_rate)
        heads: list[dict[str, Any]] = [{"step": self.step, "name": item.name, "context": item.context} for item in found]
        heads += [{"step": self.step, "name": a.name, "type": a.type, "context": a.context} for a in self._activations]
        tables = [item.sums for item in found], [item.sums for item in self._activations]
        rows = [row for table in tables if table for row in tensor_statistics.rows(torch.stack(table))]
        for head, row in zip(heads, rows, strict=True):
            head |= row
            if head["context"] == parameter_statistics.UPDATE:
                head["update_rate"] = rates[head["name"]]
        jsonl_records.append(self.folder / FILE, heads, durable=False)
        bad = [head for head in heads if "nonfinite" in head]
        if bad:
            first = f"{bad[0]['name'] or 'the model'} {bad[0]['context']}"
            log.warning("step %d: %d of %d tensors are not finite, the first %s; see %s.", self.step, len(bad), len(heads), first, FILE)
