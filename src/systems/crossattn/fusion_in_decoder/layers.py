"""Fusion-in-Decoder on an encoder-decoder: each passage is encoded separately, the decoder reads all passages.

Shapes: B samples, T tokens of the longest decoder input, C maximum number of passages per sample, S tokens of the
longest passage, P = C * S.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutput

from src.models.wrapper import Wrapper
from src.support.flops import FROZEN, TRAINED, Adapters, adapter_weights, t5_flops


class FusionInDecoder(Wrapper):
    """Fusion-in-Decoder around `base`, a transformers encoder-decoder with relative positions, such as T5."""

    def __init__(self, base: Any) -> None:
        super().__init__()
        self.base = base

    def export(self, folder: Path, request: Any) -> None:
        """Write the base, a plain encoder-decoder."""
        self.base.save_pretrained(folder)

    def training_flops(self) -> Callable[[Mapping[str, Tensor]], int]:
        """A function from a batch to the FLOPs of a training pass, including padding but not missing passages."""
        adapters = adapter_weights(self.base) or Adapters()
        passes = FROZEN if any(adapters) else TRAINED

        def flops(batch: Mapping[str, Tensor]) -> int:
            B, C, S = batch["context_mask"].shape
            T, there = batch["input_ids"].shape[1], int(batch["context_mask"].any(dim=-1).sum())
            of_adapters = adapters.flops(there * S, B * T) + adapters.head_flops(self.config, B * T)
            return t5_flops(self.config, (there, S), (B, T), C * S, passes) + of_adapters

        return flops

    def encode(self, context_ids: Tensor, context_mask: Tensor) -> tuple[Tensor, Tensor]:
        """Hidden states (B, P, D) of passages (B, C, S), zero at padding, and their mask (B, P), True on real tokens.

        context_mask: (B, C, S) bool, True on real tokens. Empty passages are not encoded.
        """
        B, C, S = context_ids.shape
        mask = context_mask.bool()
        there = mask.any(dim=-1)
        states = self.base.encoder(input_ids=context_ids[there], attention_mask=mask[there]).last_hidden_state
        hidden = states.new_zeros(B, C, S, states.shape[-1])
        hidden[mask] = states[mask[there]]
        return hidden.view(B, C * S, -1), mask.view(B, C * S)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        context_ids: Tensor,
        context_mask: Tensor,
        loss_mask: Tensor | None = None,
    ) -> Tensor:
        """Logits of the decoder's tokens (B, T), given their passages. Padding is on the right.

        The base's start token replaces the first token of each row. Masks are True on real tokens.

        Returns (N, vocabulary) for the N tokens where loss_mask (B, T) is True, in row-major order, each predicted from
        the tokens before it. Without loss_mask returns (B, T, vocabulary), where each position predicts the next token.
        """
        hidden, mask = self.encode(context_ids, context_mask)
        logits = self.base(
            encoder_outputs=BaseModelOutput(last_hidden_state=hidden),  # type: ignore[arg-type]  its type is too narrow
            attention_mask=mask,
            decoder_input_ids=self._with_start_token(input_ids),
            decoder_attention_mask=attention_mask,
            use_cache=False,
        ).logits
        return logits if loss_mask is None else logits[:, :-1][loss_mask[:, 1:]]

    @torch.no_grad()
    def generate(
        self, input_ids: Tensor, attention_mask: Tensor, context_ids: Tensor, context_mask: Tensor, **kwargs: Any
    ) -> Tensor:
        """Continue decoder inputs (B, T) of equal length; returns them, with the start token, and the continuations.

        kwargs: for transformers' `generate`.
        """
        assert attention_mask.all(), "decoder inputs of one length"
        hidden, mask = self.encode(context_ids, context_mask)
        return self.base.generate(
            encoder_outputs=BaseModelOutput(last_hidden_state=hidden),
            attention_mask=mask.long(),
            decoder_input_ids=self._with_start_token(input_ids),
            **kwargs,
        )

    def _with_start_token(self, input_ids: Tensor) -> Tensor:
        """(B, T) with the base's start token in the first column."""
        decoder_ids = input_ids.clone()
        decoder_ids[:, 0] = self.config.decoder_start_token_id
        return decoder_ids
