"""Separate attention masks for the encoder and the cross-attention of a transformers T5.

Its `forward` uses `attention_mask` for both, so a mask with a row per token only fits one of them. It passes unknown
keywords to encoder and decoder, which ignore them. Two hooks handle ours.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import T5ForConditionalGeneration

CROSS_MASK = "cross_attention_mask"


def accept(model: "T5ForConditionalGeneration") -> None:
    """Make `model` accept `cross_attention_mask` (B, 1, T, S), the mask of its cross-attention. Mutates `model`.

    Masks with four axes, `attention_mask` (B, 1, S, S) and `decoder_attention_mask` (B, 1, T, T), are used as they are,
    so the decoder's must be causal. They are bool, True if a token (third axis) attends to another (fourth axis).
    Without such masks nothing changes.
    """
    model.encoder.register_forward_pre_hook(_without_cross_mask, with_kwargs=True)
    model.decoder.register_forward_pre_hook(_with_cross_mask, with_kwargs=True)


def _without_cross_mask(
    encoder: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    kwargs.pop(CROSS_MASK, None)
    if encoder.config.model_type == "longt5" and kwargs.get("attention_mask") is not None:
        kwargs["attention_mask"] = kwargs["attention_mask"].long()  # LongT5 computes numbers of blocks from it
    return args, _to_additive(encoder, kwargs, "attention_mask")


def _with_cross_mask(
    decoder: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    cross_mask = kwargs.pop(CROSS_MASK, None)
    if cross_mask is not None:
        kwargs["encoder_attention_mask"] = cross_mask
    return args, _to_additive(decoder, kwargs, "attention_mask", "encoder_attention_mask")


def _to_additive(stack: Any, kwargs: dict[str, Any], *names: str) -> dict[str, Any]:
    """Convert masks with four axes in `kwargs` for eager attention, which adds them to its logits."""
    import torch

    if stack.config._attn_implementation == "eager":
        for name in names:
            mask: Tensor | None = kwargs.get(name)
            if mask is not None and mask.dim() == 4 and mask.dtype == torch.bool:
                kwargs[name] = torch.zeros_like(mask, dtype=stack.dtype).masked_fill_(
                    ~mask, torch.finfo(stack.dtype).min
                )
    return kwargs
