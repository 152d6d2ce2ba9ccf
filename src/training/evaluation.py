"""Mean token loss over a whole data set, shared between the processes."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from src import distributed
from src.errors import TrainingError

Loss = Callable[[nn.Module, Mapping[str, Tensor]], Tensor]


@torch.no_grad()
def mean_loss(model: nn.Module, dataset: Any, loss: Loss, batch_size: int, device: torch.device) -> float:
    """Loss per scored token, in nats, over every sample of `dataset` once. Collective: each rank reads every W-th batch.

    Raises:
        TrainingError: the data set scores no token.
    """
    loss_sum, tokens = 0.0, 0
    for indices in share(len(dataset), batch_size):
        batch = to_device(dataset.collate([dataset.sample(0, i) for i in indices]), device)
        loss_sum += float(loss(model, batch))
        tokens += int(batch["loss_mask"].sum())
    loss_sum, tokens = distributed.total([loss_sum, tokens])
    if not tokens:
        raise TrainingError("the evaluation data score no token: nothing to take a mean loss of.")
    return loss_sum / tokens


def share(num_samples: int, batch_size: int) -> list[range]:
    """The batches of indices that this process evaluates; over all processes each index comes once."""
    batches = [range(i, min(i + batch_size, num_samples)) for i in range(0, num_samples, batch_size)]
    return batches[distributed.rank() :: distributed.world_size()]


def to_device(batch: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """The batch with every tensor on `device`."""
    return {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}
