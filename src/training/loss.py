"""Token losses as sums, so that they can be normalised by the tokens of the whole global batch."""

from collections.abc import Mapping

import torch.nn.functional as F
from torch import Tensor, nn


def cross_entropy(logits_NV: Tensor, targets_N: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """Sum over N targets of the cross entropy in nats, in float32, with the uniform smoothing of Szegedy et al. 2016 (section 7)."""
    return F.cross_entropy(logits_NV.float(), targets_N, reduction="sum", label_smoothing=label_smoothing)


def causal_lm_loss(model: nn.Module, batch: Mapping[str, Tensor], label_smoothing: float = 0.0) -> Tensor:
    """Summed next-token loss of a Hugging Face causal LM on the tokens where `loss_mask` is True."""
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"].long(), use_cache=False).logits
    mask = batch["loss_mask"]
    return cross_entropy(logits[:, :-1][mask[:, 1:]], batch["input_ids"][mask], label_smoothing)
