"""Token losses as sums, so that they can be normalised by the tokens of the whole global batch."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from src.errors import TrainingError
from src.support import distributed
from src.training.parallel.linear_cross_entropy import sum_loss, takes_chunks

NOT_LEARNED = -100
NamedSums = Mapping[str, tuple[Tensor, Tensor]]
"""Sum and count of what is reported as a mean, by name: the same names in every call."""
Loss = Callable[[nn.Module, Mapping[str, Tensor]], Tensor | tuple[Tensor, NamedSums]]
"""(model, batch) -> summed loss, to divide by `TrainSpec.count` over the global batch, and sums to report if any."""
DEPTH_MASKS = {
    "attention_mask": "encoder_mask",
    "decoder_attention_mask": "decoder_mask",
    "cross_attention_mask": "cross_mask",
}
"""Keywords of a model that src.systems.t5.model.config builds, and fields of a DepthBatch."""
Seen = Callable[[Tensor, Tensor], None]
"""Called with logits (N, V) and targets (N,), all of a batch or chunks of them in order."""
_watching: list[Seen] = []
_ROW = {"", "step", "train_loss", "grad_norm", "clip_rate", "skipped_steps", "learning_rate", "tokens"}
"""Reserved names for the sums of a loss: those of a score row, and "", the loss itself."""


class SumNames:
    """Checks the names of a loss's sums: the same in every pass of every rank, and none of a score."""

    def __init__(self, reserved: Iterable[str]) -> None:
        self._reserved = _ROW | set(reserved)
        self._names: list[str] | None = None

    def check(self, names: list[str]) -> None:
        """Collective in the first call.

        Raises:
            TrainingError: a name is reserved, or the names are not those of rank 0's first pass.
        """
        first = self._names is None
        if first:
            self._names = distributed.broadcast_from_rank0(lambda: names)
        with distributed.raise_together() if first else contextlib.nullcontext():
            for name in names if first else ():
                if name in self._reserved or name.startswith(("val_", "data/")):
                    raise TrainingError(f"the loss names a sum {name!r}, which is the name of a score. Rename it.")
            if names != self._names:
                raise TrainingError(
                    f"the loss names the sums {names} here, and {self._names} in the first pass of rank 0. Use "
                    "the same names in the same order in every pass of every rank, with count 0 if there is nothing."
                )


@contextlib.contextmanager
def watch_cross_entropy(seen: Seen) -> Iterator[None]:
    """Within the block, call `seen` with the logits and targets of every cross entropy. A backward pass belongs behind
    the block: it makes the logits of chunks again."""
    _watching.append(seen)
    try:
        yield
    finally:
        _watching.remove(seen)


@contextlib.contextmanager
def watch_groups(batch: Mapping[str, Tensor], groups_B: Tensor, num_groups: int) -> Iterator[Tensor]:
    """Within the block, add each cross entropy of `batch` to the yielded (num_groups, 2) float64:
    loss in nats, tokens, by group.

    groups_B: the group of each sample, or (B, T) of each token. Losses are without label smoothing; infinite ones are
    left out.
    """
    mask_NT = batch["loss_mask"]
    groups_N = groups_B[batch["sample_of_row"]] if "sample_of_row" in batch else groups_B
    groups = (groups_N if groups_N.dim() == 2 else groups_N[:, None].expand_as(mask_NT))[mask_NT]
    sums = torch.zeros(num_groups, 2, dtype=torch.float64, device=mask_NT.device)
    place = 0

    @torch.no_grad()
    def add(logits_NV: Tensor, targets_N: Tensor) -> None:
        nonlocal place
        is_learned = targets_N != NOT_LEARNED
        if not takes_chunks():  # how many are learned is known, so nothing waits for a GPU
            is_learned = is_learned.nonzero_static(size=len(groups), fill_value=len(is_learned))[:, 0]
        losses = F.cross_entropy(logits_NV[is_learned].float(), targets_N[is_learned], reduction="none").double()
        finite = losses.isfinite()
        here = groups[place : place + len(losses)]
        place = (place + len(losses)) % max(1, len(groups))
        sums.index_add_(0, here, torch.stack([losses.where(finite, 0.0), finite.double()], dim=1))

    with watch_cross_entropy(add):
        yield sums


def cross_entropy(
    logits_NV: Tensor, targets_N: Tensor, label_smoothing: float = 0.0, z_loss: float = 0.0, poly_epsilon: float = 0.0
) -> Tensor:
    """Sum over N targets of cross entropy in nats, float32, with uniform smoothing (Szegedy et al. 2016, section 7).

    z_loss: weight of the squared logarithm of the softmax's denominator, which keeps the logits near 0 (PaLM, Chowdhery
    et al. 2022, section 5). poly_epsilon: weight of 1 - p of each target, where p is its probability: Poly-1 of Leng et
    al. 2022 (arXiv 2204.12511). Targets that are `NOT_LEARNED` count nothing.
    """
    for seen in _watching:
        seen(logits_NV.detach(), targets_N)
    logits_NV = logits_NV.float()
    loss = F.cross_entropy(
        logits_NV, targets_N, reduction="sum", ignore_index=NOT_LEARNED, label_smoothing=label_smoothing
    )
    if z_loss:
        log_z_N = logits_NV.logsumexp(dim=-1).where(targets_N != NOT_LEARNED, 0.0)
        loss = loss + z_loss * log_z_N.square().sum()
    if poly_epsilon:
        p_N = (-F.cross_entropy(logits_NV, targets_N, reduction="none", ignore_index=NOT_LEARNED)).exp()
        loss = loss + poly_epsilon * (1 - p_N).sum()  # p is 1 where nothing is learned
    return loss


def context_lm_loss(
    model: nn.Module, batch: Mapping[str, Tensor], label_smoothing: float = 0.0, z_loss: float = 0.0
) -> Tensor:
    """Summed loss where `loss_mask` is True, of a model that reads contexts and gives logits only for these tokens."""
    targets_N = batch["input_ids"][batch["loss_mask"]]
    return sum_loss(
        model,
        lambda: model(**batch),
        lambda logits, targets: cross_entropy(logits, targets, label_smoothing, z_loss),
        targets_N,
    )


def causal_lm_loss(
    model: nn.Module,
    batch: Mapping[str, Tensor],
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    poly_epsilon: float = 0.0,
) -> Tensor:
    """Summed next-token loss of a Hugging Face causal LM on the tokens where `loss_mask` is True;
    never so for the first of a sequence.

    The model gets the `position_ids` of a PackedBatch instead of an attention mask: with both, documents would read
    each other. Logits are not picked by the mask, which would copy them and their gradient, and have a GPU wait for the
    count.
    """
    packed = "position_ids" in batch
    inputs = {"position_ids": batch["position_ids"]} if packed else {"attention_mask": batch["attention_mask"].long()}
    targets_BT = torch.where(batch["loss_mask"], batch["input_ids"], NOT_LEARNED)
    targets_BT = F.pad(targets_BT[:, 1:], (0, 1), value=NOT_LEARNED)
    return sum_loss(
        model,
        lambda: model(input_ids=batch["input_ids"], **inputs, use_cache=False).logits,
        lambda logits, targets: cross_entropy(logits, targets, label_smoothing, z_loss, poly_epsilon),
        targets_BT.flatten(),
    )


def interleaved_lm_loss(
    model: nn.Module, batch: Mapping[str, Tensor], label_smoothing: float = 0.0, z_loss: float = 0.0
) -> Tensor:
    """Summed next-token loss of a model that reads images, on an InterleavedBatch;
    each token's times its weight where there are some.

    A batch without an image reads one frame that nobody sees: see `systems.interleaved.model.config`.
    """
    frames = batch["frames"]
    frames = (frames if len(frames) else frames.new_ones(1, *frames.shape[1:]))[None]
    inputs = {"input_ids": batch["input_ids"], "position_ids": batch["position_ids"], "pixel_values": frames}
    targets_BT = F.pad(
        torch.where(batch["loss_mask"], batch["input_ids"], NOT_LEARNED)[:, 1:], (0, 1), value=NOT_LEARNED
    )
    weights = [F.pad(batch["loss_weights"][:, 1:], (0, 1), value=1.0).flatten()] if "loss_weights" in batch else []
    return sum_loss(
        model,
        lambda: model(**inputs, use_cache=False).logits,
        lambda *chunk: _weighted_cross_entropy(*chunk, label_smoothing=label_smoothing, z_loss=z_loss),
        targets_BT.flatten(),
        *weights,
    )


def _weighted_cross_entropy(
    logits_NV: Tensor, targets_N: Tensor, weights_N: Tensor | None = None, *, label_smoothing: float, z_loss: float
) -> Tensor:
    """`cross_entropy`, of each target times its weight; the z-loss is of all alike."""
    loss = cross_entropy(logits_NV, targets_N, label_smoothing, z_loss)
    if weights_N is None:
        return loss
    each_N = F.cross_entropy(
        logits_NV.float(), targets_N, reduction="none", ignore_index=NOT_LEARNED, label_smoothing=label_smoothing
    )
    return loss + ((weights_N - 1) * each_N).sum()


def seq2seq_loss(
    model: nn.Module, batch: Mapping[str, Tensor], label_smoothing: float = 0.0, z_loss: float = 0.0
) -> Tensor:
    """Summed loss of a Hugging Face encoder-decoder on the `labels` of a Seq2SeqBatch that are learned."""
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask", "decoder_input_ids")}
    return sum_loss(
        model,
        lambda: model(**inputs, use_cache=False).logits,
        lambda logits, targets: cross_entropy(logits, targets, label_smoothing, z_loss),
        batch["labels"].flatten(),
    )


def depth_loss(
    model: nn.Module, batch: Mapping[str, Tensor], label_smoothing: float = 0.0, z_loss: float = 0.0
) -> Tensor:
    """Summed loss of a T5 on the learned `labels` of a DepthBatch, each times its weight if there are `loss_weights`.

    It is the reconstruction loss plus lambda times the sentence loss of Bamberger et al. 2024 (arXiv 2405.07788), each
    as a sum over
    its tokens: their means over a micro-batch would depend on the micro-batch.
    """
    masks = {name: batch[field][:, None] for name, field in DEPTH_MASKS.items()}
    inputs = {name: batch[name] for name in ("input_ids", "decoder_input_ids")}
    return sum_loss(
        model,
        lambda: model(**inputs, **masks, use_cache=False).logits,
        lambda *chunk: _weighted_cross_entropy(*chunk, label_smoothing=label_smoothing, z_loss=z_loss),
        batch["labels"].flatten(),
        *([batch["loss_weights"].flatten()] if "loss_weights" in batch else []),
    )
