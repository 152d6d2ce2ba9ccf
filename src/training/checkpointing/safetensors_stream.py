"""Tensors on disk as byte ranges of files, and streaming of safetensors files.

Only CHUNK_BYTES of a tensor are in memory at a time.
"""

import contextlib
import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

from src import files
from src.errors import CheckpointError

CHUNK_BYTES = 2**24
SEPARATOR = "::"
"""Separates the name of a parameter from that of its entry in the optimizer's state."""
_MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library
# In the sort order of the safetensors library, so that files have the same bytes as those of its `save_file`.
_NAMES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int32: "I32",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.int64: "I64",
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}


@dataclass(frozen=True)
class Piece:
    """Consecutive elements in a file."""

    file: Path
    offset: int
    """Offset of the first element in bytes."""
    count: int
    """Number of elements."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor on disk. Its elements in row-major order are those of its pieces, concatenated."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: tuple[Piece, ...] | bytes
    """bytes: the elements of a tensor that is not in a file."""

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def chunks(self, dtype: torch.dtype | None = None) -> Iterator[bytes]:
        """Yield the elements as bytes, at most CHUNK_BYTES at a time. dtype: convert floating-point elements to it,
        rounding to nearest.

        Raises:
            CheckpointError: a file is missing, unreadable or truncated.
        """
        target = target_dtype(self.dtype, dtype)
        for chunk in [self.pieces] if isinstance(self.pieces, bytes) else self._read_pieces(self.pieces):
            if target == self.dtype:
                yield chunk
            else:
                values = torch.frombuffer(bytearray(chunk), dtype=self.dtype).to(target)
                yield values.view(torch.uint8).numpy().tobytes()

    def _read_pieces(self, pieces: Iterable[Piece]) -> Iterator[bytes]:
        for piece in pieces:
            remaining = piece.count * self.dtype.itemsize
            with open_tensors(piece.file) as file:
                file.seek(piece.offset)
                while remaining:
                    chunk = file.read(min(remaining, CHUNK_BYTES))
                    if len(chunk) < min(remaining, CHUNK_BYTES):
                        raise CheckpointError(
                            f"{piece.file}: ends within a tensor: damaged, or changed since it was opened. "
                            "Restore it from a copy."
                        )
                    remaining -= len(chunk)
                    yield chunk

    def digest(self, dtype: torch.dtype | None = None) -> str:
        """Hex sha256 of `chunks`."""
        hasher = hashlib.sha256()
        for chunk in self.chunks(dtype):
            hasher.update(chunk)
        return hasher.hexdigest()


@contextlib.contextmanager
def open_tensors(path: Path) -> Iterator[BinaryIO]:
    """Open `path` for reading bytes.

    Raises:
        CheckpointError: it is missing or cannot be read.
    """
    try:
        with files.reading(path, CheckpointError), open(path, "rb") as file:
            yield file
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file. Restore it from a copy.") from None


def target_dtype(stored_dtype: torch.dtype, requested: torch.dtype | None) -> torch.dtype:
    """Type to write a tensor in: only floating-point tensors are converted."""
    return requested if requested is not None and stored_dtype.is_floating_point else stored_dtype


def size_bytes(tensor: StoredTensor, dtype: torch.dtype | None = None) -> int:
    """Size of a tensor in a file."""
    return tensor.numel * target_dtype(tensor.dtype, dtype).itemsize


def write(
    path: Path,
    tensors: Mapping[str, StoredTensor],
    dtype: torch.dtype | None = None,
    metadata: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Write `tensors` as safetensors; returns the sha256 of each by name.

    The file has the same bytes as from `safetensors.torch.save_file`. It is not synced; `files.new_directory` does
    that. Format: https://github.com/huggingface/safetensors#format

    Raises:
        CheckpointError: a source is damaged, or has a type that safetensors does not support.
    """
    rank = {torch_dtype: place for place, torch_dtype in enumerate(_NAMES)}
    for name, tensor in tensors.items():
        if tensor.dtype not in rank:
            raise CheckpointError(f"{path}: {name} is {tensor.dtype}, expected one of {', '.join(map(str, _NAMES))}.")
    kinds = {name: target_dtype(tensor.dtype, dtype) for name, tensor in tensors.items()}
    sorted_names = sorted(tensors, key=lambda name: (-rank[kinds[name]], name))
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    start = 0
    for name in sorted_names:
        end = start + size_bytes(tensors[name], dtype)
        header[name] = {"dtype": _NAMES[kinds[name]], "shape": list(tensors[name].shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    digests = {}
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in sorted_names:
            hasher = hashlib.sha256()
            for chunk in tensors[name].chunks(dtype):
                file.write(chunk)
                hasher.update(chunk)
            digests[name] = hasher.hexdigest()
    return digests


def read(path: Path) -> dict[str, StoredTensor]:
    """List the tensors of a safetensors file without reading their data.

    Raises:
        CheckpointError: the file is missing or damaged.
    """
    with open_tensors(path) as file:
        length = int.from_bytes(file.read(8), "little")
        text = file.read(length) if length <= _MAX_HEADER_BYTES else b""
        size = file.seek(0, 2)
    error = CheckpointError(f"{path}: damaged, not readable as safetensors. Restore it from a copy.")
    try:
        header = files.parse_json(text, path, CheckpointError)
        header.pop("__metadata__", None)
        tensors = {name: _entry(path, entry, 8 + length) for name, entry in header.items()}
    except (CheckpointError, ValueError, KeyError, TypeError, AttributeError):
        raise error from None
    if size != 8 + length + sum(size_bytes(tensor) for tensor in tensors.values()):
        raise error
    return tensors


def _entry(path: Path, entry: Mapping[str, Any], base: int) -> StoredTensor:
    start, end = entry["data_offsets"]
    shape, dtype = tuple(entry["shape"]), _DTYPES[entry["dtype"]]
    if end - start != math.prod(shape) * dtype.itemsize:
        raise ValueError
    return StoredTensor(shape, dtype, (Piece(path, base + start, math.prod(shape)),))


def difference(
    expected: Mapping[str, StoredTensor], tensors: Mapping[str, StoredTensor], dtype: torch.dtype | None = None
) -> str | None:
    """Describe the difference of two sets of tensors; None if they are bitwise equal.

    dtype: `expected` is rounded to this type before the comparison.
    """
    for kind, names in (
        ("missing", expected.keys() - tensors.keys()),
        ("unexpected", tensors.keys() - expected.keys()),
    ):
        if names:
            return f"{kind}: {first_names(names)}"
    for name, tensor in expected.items():
        target = target_dtype(tensor.dtype, dtype)
        if (tensor.shape, target) != (tensors[name].shape, tensors[name].dtype):
            return (
                f"{name} is {list(tensors[name].shape)} of {tensors[name].dtype}, "
                f"expected {list(tensor.shape)} of {target}"
            )
    unequal = [name for name, tensor in expected.items() if tensor.digest(dtype) != tensors[name].digest()]
    return f"different values in {first_names(unequal)}" if unequal else None


def first_names(names: Iterable[str]) -> str:
    """Up to three names, and the number of further names."""
    sorted_names = sorted(names)
    return ", ".join(sorted_names[:3]) + (f" and {len(sorted_names) - 3} more" if len(sorted_names) > 3 else "")
