"""Read the metadata of one shard of a DeepSpeed ZeRO checkpoint (format of DeepSpeed 0.19.8), and the byte ranges of
its tensors.

Shards are pickles. They are read without DeepSpeed and with `weights_only`, so that they cannot run code.
"""

import contextlib
import pickle
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from src.errors import CheckpointError
from src.training.checkpointing.safetensors_stream import Piece, StoredTensor, open_tensors


class _Placeholder:
    """Placeholder for DeepSpeed objects in a shard that are not needed."""


_ALLOWED = [
    (int, "deepspeed.runtime.zero.config.ZeroStageEnum"),
    (_Placeholder, "deepspeed.utils.tensor_fragment.fragment_address"),
    (_Placeholder, "deepspeed.runtime.fp16.loss_scaler.LossScaler"),
    (_Placeholder, "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler"),
]


class OptimizerShard:
    """One process's shard of float32 weights and optimizer state, as flat vectors."""

    def __init__(self, file: Path) -> None:
        content = _load(file)
        with _layout_errors(file):
            inner = content["optimizer_state_dict"]
            self.file = file
            self.stage = int(inner["zero_stage"])
            count = inner["partition_count"]
            self.world_size = max(count) if isinstance(count, list) else int(count)
            self.weights = [
                stored_tensor(file, v)
                for v in inner["fp32_flat_groups" if self.stage == 3 else "single_partition_of_fp32_groups"]
            ]
            self.paddings: list[list[int]] | None = inner.get("param_alignment_paddings")
            state = inner["optimizer_state_dict" if self.stage == 3 else "base_optimizer_state"]
            if isinstance(state, list):  # the key "elastic_checkpoint" of DeepSpeed's json
                entries = state
            else:
                order = [number for group in state["param_groups"] for number in group["params"]]
                entries = [state["state"].get(number, {}) for number in order]
            self.states = [{key: _entry(file, value) for key, value in entry.items()} for entry in entries]
            self.steps = (
                ", ".join(sorted({f"{_number(entry['step']):g}" for entry in self.states if "step" in entry})) or "no"
            )
            if len(self.states) != len(self.weights):
                raise CheckpointError(
                    f"{file}: {len(self.weights)} vectors of weights, but {len(self.states)} of the optimizer. "
                    "Restore it from a copy."
                )

    def vectors(self, key: str | None, group: int | None) -> list[StoredTensor]:
        """Vectors of the weights (key None) or of an optimizer entry, of one group or all groups."""
        groups = range(len(self.weights)) if group is None else [group]
        try:
            return [self.weights[g] if key is None else self.states[g][key] for g in groups]
        except (KeyError, IndexError):
            raise CheckpointError(
                f"{self.file}: no {key or 'weights'} for some parameters that other shards have. "
                "Use the shards of one save."
            ) from None


class ModelShard:
    """One process's shard of the model: names, shapes, buffers and frozen parameters; in stages 1 and 2 also all
    weights."""

    def __init__(self, file: Path) -> None:
        content = _load(file)
        with _layout_errors(file):
            self.file = file
            self.step = int(content["global_steps"])
            self.world_size = int(content["dp_world_size"])
            self.shapes = [{name: tuple(shape) for name, shape in group.items()} for group in content["param_shapes"]]
            self.module = {
                name: tensor for name, tensor in content["module"].items() if isinstance(tensor, torch.Tensor)
            }
            self.tied: dict[str, str] = dict(content.get("shared_params") or {})
            self.frozen_shapes = {
                name: tuple(shape) for name, shape in (content.get("frozen_param_shapes") or {}).items()
            }
            self.fragments: dict[str, torch.Tensor] = dict(content.get("frozen_param_fragments") or {})
            self.buffers = {
                name: stored_tensor(file, self.module[name]) for name in content["buffer_names"] if name in self.module
            }


def _load(file: Path) -> Any:
    """Unpickle a shard, with its tensors on the meta device.

    Raises:
        CheckpointError: it is damaged, or has an object of an unknown class, which could run code.
    """
    try:
        with open_tensors(file) as stream, torch.serialization.safe_globals(_ALLOWED):
            return torch.load(stream, map_location="meta", weights_only=True)
    except pickle.UnpicklingError as error:
        kind = re.search(r"GLOBAL (\S+)", str(error))
        what = (
            f"has a {kind[1]}, which is rejected, as it could run code. Use a file that DeepSpeed wrote"
            if kind
            else "damaged, not readable as a shard. Restore it from a copy"
        )
        raise CheckpointError(f"{file}: {what}.") from None
    except (RuntimeError, EOFError, KeyError, ValueError) as error:
        raise CheckpointError(
            f"{file}: damaged, not readable as a shard ({str(error).splitlines()[0][:120]}). Restore it from a copy."
        ) from None


@contextlib.contextmanager
def _layout_errors(file: Path) -> Iterator[None]:
    """Turn an unexpected layout into a CheckpointError."""
    try:
        yield
    except (KeyError, TypeError, AttributeError, ValueError, IndexError) as error:
        raise CheckpointError(
            f"{file}: not a shard of DeepSpeed ZeRO as 0.19.8 writes it ({type(error).__name__}: {error}). "
            "Save it again with that version."
        ) from None


def stored_tensor(file: Path, tensor: torch.Tensor) -> StoredTensor:
    """Byte range of a shard's tensor in its file."""
    start = getattr(tensor.untyped_storage(), "_checkpoint_offset", None)
    if start is None or not tensor.is_contiguous():
        raise CheckpointError(
            f"{file}: has a non-contiguous tensor, which is not supported. Save it again with DeepSpeed."
        )
    offset = start + tensor.storage_offset() * tensor.element_size()
    return StoredTensor(tuple(tensor.shape), tensor.dtype, (Piece(file, offset, tensor.numel()),))


def _entry(file: Path, value: Any) -> StoredTensor:
    """An optimizer entry: a vector, or a number as float32 like AdamW's step count."""
    return (
        stored_tensor(file, value)
        if isinstance(value, torch.Tensor)
        else StoredTensor((), torch.float32, struct.pack("<f", value))
    )


def _number(value: StoredTensor) -> float:
    """The value of an entry that is a number."""
    return torch.frombuffer(bytearray(b"".join(value.chunks())), dtype=value.dtype).item()
