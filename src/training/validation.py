"""Mean token loss over a data set, computed by all processes."""

import contextlib
import math
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
    """Sum of losses in nats."""
    tokens: int
    correct: int
    """Tokens with the highest logit at the target; 0 unless accuracy was requested."""
    denominator: float
    """Divisor of `loss_sum`: the number of tokens by default."""
    text_bytes: int = 0
    """Bytes of the text of the scored tokens; 0 unless requested."""
    named_sums: Mapping[str, tuple[float, float]] = {}
    """Sum and count of further reported means, by name."""

    @property
    def loss(self) -> float:
        """Mean loss per token, or per unit of `denominator`."""
        return self.loss_sum / self.denominator

    @property
    def bits_per_byte(self) -> float:
        """Summed loss in bits per byte of text, which does not depend on the tokenizer."""
        return self.loss_sum / math.log(2) / self.text_bytes

    @property
    def accuracy(self) -> float:
        """Share of correct tokens."""
        return self.correct / self.tokens

    @property
    def means(self) -> dict[str, float]:
        """Means of the named sums, by name, without those with count 0."""
        return {name: value / count for name, (value, count) in self.named_sums.items() if count}

    @classmethod
    def total(cls, parts: "Iterable[LossSums]") -> "LossSums":
        """Sum over all parts."""
        all_parts = list(parts)
        named_sums = {
            name: tuple(map(sum, zip(*(part.named_sums[name] for part in all_parts), strict=True)))
            for name in all_parts[0].named_sums
        }
        return cls(*map(sum, zip(*(part[:5] for part in all_parts), strict=True)), named_sums)  # type: ignore[arg-type]


def count_true(batches: Sequence[Mapping[str, Tensor]], mask: str) -> int:
    """Count the True entries of a mask, over the batches that have it."""
    return sum(int(batch[mask].sum()) for batch in batches if mask in batch)


def count_loss_tokens(batch: Mapping[str, Tensor]) -> int:
    """Count the True entries of the loss mask."""
    return count_true([batch], "loss_mask")


Count = Callable[[Mapping[str, Tensor]], float]
"""Divisor of the summed loss of a batch; see `TrainSpec.count`."""


class SampleSums(NamedTuple):
    """Sums over the scored tokens of one sample."""

    number: int
    nats: float
    """Cross entropy."""
    tokens: int
    text_bytes: int
    """Bytes of the text of the tokens; 0 if unknown."""


@torch.no_grad()
def measure(  # noqa: PLR0913  call sites pass the optional ones by name
    model: nn.Module,
    dataset: Dataset,
    loss: Loss,
    batch_size: int,
    device: torch.device,
    accuracy: bool = False,
    *,
    count: Count = count_loss_tokens,
    token_bytes: Tensor | None = None,
    samples: list[SampleSums] | None = None,
) -> LossSums:
    """Sum the loss over all samples of `dataset`. Collective: each rank reads every W-th batch.

    token_bytes: (V,) int64, bytes of text by token id, to sum as `text_bytes`. samples: receives the sums of each
    sample on every rank, in order; for losses that are cross entropies over tokens.

    Raises:
        distributed.StopTraining: a process received a stop signal.
        TrainingError: the data set has no scored tokens, or the sum of `count` is not positive.
    """
    loss_sum, tokens, correct, denominator, named_sums = 0.0, 0, 0, 0.0, dict[str, list[float]]()
    text_bytes, local_samples = 0, list[SampleSums]()

    def count_correct(logits_NV: Tensor, targets_N: Tensor) -> None:
        nonlocal correct
        correct += counts * int((logits_NV.argmax(dim=-1) == targets_N).sum())  # NOT_LEARNED equals no token id

    with watch_cross_entropy(count_correct) if accuracy else contextlib.nullcontext():
        for indices, counts in rank_batches(len(dataset), batch_size):
            distributed.stop_together()
            batch = to_device(dataset.collate([dataset.sample(0, i) for i in indices]), device)
            groups = torch.arange(len(indices), device=device)
            by_sample = contextlib.nullcontext() if samples is None else watch_groups(batch, groups, len(indices))
            with by_sample as sums_B2:
                result = loss(model, batch)
            value, batch_sums = result if isinstance(result, tuple) else (result, {})
            sums = {name: [float(each) * counts for each in pair] for name, pair in batch_sums.items()}
            named_sums = {
                name: [a + b for a, b in zip(named_sums.get(name, (0.0, 0.0)), pair, strict=True)]
                for name, pair in sums.items()
            }
            if counts:
                loss_sum += float(value)
                tokens += count_loss_tokens(batch)
                denominator += count(batch)
                bytes_B = [0] * len(indices)
                if token_bytes is not None:
                    bytes_B = (token_bytes[batch["input_ids"]] * batch["loss_mask"]).sum(dim=1).tolist()
                    text_bytes += sum(bytes_B)
                if sums_B2 is not None:
                    rows = zip(indices, sums_B2.tolist(), bytes_B, strict=True)
                    local_samples += [SampleSums(i, nats, int(number), size) for i, (nats, number), size in rows]
    flat = [value for pair in named_sums.values() for value in pair]
    loss_sum, tokens, correct, denominator, text_bytes, *flat = distributed.all_reduce_sum(
        [loss_sum, tokens, correct, denominator, text_bytes, *flat]
    )
    if samples is not None:
        samples += sorted(distributed.all_gather_list(local_samples))
    if denominator <= 0:
        raise TrainingError("the evaluation data have no scored tokens. Use other data.")
    pairs = zip(flat[::2], flat[1::2], strict=True)
    sums = dict(zip(named_sums, pairs, strict=True))
    return LossSums(loss_sum, int(tokens), int(correct), denominator, int(text_bytes), sums)


@torch.no_grad()
def token_losses(
    model: nn.Module, dataset: Dataset, loss: Loss, batch_size: int, device: torch.device, never: Sequence[int] = ()
) -> list[list[float]]:
    """Cross entropy in nats of each scored token of every sample of `dataset`, in order, on every rank. Collective.

    never: ids of tokens with probability zero. Raises: see `measure`.
    """
    all_losses: list[tuple[int, list[float]]] = []
    losses = torch.empty(0)

    def measure_tokens(logits_NV: Tensor, targets_N: Tensor) -> None:
        nonlocal losses
        is_learned = targets_N != NOT_LEARNED
        logits = logits_NV[is_learned].float()
        logits[:, list(never)] = float("-inf")
        losses = F.cross_entropy(logits, targets_N[is_learned], reduction="none")

    with watch_cross_entropy(measure_tokens):
        for indices, counts in rank_batches(len(dataset), batch_size):
            distributed.stop_together()
            batch = to_device(dataset.collate([dataset.sample(0, i) for i in indices]), device)
            loss(model, batch)
            if counts:
                per_sample = losses.cpu().split(batch["loss_mask"].sum(dim=1).tolist())
                all_losses += [(i, sample.tolist()) for i, sample in zip(indices, per_sample, strict=True)]
    return [values for _, values in sorted(distributed.all_gather_list(all_losses))]


def rank_batches(num_samples: int, batch_size: int) -> list[tuple[range, bool]]:
    """Batches of indices for this process, and whether each batch counts. Each index counts once over all processes.

    All processes get the same number of batches, as a forward pass of a sharded model is collective. Padding batches
    are not scored.
    """
    batches = [range(i, min(i + batch_size, num_samples)) for i in range(0, num_samples, batch_size)]
    shares = distributed.world_size()
    local_batches = [(batch, True) for batch in batches[distributed.rank() :: shares]]
    return local_batches + [(batches[0], False)] * (-(-len(batches) // shares) - len(local_batches))
