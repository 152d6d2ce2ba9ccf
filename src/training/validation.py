"""Mean token loss over a whole data set, computed by all processes together."""

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from src.errors import TrainingError
from src.experiments.batches import to_device
from src.experiments.dataset_protocols import Dataset
from src.support import distributed
from src.training.loss import NOT_LEARNED, Loss, watch_cross_entropy, watch_groups


class LossSums(NamedTuple):
    """Sums over scored tokens."""

    loss_sum: float
    """Nats."""
    tokens: int
    correct: int
    """Tokens whose target has the highest logit; 0 unless accuracy was requested."""
    denominator: float
    """What `loss_sum` is divided by: the tokens, where nothing else was said."""
    named: Mapping[str, tuple[float, float]] = {}
    """Sum and count of what the loss reports beside itself, by name."""

    @property
    def loss(self) -> float:
        """Per token, or what else was counted."""
        return self.loss_sum / self.denominator

    @property
    def accuracy(self) -> float:
        """Share of the tokens."""
        return self.correct / self.tokens

    @property
    def means(self) -> dict[str, float]:
        """Of what the loss reports, by name; not those that counted nothing."""
        return {name: value / count for name, (value, count) in self.named.items() if count}

    @classmethod
    def total(cls, parts: "Iterable[LossSums]") -> "LossSums":
        """The sums over all parts."""
        found = list(parts)
        named = {
            name: tuple(map(sum, zip(*(part.named[name] for part in found), strict=True))) for name in found[0].named
        }
        return cls(*map(sum, zip(*(part[:4] for part in found), strict=True)), named)  # type: ignore[arg-type]


def count_true(batches: Sequence[Mapping[str, Tensor]], mask: str) -> int:
    """True entries of a mask, of the batches that have it."""
    return sum(int(batch[mask].sum()) for batch in batches if mask in batch)


def count_loss_tokens(batch: Mapping[str, Tensor]) -> int:
    """True entries of the loss mask."""
    return count_true([batch], "loss_mask")


Count = Callable[[Mapping[str, Tensor]], float]
"""What the summed loss of a batch is divided by, as `TrainSpec.count`."""


def mean_loss(
    model: nn.Module,
    dataset: Dataset,
    loss: Loss,
    batch_size: int,
    device: torch.device,
    count: Count = count_loss_tokens,
) -> float:
    """Loss per scored token, in nats, or per what `count` counts; see `measure`."""
    return measure(model, dataset, loss, batch_size, device, count=count).loss


@torch.no_grad()
def measure(  # noqa: PLR0913  each is named where it is not plain
    model: nn.Module,
    dataset: Dataset,
    loss: Loss,
    batch_size: int,
    device: torch.device,
    accuracy: bool = False,
    *,
    count: Count = count_loss_tokens,
) -> LossSums:
    """Summed loss over every sample of `dataset`. Collective: each rank reads every W-th batch.

    Raises:
        distributed.StopTraining: a process was asked to stop meanwhile.
        TrainingError: the data set scores no token, or `count` finds nothing.
    """
    loss_sum, tokens, correct, counted, named = 0.0, 0, 0, 0.0, dict[str, list[float]]()

    def count_correct(logits_NV: Tensor, targets_N: Tensor) -> None:
        nonlocal correct
        correct += counts * int((logits_NV.argmax(dim=-1) == targets_N).sum())  # NOT_LEARNED equals no token id

    with watch_cross_entropy(count_correct) if accuracy else contextlib.nullcontext():
        for indices, counts in rank_batches(len(dataset), batch_size):
            distributed.stop_together()
            batch = to_device(dataset.collate([dataset.sample(0, i) for i in indices]), device)
            found = loss(model, batch)
            value, own = found if isinstance(found, tuple) else (found, {})
            sums = {name: [float(each) * counts for each in pair] for name, pair in own.items()}
            named = {
                name: [a + b for a, b in zip(named.get(name, (0.0, 0.0)), pair, strict=True)]
                for name, pair in sums.items()
            }
            if counts:
                loss_sum += float(value)
                tokens += count_loss_tokens(batch)
                counted += count(batch)
    flat = [value for pair in named.values() for value in pair]
    loss_sum, tokens, correct, counted, *flat = distributed.all_reduce_sum([loss_sum, tokens, correct, counted, *flat])
    if counted <= 0:
        raise TrainingError("the evaluation data score no token: nothing to take a mean loss of.")
    pairs = zip(flat[::2], flat[1::2], strict=True)
    return LossSums(loss_sum, int(tokens), int(correct), counted, dict(zip(named, pairs, strict=True)))


@torch.no_grad()
def sample_losses(
    model: nn.Module, dataset: Dataset, loss: Loss, batch_size: int, device: torch.device
) -> list[tuple[float, int]]:
    """(summed loss in nats, tokens) of every sample of `dataset`, in order, on every rank. Collective.

    For losses that are cross entropies over tokens (`training.loss`). See `measure` for what is raised.
    """
    found: list[tuple[int, float, int]] = []
    for indices, counts in rank_batches(len(dataset), batch_size):
        distributed.stop_together()
        batch = to_device(dataset.collate([dataset.sample(0, i) for i in indices]), device)
        with watch_groups(batch, torch.arange(len(indices), device=device), len(indices)) as sums:
            loss(model, batch)
        if counts:
            found += [(i, nats, int(tokens)) for i, (nats, tokens) in zip(indices, sums.tolist(), strict=True)]
    return [(nats, tokens) for _, nats, tokens in sorted(distributed.all_gather_list(found))]


@torch.no_grad()
def token_losses(
    model: nn.Module, dataset: Dataset, loss: Loss, batch_size: int, device: torch.device, never: Sequence[int] = ()
) -> list[list[float]]:
    """Cross entropy in nats of each scored token of every sample of `dataset`, in order, on every rank. Collective.

    never: ids of tokens that are taken to have no probability. See `measure` for what is raised.
    """
    found: list[tuple[int, list[float]]] = []
    losses = torch.empty(0)

    def measure_tokens(logits_NV: Tensor, targets_N: Tensor) -> None:
        nonlocal losses
        learned = targets_N != NOT_LEARNED
        logits = logits_NV[learned].float()
        logits[:, list(never)] = float("-inf")
        losses = F.cross_entropy(logits, targets_N[learned], reduction="none")

    with watch_cross_entropy(measure_tokens):
        for indices, counts in rank_batches(len(dataset), batch_size):
            distributed.stop_together()
            batch = to_device(dataset.collate([dataset.sample(0, i) for i in indices]), device)
            loss(model, batch)
            if counts:
                per_sample = losses.cpu().split(batch["loss_mask"].sum(dim=1).tolist())
                found += [(i, sample.tolist()) for i, sample in zip(indices, per_sample, strict=True)]
    return [values for _, values in sorted(distributed.all_gather_list(found))]


def rank_batches(num_samples: int, batch_size: int) -> list[tuple[range, bool]]:
    """Batches of indices for this process, and whether each counts; over all processes each index counts once.

    All processes get the same number, as a forward pass of a sharded model needs all of them. Padding batches keep
    ranks in step and are not scored.
    """
    batches = [range(i, min(i + batch_size, num_samples)) for i in range(0, num_samples, batch_size)]
    shares = distributed.world_size()
    found = [(batch, True) for batch in batches[distributed.rank() :: shares]]
    return found + [(batches[0], False)] * (-(-len(batches) // shares) - len(found))
