"""The loss of each source of a mixture, where batches say what they are from.

Sums stay on the device, so that a step waits for nothing; `row` joins them over processes.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from src import distributed

SOURCE = "source"
"""Entry of a batch: the number of the source, int64, (B,) for whole sequences or (B, T) for each token."""


class PerSource:
    """Loss and tokens by source, since the last `row`.

    names: of all sources, by number; without them a source is called by its number, and each batch waits for the device to say how
    many there are.
    """

    def __init__(self, names: Sequence[str] = ()) -> None:
        self.names = names
        self._sums: Tensor | None = None  # (sources, 2) float64: loss, tokens

    def add(self, losses_N: Tensor, sources_N: Tensor) -> None:
        """Count N tokens with their losses in nats."""
        if not len(sources_N):
            return
        most = len(self.names) or int(sources_N.max()) + 1
        if self._sums is None:
            self._sums = torch.zeros(most, 2, dtype=torch.float64, device=losses_N.device)
        if most > len(self._sums):
            self._sums = F.pad(self._sums, (0, 0, 0, most - len(self._sums)))
        losses = losses_N.detach().double()
        self._sums.index_add_(0, sources_N, torch.stack([losses, torch.ones_like(losses)], dim=1))

    @torch.no_grad()
    def count(self, logits_BTV: Tensor, batch: Mapping[str, Tensor]) -> None:
        """Count the tokens where `loss_mask` is True, by the `source` of the batch, with the cross entropy without smoothing."""
        mask, source = batch["loss_mask"], batch[SOURCE]
        if source.ndim == 1:
            source = source[:, None].expand_as(mask)
        logits_NV = logits_BTV.detach()[:, :-1][mask[:, 1:]].float()
        self.add(F.cross_entropy(logits_NV, batch["input_ids"][mask], reduction="none"), source[mask])

    @contextlib.contextmanager
    def watched(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Iterator[None]:
        """Count the logits that `model` gives within the block, if the batch says its sources."""
        if SOURCE not in batch:
            yield
            return

        def hook(_: nn.Module, __: Any, output: Any) -> None:
            self.count(output.logits, batch)

        handle = model.register_forward_hook(hook)
        try:
            yield
        finally:
            handle.remove()

    def row(self) -> dict[str, float]:
        """{"loss/<source>": mean, "loss_tokens/<source>": count} over all processes, and begin anew. Collective, also without a source."""
        mine = self._sums.tolist() if self._sums is not None else []
        self._sums = None
        sums: dict[int, list[float]] = {}
        for number, (loss, tokens) in distributed.gathered(list(enumerate(mine))):
            entry = sums.setdefault(number, [0.0, 0.0])
            entry[0] += loss
            entry[1] += tokens
        row: dict[str, float] = {}
        for number, (loss, tokens) in sorted(sums.items()):
            if tokens:
                name = self.names[number] if number < len(self.names) else str(number)
                row |= {f"loss/{name}": loss / tokens, f"loss_tokens/{name}": tokens}
        return row
