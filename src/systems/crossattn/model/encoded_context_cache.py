"""Cache of encoded contexts on disk, for serving: encode a context once, for every later question in any process.

A folder holds the contexts of one base, named in cache.json, in one file each. Files are renamed into place and checked
when read; damaged ones are deleted and encoded again. The least recently read are evicted to stay below `max_bytes`.
Several processes may read and write the folder at once.

Shapes: B samples, C context chunks, S tokens of a chunk, N chunks that are not cached, D hidden size of the base.
"""

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import struct
import time
import uuid
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from src.errors import CheckpointError, ConfigError, DataError
from src.files import read_json, reading, write_json, writing
from src.systems.crossattn.model.encoder import encode
from src.systems.crossattn.model.layers import Context, CrossAttentionLM

log = logging.getLogger(__name__)
Dtype = Literal["float32", "bfloat16", "int8"]
FORMAT = 1
SUFFIX = ".safetensors"
_SAMPLED = 1024
"""Values of each matrix in a digest. Training changes nearly all of them."""
_NOT_WHICH = {"architectures", "dtype", "name_or_path", "torch_dtype", "transformers_version", "use_cache"}
"""Settings of a base that do not change its states; its type is in its parameters."""
_LOCK = ".lock"
_KEPT_AFTER_EVICTION = 0.9
_ABANDONED_SECONDS = 3600.0


def base_digest(base: Any) -> str:
    """Identity of a transformers model in memory:
    sha256 over config, and names, shapes, types and evenly spaced values of parameters.

    Independent of where its files are and how it was loaded; different for other weights, types, adapters or settings.
    """
    config = {k: v for k, v in base.config.to_dict().items() if k not in _NOT_WHICH and not k.startswith("_")}
    digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
    for name, parameter in sorted(base.named_parameters()):
        flat = parameter.detach().reshape(-1)
        picked = flat[
            torch.linspace(0, len(flat) - 1, min(len(flat), _SAMPLED), device=flat.device, dtype=torch.float64).long()
        ]
        digest.update(f"{name} {list(parameter.shape)} {parameter.dtype}".encode() + _bytes(picked.cpu()))
    return digest.hexdigest()


class ContextCache:
    """The contexts of one base in one folder."""

    def __init__(self, folder: Path, model: Any, max_bytes: int, dtype: Dtype = "bfloat16") -> None:
        """Open or create the cache in `folder`.

        model: a CrossAttentionLM, or the base of one. dtype: of the states on disk; int8 has a scale for each token.

        Raises:
            ConfigError: the folder has contexts of another base, or in another type.
            CheckpointError: cache.json is damaged.
            RunError: the disk refuses.
        """
        if max_bytes < 1:
            raise ConfigError(f"max_bytes: expected at least 1, got {max_bytes}.")
        self.folder, self.max_bytes, self.dtype = folder, max_bytes, dtype
        self.hits = self.misses = self.damaged = self.evicted = 0
        """Contexts that this process found, encoded, found damaged (and encoded again), and evicted."""
        self._model = model
        base = model.base if isinstance(model, CrossAttentionLM) else model
        self._base, self._read_as = base_digest(base), base.dtype
        self._hidden_size: int = base.config.hidden_size
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
        self._claim(str(base.name_or_path))

    def contexts(self, context_ids: Tensor, context_mask: Tensor) -> Context:
        """As `CrossAttentionLM.encode` of (B, C, S) chunks, read from the cache or encoded and written to it.

        The states of a context are bit-identical when it is encoded and when it is read: rounded to the type on disk.

        Raises:
            ConfigError: one context is larger than `max_bytes`.
            DataError: states are not finite, or not in the type on disk.
            RunError: the disk refuses.
        """
        B, C, S = context_ids.shape
        mask = context_mask.bool()
        ids, real = context_ids.view(B * C, S).cpu(), mask.view(B * C, S).cpu()
        keys = {n: self.key(ids[n][real[n]]) for n in range(B * C) if real[n].any()}
        found = {key: self._read_entry(key) for key in dict.fromkeys(keys.values())}
        missing = {key: n for n, key in keys.items() if found[key] is None}
        self.hits += len(found) - len(missing)
        self.misses += len(missing)
        encoded = (
            self._encode(context_ids.view(B * C, S), mask.view(B * C, S), list(missing.values())) if missing else []
        )
        for key, states in zip(missing, encoded, strict=True):
            stored = self._to_disk(states)
            self._write_entry(key, stored)
            found[key] = self._from_disk(stored)
        hidden = torch.zeros(B * C, S, self._hidden_size, dtype=self._read_as)
        for n, key in keys.items():
            states = found[key]
            assert states is not None
            hidden[n, real[n]] = states.to(self._read_as)
        return Context(hidden.view(B, C * S, -1).to(context_ids.device), mask.view(B, C * S))

    def key(self, ids: Tensor) -> str:
        """Key of the context with these ids (S,): depends on the base and the ids."""
        return hashlib.sha256(self._base.encode() + _bytes(ids.long().cpu())).hexdigest()

    def num_bytes(self) -> int:
        """Bytes of all entries, counted now."""
        return sum(size for _, size, _ in self._entries())

    def _encode(self, ids: Tensor, mask: Tensor, rows: list[int]) -> list[Tensor]:
        """States (S, D) of the real tokens of each of the `rows`, on the host."""
        ids, mask = ids[rows], mask[rows]
        if isinstance(self._model, CrossAttentionLM):
            hidden = self._model.encode(ids[:, None], mask[:, None]).hidden
        else:
            training = self._model.training
            self._model.eval()
            try:
                hidden = encode(self._model, ids, mask)
            finally:
                self._model.train(training)
        return [states[real].cpu() for states, real in zip(hidden, mask, strict=True)]

    def _to_disk(self, states: Tensor) -> dict[str, Tensor]:
        if self.dtype == "int8":
            scales = states.float().abs().amax(dim=-1).clamp(min=1e-12) / 127
            stored = {"states": (states.float() / scales[:, None]).round().to(torch.int8), "scales": scales}
        else:
            stored = {"states": states.to(getattr(torch, self.dtype)).contiguous()}
        if not all(bool(tensor.isfinite().all()) for tensor in stored.values()):
            raise DataError(
                f"{self.folder}: states of a context of {len(states)} tokens are not finite in {self.dtype}. "
                "The base is damaged, or of too small a type."
            )
        return stored

    def _from_disk(self, stored: dict[str, Tensor]) -> Tensor:
        return stored["states"] * stored["scales"][:, None] if self.dtype == "int8" else stored["states"]

    def _read_entry(self, key: str) -> Tensor | None:
        """States (S, D) of an entry; None where there is none. A damaged one is deleted."""
        path = self._path(key)
        try:
            with reading(path):
                data = path.read_bytes()
        except FileNotFoundError:
            return None
        try:
            stored = load(data)
            whole = (
                int(stored.pop("checksum")) == _checksum(key, stored) and stored["states"].shape[1] == self._hidden_size
            )
        except (SafetensorError, KeyError, ValueError, IndexError, RuntimeError):
            whole, stored = False, {}
        if not whole:
            log.warning("%s: damaged, so it is encoded anew.", path)
            self.damaged += 1
            with writing(path):
                path.unlink(missing_ok=True)
            return None
        with contextlib.suppress(OSError):  # gone meanwhile, or a folder that may only be read
            os.utime(path)
        return self._from_disk(stored)

    def _write_entry(self, key: str, stored: dict[str, Tensor]) -> None:
        path = self._path(key)
        data = save({**stored, "checksum": torch.tensor(_checksum(key, stored))})
        if len(data) > self.max_bytes:
            raise ConfigError(f"max_bytes: {self.max_bytes} cannot hold one context of {len(data)} bytes. Allow more.")
        beside = self.folder / f".{uuid.uuid4().hex}"
        with writing(path):
            path.parent.mkdir(exist_ok=True)
            try:
                beside.write_bytes(data)
                with self._lock() as lock:
                    if path.exists():  # another process was faster
                        return
                    total = self._total_bytes(lock) + len(data)
                    _write_total(
                        lock, total
                    )  # before the file exists: after a kill in between it is too large, never too small
                    os.replace(beside, path)
                    if total > self.max_bytes:
                        _write_total(lock, self._evict())
            finally:
                beside.unlink(missing_ok=True)

    def _total_bytes(self, lock: int) -> int:
        """Bytes of all entries as stored in the lock file; counted if they are not."""
        data = os.pread(lock, 8, 0)
        return struct.unpack("<q", data)[0] if len(data) == 8 else self.num_bytes()

    def _evict(self) -> int:
        """Delete the least recently read entries and files of killed writers; returns the remaining bytes."""
        entries = sorted(self._entries())
        total = sum(size for _, size, _ in entries)
        if total > self.max_bytes:
            for _, size, path in entries[:-1]:
                if total <= self.max_bytes * _KEPT_AFTER_EVICTION:
                    break
                path.unlink(missing_ok=True)
                total -= size
                self.evicted += 1
        for path in self.folder.glob(".*"):
            with contextlib.suppress(FileNotFoundError):
                if time.time() - path.stat().st_mtime > _ABANDONED_SECONDS and path.name != _LOCK:
                    path.unlink()
        return total

    def _entries(self) -> Iterator[tuple[int, int, Path]]:
        """(time of last read, bytes, path) of each entry."""
        for path in self.folder.glob(f"??/*{SUFFIX}"):
            with contextlib.suppress(FileNotFoundError):
                facts = path.stat()
                yield facts.st_mtime_ns, facts.st_size, path

    def _path(self, key: str) -> Path:
        return self.folder / key[:2] / f"{key}{SUFFIX}"

    def _claim(self, name: str) -> None:
        """Check that the folder is this base's, or claim a new one."""
        path = self.folder / "cache.json"
        mine = {"format": FORMAT, "base": self._base, "name": name, "dtype": self.dtype}
        with writing(path), self._lock():
            if not path.exists():
                write_json(path, mine)
                return
        made = read_json(path, CheckpointError)
        if not isinstance(made, dict) or not mine.keys() <= made.keys() or made["format"] != FORMAT:
            raise CheckpointError(
                f"{path}: not of a cache of format {FORMAT}. Delete the folder: all in it can be encoded again."
            )
        if made["base"] != self._base:
            raise ConfigError(
                f"{self.folder}: caches contexts of {made['name']} (weights {made['base'][:12]}), "
                f"but this model's base is {name} (weights {self._base[:12]}). Name another folder, or delete this one."
            )
        if made["dtype"] != self.dtype:
            raise ConfigError(
                f"{self.folder}: caches {made['dtype']}, not {self.dtype}. Name another folder, or delete this one."
            )

    @contextlib.contextmanager
    def _lock(self) -> Iterator[int]:
        """Hold the writers' lock; yields its file, which stores the total bytes."""
        descriptor = os.open(self.folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield descriptor
        finally:
            os.close(descriptor)


def _write_total(lock: int, total: int) -> None:
    os.pwrite(lock, struct.pack("<q", total), 0)


def _checksum(key: str, stored: dict[str, Tensor]) -> int:
    """Checksum of an entry and its name, so that a renamed file is detected."""
    value = zlib.crc32(key.encode())
    for name in sorted(stored):
        value = zlib.crc32(_bytes(stored[name]), value)
    return value


def _bytes(tensor: Tensor) -> Any:
    """The bytes of a tensor on the host."""
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data
