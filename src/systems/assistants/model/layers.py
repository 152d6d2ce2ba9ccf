"""A reward model: one number per sequence, from the last hidden states of a decoder.

Shapes: B sequences, T tokens of the longest, D hidden size.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from src.models.wrapper import Wrapper
from src.support.flops import FROZEN, TRAINED, Adapters, adapter_weights, decoder_stack

_HEAD_STD = 0.02


class RewardModel(Wrapper):
    """`base` is the body of a transformers decoder, without its output matrix."""

    def __init__(self, decoder: Any, pooling: str) -> None:
        """decoder: a causal language model, of which only the body is used. pooling: "last" or "mean"."""
        super().__init__()
        self.base, self.pooling = decoder.base_model, pooling
        self.base.name_or_path = decoder.name_or_path
        self.head = nn.Linear(decoder.config.hidden_size, 1, bias=False)  # float32 also on a 16-bit base: it is trained
        nn.init.normal_(self.head.weight, std=_HEAD_STD)

    def export(self, folder: Path, request: Any) -> None:
        """Write transformers' model for sequence classification with one label."""
        from src.systems.assistants.model import classifier

        classifier.save(self, folder)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Rewards (B,) float32 of sequences (B, T).
        attention_mask: (B, T) bool, True on real tokens. Padding can be on either side."""
        hidden_BTD = self.base(
            input_ids=input_ids, attention_mask=attention_mask.long(), use_cache=False
        ).last_hidden_state
        mask_BT = attention_mask.bool()
        if self.pooling == "mean":
            pooled_BD = (hidden_BTD * mask_BT[..., None]).sum(dim=1) / mask_BT.sum(dim=1, keepdim=True)
        else:
            places_T = torch.arange(mask_BT.shape[1], device=mask_BT.device)
            pooled_BD = hidden_BTD[
                torch.arange(mask_BT.shape[0], device=mask_BT.device), (places_T * mask_BT).argmax(dim=1)
            ]
        return self.head(pooled_BD.to(self.head.weight.dtype)).squeeze(-1).float()

    def training_flops(self) -> Callable[[Mapping[str, Tensor]], int]:
        """A function from a batch to the FLOPs of one training pass over it, padding included."""
        adapters = adapter_weights(self.base) or Adapters()
        passes = FROZEN if any(adapters) else TRAINED

        def flops(batch: Mapping[str, Tensor]) -> int:
            B, T = batch["input_ids"].shape
            return decoder_stack(self.config).flops(B, T, passes) + adapters.flops(B * T, 0)

        return flops
