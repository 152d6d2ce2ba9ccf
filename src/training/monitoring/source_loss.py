"""The loss by source, for data sets that name the sources of their samples.

Sums stay on the device, so that a step waits for nothing; `row` joins them over processes.
"""

import contextlib
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from src import distributed
from src.training import loss


class SourceLoss:
    """Loss and tokens by source, since the last `row`. names: of all sources, by number."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names
        self._sums: Tensor | None = None  # (sources, 2) float64: loss, tokens

    @torch.no_grad()
    def count(self, logits_NV: Tensor, targets_N: Tensor, sources_N: Tensor) -> None:
        """Count the cross entropy of N tokens in nats, without smoothing."""
        if self._sums is None:
            self._sums = torch.zeros(len(self.names), 2, dtype=torch.float64, device=logits_NV.device)
        losses = F.cross_entropy(logits_NV.float(), targets_N, reduction="none").double()
        finite = losses.isfinite()  # as in the loss of the training
        self._sums.index_add_(0, sources_N, torch.stack([losses.where(finite, 0.0), finite.double()], dim=1))

    @contextlib.contextmanager
    def watch(self, loss_mask_BT: Tensor, sources_B: Tensor) -> Iterator[None]:
        """Within the block, count the tokens of every loss: a micro-batch whose sequence b comes from source `sources_B[b]`."""
        sources_N = sources_B[:, None].expand_as(loss_mask_BT)[loss_mask_BT]

        def count(logits_NV: Tensor, targets_N: Tensor) -> None:
            learned = targets_N != loss.NOT_LEARNED
            self.count(logits_NV[learned], targets_N[learned], sources_N)

        with loss.watch_cross_entropy(count):
            yield

    def row(self) -> dict[str, float]:
        """{"loss/<source>": mean, "loss_tokens/<source>": count} over all processes; resets them. Collective, also without sources."""
        mine = self._sums.tolist() if self._sums is not None else []
        self._sums = None
        sums: dict[int, list[float]] = {}
        for number, (total, tokens) in distributed.all_gather_list(list(enumerate(mine))):
            entry = sums.setdefault(number, [0.0, 0.0])
            entry[0] += total
            entry[1] += tokens
        row: dict[str, float] = {}
        for number, (total, tokens) in sorted(sums.items()):
            if tokens:
                row |= {f"loss/{self.names[number]}": total / tokens, f"loss_tokens/{self.names[number]}": tokens}
        return row
