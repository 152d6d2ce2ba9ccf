"""Shards of FSDP2 in a checkpoint, by torch.distributed.checkpoint (DCP):
each process writes its part, and any number of them read it.

The parts are safetensors files with the start of each part in the header. (DCP's own format has its index in a pickle,
which can run code when it is read.) FSDP2 cuts tensors between rows, so a part is a range of bytes of the full tensor,
and tensors are put together from one file into another without being held in memory.
"""

import json
import os
import shutil
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from src.errors import CheckpointError, RunError
from src.files import read_json
from src.support import distributed
from src.support.parsing import parse_json
from src.training.checkpointing import checkpoint, safetensors_stream, zero_layout
from src.training.checkpointing.safetensors_stream import StoredTensor

MOMENTS = "optimizer"
"""Folder of the shards of the optimizer's state."""
_WEIGHTS, _WHOLE = "weights", "model.safetensors"
_PLACES, _START = "DCP_SHARDING_INFO", "saved_offsets"  # where HuggingFaceStorageReader looks, in a header


class _Writer(HuggingFaceStorageWriter):
    """Writes a process's shards as its base does, which would hold two copies of them more for that."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """One file, synced: process 0 could not do that for a disk of another machine."""
        shards: dict[str, Any] = {item.index.fqn: planner.resolve_data(item) for item in plan.items}
        places = {item.index.fqn: {_START: list(item.index.offset or ())} for item in plan.items}
        if shards:
            file = Path(self.path) / f"shard-{plan.storage_data['shard_index']:05d}.safetensors"
            save_file(shards, file, {_PLACES: json.dumps(places)})
            with open(file, "rb") as written:
                os.fsync(written.fileno())
        done: Future[list[WriteResult]] = Future()
        done.set_result([])
        return done


_groups: dict[str, Any] = {}
"""The group of all processes, and the group for background writes."""


def _background_group() -> Any:
    """One for all trainings of this process: a group has threads and open files. Collective."""
    if _groups.get("all") is not dist.group.WORLD:
        # A disk can be slow.
        _groups["all"], _groups["own"] = (
            dist.group.WORLD,
            dist.new_group(backend="gloo", timeout=timedelta(days=1)),
        )
    return _groups["own"]


class ShardStore:
    """Writes and reads the shards of this process. All methods are collective, and so is the construction.

    Background writes have their own group, so that their messages never mix with those of the training.
    """

    def __init__(self) -> None:
        self.group = _background_group()
        pinned = torch.cuda.is_available()
        self.stager = DefaultStager(
            StagingOptions(pinned, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=False)
        )

    def stage(self, weights: dict[str, Tensor], moments: dict[str, Tensor]) -> Callable[[Path], None]:
        """Copy this process's shards to the CPU; returns what writes them into a folder on a shared disk, in a thread.

        It leaves the moments as shards and the weights as one file with the same bytes as a training without shards:
        parents, exports and evaluations read it. Each process writes its part, and the first puts the parts together on
        the disk. A copy is overwritten by the next call.

        The returned function raises:
            RunError: the disk refuses a process, or processes see different disks; on every rank.
        """
        copies = self.stager.stage({MOMENTS: moments, _WEIGHTS: weights})
        assert isinstance(copies, dict)

        def write(folder: Path) -> None:
            written = {name: self._write(folder / name, shards) for name, shards in copies.items()}
            if distributed.is_main():  # no collective call follows, so no process waits for one that raises here
                for name, about in written.items():
                    _require_all(folder / name, about)
                safetensors_stream.write(folder / _WHOLE, tensors(folder / _WEIGHTS))
                shutil.rmtree(folder / _WEIGHTS)

        return write

    def _write(self, folder: Path, shards: dict[str, Tensor]) -> Mapping[str, Any]:
        """Returns the metadata of the full tensors, by name."""
        try:
            return save(
                shards, storage_writer=_Writer(str(folder), save_distributed=True), process_group=self.group
            ).state_dict_metadata
        except CheckpointException as error:
            reasons = [reason for reason, _ in error.failures.values()]
            refused = next((reason for reason in reasons if isinstance(reason, (OSError, SafetensorError))), None)
            if refused is None:
                raise RuntimeError(str(error)) from error
            raise RunError(
                f"{folder}: cannot write: {refused}. Nothing complete was lost; make room or choose another folder."
            ) from error

    def load(self, folder: Path, into: dict[str, Tensor]) -> None:
        """Fill tensors or shards from the safetensors files of a folder. Each process reads only its part.

        Raises:
            CheckpointError: they are not there, or damaged.
        """
        try:
            load(into, storage_reader=HuggingFaceStorageReader(str(folder)), process_group=self.group)
        except CheckpointException as error:
            reason = " ".join(str(next(iter(error.failures.values()))[0]).split())
            refusal = CheckpointError(f"{folder}: cannot be loaded ({reason[:300]}).")
            refusal.everywhere = True
            raise refusal from error

    def load_optimizer(self, folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Load a checkpoint's shards, or else its optimizer.safetensors, into the optimizer of a sharded model.

        Raises:
            CheckpointError: it is of another model, or damaged.
        """
        shards = folder / MOMENTS
        if not distributed.broadcast_from_rank0(shards.is_dir):
            checkpoint.ensure_whole_optimizer(folder)
        with distributed.raise_together():
            stored = tensors(shards) if shards.is_dir() else safetensors_stream.read(folder / checkpoint.OPTIMIZER)
            entries = list(checkpoint.optimizer_entries(folder, model, stored))
        into: dict[str, Tensor] = {}
        for name, (parameter, key, value) in zip(stored, entries, strict=True):
            if value.shape and value.shape == parameter.shape:
                into[name] = torch.zeros_like(parameter, dtype=value.dtype, requires_grad=False)
            else:  # AdamW has its step count on the CPU
                into[name] = torch.zeros(value.shape, dtype=value.dtype)
            optimizer.state[parameter][key] = into[name]
        self.load(shards if shards.is_dir() else folder, into)


def _require_all(folder: Path, written: Mapping[str, Any]) -> None:
    """Check that this process sees the files of all processes."""
    tensors_by_name = {name: tensor.shape for name, tensor in tensors(folder).items()}
    if tensors_by_name != {name: tuple(getattr(about, "size", ())) for name, about in written.items()}:
        raise RunError(
            f"{folder}: process 0 does not see the files of all processes. "
            "Give -sb a folder on a disk that all machines share."
        )


def tensors(folder: Path) -> dict[str, StoredTensor]:
    """The tensors in the files of a folder.

    Raises:
        CheckpointError: a file is damaged, or parts are missing.
    """
    parts: dict[str, dict[int, StoredTensor]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        places = _places(file)
        for name, part in safetensors_stream.read(file).items():
            start, *others = places.get(name) or [0]
            if any(others):
                raise CheckpointError(f"{file}: {name} is cut within its rows, which is not known here.")
            if part.numel or name not in parts:
                parts.setdefault(name, {})[start] = part
    return {name: _join(folder, name, tensors_by_name) for name, tensors_by_name in sorted(parts.items())}


def _join(folder: Path, name: str, parts: Mapping[int, StoredTensor]) -> StoredTensor:
    """The tensor with parts that start at these rows."""
    ordered = [(start, part) for start, part in sorted(parts.items()) if part.numel] or list(parts.items())[:1]
    first, rows = ordered[0][1], 0
    for start, part in ordered:
        if start != rows and part.numel:
            raise CheckpointError(f"{folder}: rows {rows} to {start} of {name} are missing.")
        rows += part.shape[0] if part.shape else 0
    shape = (rows, *first.shape[1:]) if first.shape else ()
    pieces = tuple(piece for _, part in ordered for piece in part.pieces if isinstance(piece, safetensors_stream.Piece))
    return StoredTensor(shape, first.dtype, pieces)


def _places(file: Path) -> dict[str, list[int]]:
    """Start of each part of a file in its tensor, by name."""
    try:
        with safe_open(file, "pt") as opened:
            noted = parse_json((opened.metadata() or {}).get(_PLACES, "{}"), file, CheckpointError)
        return {name: [int(place) for place in about[_START]] for name, about in noted.items()}
    except (SafetensorError, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{file}: damaged, not readable as a shard ({' '.join(str(error).split())[:120]})."
        ) from None


def read(folder: Path) -> zero_layout.Shards:
    """The content of a checkpoint with shards of FSDP2, in the form in which those of ZeRO are described.
    Its stage is 0.

    Raises:
        CheckpointError: something is damaged.
    """
    moments: dict[str, dict[str, StoredTensor]] = {}
    for name, tensor in tensors(folder / MOMENTS).items():
        parameter, key = name.rsplit(checkpoint.SEPARATOR, 1)
        moments.setdefault(parameter, {})[key] = tensor
    step = read_json(folder / "state.json", CheckpointError)["step"]
    count = len(list((folder / MOMENTS).glob("*.safetensors")))
    return zero_layout.Shards(folder, 0, count, step, safetensors_stream.read(folder / _WHOLE), {}, {}, {}, moments)
