"""Token losses as sums, to be normalized by the number of tokens of the global batch."""

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
"""Sum and count of each reported mean, by name, with the same names in every call."""
Loss = Callable[[nn.Module, Mapping[str, Tensor]], Tensor | tuple[Tensor, NamedSums]]
"""(model, batch) -> summed loss, to be divided by `TrainSpec.count` of the global batch, and optional sums to
report."""
DEPTH_MASKS = {
    "attention_mask": "encoder_mask",
    "decoder_attention_mask": "decoder_mask",
    "cross_attention_mask": "cross_mask",
}
"""Keyword of a model from src.systems.t5.model.config -> field of a DepthBatch."""
Seen = Callable[[Tensor, Tensor], None]
"""Called with logits (N, V) and targets (N,) of a batch, or of its chunks in order."""
_watching: list[Seen] = []
_ROW = {"", "step", "train_loss", "grad_norm", "clip_rate", "skipped_steps", "learning_rate", "tokens"}
"""Reserved names of sums: columns of a score row, and "", the loss itself."""


class SumNames:
    """Checks that the names of a loss's sums are equal in every pass of every rank, and not names of scores."""

    def __init__(self, reserved: Iterable[str]) -> None:
        self._reserved = _ROW | set(reserved)
        self._names: list[str] | None = None

    def check(self, names: list[str]) -> None:
        """Check the names of one pass. Collective in the first call.

        Raises:
            TrainingError: a name is reserved, or the names differ from those of rank 0's first pass.
        """
        first = self._names is None
        if first:
            self._names = distributed.broadcast_from_rank0(lambda: names)
        with distributed.raise_together() if first else contextlib.nullcontext():
            for name in names if first else ():
                if name in self._reserved or name.startswith(("val_", "data/", "learning_rate/")):
                    raise TrainingError(f"sum {name!r} of the loss has the name of a score. Rename it.")
            if names != self._names:
                raise TrainingError(
                    f"the sums of the loss are {names} here, but {self._names} in the first pass of rank 0. Use "
                    "the same names in the same order in every pass of every rank, with count 0 for missing values."
                )


@contextlib.contextmanager
def watch_cross_entropy(seen: Seen) -> Iterator[None]:
    """Within the block, call `seen` with the logits and targets of every cross entropy. Run the backward pass after the
    block, as it recomputes the logits of chunks."""
    _watching.append(seen)
    try:
        yield
    finally:
        _watching.remove(seen)


@contextlib.contextmanager
def watch_groups(batch: Mapping[str, Tensor], groups_B: Tensor, num_groups: int) -> Iterator[Tensor]:
    """Within the block, add each cross entropy of `batch` to the yielded (num_groups, 2) float64: loss in nats and
    tokens by group.

    groups_B: the group of each sample, or (B, T) of each token. Losses are without label smoothing; infinite losses are
    omitted.
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
        if not takes_chunks():  # the number of learned tokens is known, so a GPU does not synchronize
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
    """Sum of the cross entropy of N targets in nats, float32, with uniform label smoothing (Szegedy et al. 2016,
    section 7).

    z_loss: weight of the squared log of the softmax denominator, which holds logits near 0 (PaLM, Chowdhery et al.
    2022, section 5). poly_epsilon: weight of 1 - p of each target with probability p (Poly-1, Leng et al. 2022, arXiv
    2204.12511). `NOT_LEARNED` targets are ignored.
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
        loss = loss + poly_epsilon * (1 - p_N).sum()  # p is 1 for ignored targets
    return loss


def context_lm_loss(
    model: nn.Module, batch: Mapping[str, Tensor], label_smoothing: float = 0.0, z_loss: float = 0.0
) -> Tensor:
    """Summed loss of a model that reads contexts and returns logits only where `loss_mask` is True."""
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
    """Summed next-token loss of a Hugging Face causal LM on the tokens where `loss_mask` is True, except first tokens.

    The model gets the `position_ids` of a PackedBatch instead of an attention mask: with both, documents would attend
    to each other. Logits are not indexed by the mask, which would copy them and their gradient, and synchronize a GPU.
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
    """Summed next-token loss of a model that reads images, on an InterleavedBatch, weighted by `loss_weights` if any.

    A batch without images gets one unused frame; see `systems.interleaved.model.config`.
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
    """`cross_entropy` weighted per target; the z-loss is not weighted."""
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
    """Summed loss of a Hugging Face encoder-decoder on the learned `labels` of a Seq2SeqBatch."""
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
    """Summed loss of a T5 on the learned `labels` of a DepthBatch, weighted by `loss_weights` if any.

    The reconstruction loss plus lambda times the sentence loss of Bamberger et al. 2024 (arXiv 2405.07788). Both are
    sums over tokens, as means would depend on the micro-batch.
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
