"""The loss of DEPTH: of masked words and of the order of sentences, under masks that say who sees whom."""

from collections.abc import Mapping

import torch.nn.functional as F
from torch import Tensor, nn

from src.training.loss import NOT_LEARNED, cross_entropy

MASKS = {"attention_mask": "encoder_mask", "decoder_attention_mask": "decoder_mask", "cross_attention_mask": "cross_mask"}
"""Keywords of a model that src.models.t5.config builds, and fields of a DepthBatch."""


def depth_loss(model: nn.Module, batch: Mapping[str, Tensor], label_smoothing: float = 0.0, z_loss: float = 0.0) -> Tensor:
    """Summed loss of a T5 on the `labels` of a DepthBatch that are learned, each times its weight where there are `loss_weights`.

    It is the reconstruction loss plus lambda times the sentence loss of Bamberger et al. 2024 (arXiv 2405.07788), each as a sum over
    its tokens: their means over a micro-batch would depend on the micro-batch.
    """
    masks = {name: batch[field][:, None] for name, field in MASKS.items()}
    inputs = {name: batch[name] for name in ("input_ids", "decoder_input_ids")}
    logits_NV = model(**inputs, **masks, use_cache=False).logits.flatten(0, 1)
    targets_N = batch["labels"].flatten()
    loss = cross_entropy(logits_NV, targets_N, label_smoothing, z_loss)
    if "loss_weights" not in batch:
        return loss
    each_N = F.cross_entropy(logits_NV.float(), targets_N, reduction="none", ignore_index=NOT_LEARNED, label_smoothing=label_smoothing)
    return loss + ((batch["loss_weights"].flatten() - 1) * each_N).sum()
