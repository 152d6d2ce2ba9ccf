"""The largest micro-batch of a data set, known from its config. Memory plans use it before any data are prepared.

Each sequence has the maximum length and each token is learned, so a plan never underestimates. Encoded contexts can be
large and are on torch's meta device.
"""

from typing import Any

import torch
from torch import Tensor

from src.errors import ConfigError
from src.experiments.interfaces import DatasetConfig
from src.experiments.kinds import CROSS_ATTENTION, DECODER, ENCODER_DECODER, FUSION_IN_DECODER, VISION_LANGUAGE

FRAME_MARKER_TOKENS = 3
"""Marker tokens per frame."""


def longest_batch(data: DatasetConfig, rows: int, config: Any) -> dict[str, Tensor]:
    """The largest micro-batch with `rows` rows. config: transformers' config of the model.

    Raises:
        ConfigError: the config does not determine the length of a sequence or the number of its contexts.
    """
    parts = getattr(data, "parts_by_path", None)
    if parts:  # of a mixture, the part with the longest sequences
        return max(
            (longest_batch(part, rows, config) for part in parts.values()), key=lambda batch: batch["input_ids"].numel()
        )
    make = {
        DECODER: _tokens,
        CROSS_ATTENTION: _contexts,
        ENCODER_DECODER: _seq2seq,
        FUSION_IN_DECODER: _passages,
        VISION_LANGUAGE: _image_rows,
    }.get(data.reader)
    if make is None or data.name == "rollouts":
        raise ConfigError(f"--memory: cannot plan a training on {data.name!r} data. Plan the same model on text.")
    return make(data, rows, config)


def _lengths(data: Any, *fields: str) -> tuple[int, ...]:
    """Maximum number of tokens of each sequence of a sample."""
    if hasattr(data, "longest"):
        return (data.longest(),)
    lengths: tuple[Any, ...] = data.batch_lengths() or tuple(getattr(data, field, None) for field in fields)
    if None in lengths:
        missing = fields[lengths.index(None)]
        raise ConfigError(
            f"--memory: data.{missing} is missing, so the length of the longest sequence is unknown. "
            "Set it in the experiment or with --set."
        )
    return lengths


def _tokens(data: Any, rows: int, config: Any) -> dict[str, Tensor]:
    (T,) = _lengths(data, "sequence_tokens")
    mask_BT = torch.ones(rows, T, dtype=torch.bool)
    batch = {
        "input_ids": torch.zeros(rows, T, dtype=torch.long),
        "attention_mask": _pad_one(data, mask_BT),
        "loss_mask": _loss_mask(mask_BT),
    }
    return (
        {**batch, "position_ids": _positions(rows, T)}
        if getattr(data, "open_rows", 0) or getattr(data, "separate_documents", False)
        else batch
    )


def _contexts(data: Any, rows: int, config: Any) -> dict[str, Tensor]:
    if data.chunked_contexts:
        raise ConfigError(
            "--memory: with data.chunked_contexts the number of contexts of a row is unknown. Turn it off with --set."
        )
    batch = _tokens(data, rows, config)
    mask_BS = _pad_one(data, torch.ones(rows, data.context_tokens, dtype=torch.bool))
    if data.encoded_contexts:
        hidden_BPD = torch.empty(
            rows, data.context_tokens, config.get_text_config().hidden_size, dtype=config.dtype, device="meta"
        )
        return {**batch, "context_hidden": hidden_BPD, "context_mask": mask_BS}
    return {
        **batch,
        "context_ids": torch.zeros(rows, 1, data.context_tokens, dtype=torch.long),
        "context_mask": mask_BS[:, None],
    }


def _passages(data: Any, rows: int, config: Any) -> dict[str, Tensor]:
    passages = 1 if data.contexts == "none" else data.num_passages
    if passages is None:
        raise ConfigError(
            "--memory: data.num_passages is missing, so the number of passages of a question is unknown. "
            "Set it in the experiment or with --set."
        )
    mask_BT = _pad_one(data, torch.ones(rows, data.answer_tokens + 1, dtype=torch.bool))  # with the start token
    context_mask_BCS = torch.ones(rows, passages, data.passage_tokens, dtype=torch.bool)
    return {
        "input_ids": torch.zeros_like(mask_BT, dtype=torch.long),
        "attention_mask": mask_BT,
        "loss_mask": _loss_mask(mask_BT),
        "context_ids": torch.zeros_like(context_mask_BCS, dtype=torch.long),
        "context_mask": context_mask_BCS,
    }


def _seq2seq(data: Any, rows: int, config: Any) -> dict[str, Tensor]:
    S, T = _lengths(data, "input_tokens", "target_tokens")
    targets_BT = torch.zeros(rows, T, dtype=torch.long)
    batch = {
        "input_ids": torch.zeros(rows, S, dtype=torch.long),
        "attention_mask": _pad_one(data, torch.ones(rows, S, dtype=torch.bool)),
        "decoder_input_ids": targets_BT,
        "labels": targets_BT.clone(),
        "loss_mask": torch.ones(rows, T, dtype=torch.bool),
    }
    if data.name != "depth":
        return batch
    masks = {"encoder_mask": (S, S), "decoder_mask": (T, T), "cross_mask": (T, S)}
    return {**batch, **{name: torch.ones(rows, *shape, dtype=torch.bool) for name, shape in masks.items()}}


def _image_rows(data: Any, rows: int, config: Any) -> dict[str, Tensor]:
    batch, tokens = _tokens(data, rows, config), data.images.image_tokens
    frames, T = min(data.max_frames, data.sequence_tokens // (tokens + FRAME_MARKER_TOKENS)), data.sequence_tokens
    for n in range(frames):
        start = n * (T // frames)
        batch["input_ids"][:, start : start + tokens] = config.image_token_id
    side, sources = data.images.frame_size, len(data.sources)
    return {
        **batch,
        "frames": torch.ones(rows * frames, 3, side, side),
        "source_ids": torch.zeros(rows, T, dtype=torch.long),
        "source_counts": torch.zeros(sources, 6, dtype=torch.long),
        "cached": torch.zeros(2, dtype=torch.long),
    }


def _pad_one(data: DatasetConfig, mask_BT: Tensor) -> Tensor:
    """Mask one token as padding if rows can differ in length, as attention needs more memory with a mask."""
    if data.batch_lengths() is None and len(mask_BT) > 1:
        mask_BT[-1, -1] = False
    return mask_BT


def _loss_mask(mask_BT: Tensor) -> Tensor:
    learned_BT = mask_BT.clone()
    learned_BT[:, 0] = False
    return learned_BT


def _positions(rows: int, T: int) -> Tensor:
    """Position ids of two documents per row, so that attention separates them."""
    return torch.cat([torch.arange(T // 2), torch.arange(T - T // 2)]).expand(rows, T).contiguous()
