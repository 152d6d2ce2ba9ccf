"""Read FSDP2 shards of a checkpoint, written by src/training/checkpointing/shard_store.py.

Shards are safetensors files with the start of each part in the header. FSDP2 splits tensors between rows, so a part is
a byte range of the full tensor, and tensors are joined on disk without loading them into memory.
"""

from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open

from src.errors import CheckpointError
from src.files import read_json
from src.support.parsing import parse_json
from src.training.checkpointing import safetensors_stream, zero_layout
from src.training.checkpointing.safetensors_stream import SEPARATOR, StoredTensor

MOMENTS = "optimizer"
"""Folder of the shards of the optimizer's state."""
_WHOLE = "model.safetensors"
PLACES, START = "DCP_SHARDING_INFO", "saved_offsets"  # header keys of HuggingFaceStorageReader


def tensors(folder: Path) -> dict[str, StoredTensor]:
    """Join the tensors in the files of a folder.

    Raises:
        CheckpointError: a file is damaged, or parts are missing.
    """
    parts: dict[str, dict[int, StoredTensor]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        places = _places(file)
        for name, part in safetensors_stream.read(file).items():
            start, *others = places.get(name) or [0]
            if any(others):
                raise CheckpointError(
                    f"{file}: {name} is split within rows, which is not supported. "
                    "Use a checkpoint that this project wrote with --fsdp."
                )
            if part.numel or name not in parts:
                parts.setdefault(name, {})[start] = part
    return {name: _join(folder, name, tensors_by_name) for name, tensors_by_name in sorted(parts.items())}


def _join(folder: Path, name: str, parts: Mapping[int, StoredTensor]) -> StoredTensor:
    """Join the parts of a tensor, given by their first row."""
    sorted_parts = [(start, part) for start, part in sorted(parts.items()) if part.numel] or list(parts.items())[:1]
    first, rows = sorted_parts[0][1], 0
    for start, part in sorted_parts:
        if start != rows and part.numel:
            raise CheckpointError(f"{folder}: rows {rows} to {start} of {name} are missing. Restore it from a copy.")
        rows += part.shape[0] if part.shape else 0
    shape = (rows, *first.shape[1:]) if first.shape else ()
    pieces = tuple(
        piece for _, part in sorted_parts for piece in part.pieces if isinstance(piece, safetensors_stream.Piece)
    )
    return StoredTensor(shape, first.dtype, pieces)


def _places(file: Path) -> dict[str, list[int]]:
    """First row of each part of a file, by tensor name."""
    try:
        with safe_open(file, "pt") as tensors_file:
            sharding_info = parse_json((tensors_file.metadata() or {}).get(PLACES, "{}"), file, CheckpointError)
        return {name: [int(place) for place in about[START]] for name, about in sharding_info.items()}
    except (SafetensorError, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{file}: not readable as a shard ({' '.join(str(error).split())[:120]}). Restore it from a copy."
        ) from None


def read(folder: Path) -> zero_layout.Shards:
    """Describe a checkpoint with FSDP2 shards as `zero_layout.Shards`, with stage 0.

    Raises:
        CheckpointError: a file is damaged.
    """
    moments: dict[str, dict[str, StoredTensor]] = {}
    for name, tensor in tensors(folder / MOMENTS).items():
        parameter, key = name.rsplit(SEPARATOR, 1)
        moments.setdefault(parameter, {})[key] = tensor
    step = read_json(folder / "state.json", CheckpointError)["step"]
    count = len(list((folder / MOMENTS).glob("*.safetensors")))
    return zero_layout.Shards(folder, 0, count, step, safetensors_stream.read(folder / _WHOLE), {}, {}, {}, moments)
