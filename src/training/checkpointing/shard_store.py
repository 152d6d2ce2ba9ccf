"""Write and load FSDP2's shards with torch.distributed.checkpoint (DCP). Each process writes its part, and any number
of processes can read them.

The parts are safetensors files, as the pickled index of DCP's own format can run code when it is read.
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
from safetensors import SafetensorError
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
from src.support import distributed
from src.training.checkpointing import checkpoint, safetensors_stream
from src.training.checkpointing.dcp_shards import MOMENTS, PLACES, START, tensors

_WEIGHTS, _WHOLE = "weights", "model.safetensors"


class _Writer(HuggingFaceStorageWriter):
    """Writes a process's shards like its base class, but without two further copies in memory."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write one file and sync it, as process 0 cannot sync the disk of another machine."""
        shards: dict[str, Any] = {item.index.fqn: planner.resolve_data(item) for item in plan.items}
        places = {item.index.fqn: {START: list(item.index.offset or ())} for item in plan.items}
        if shards:
            file = Path(self.path) / f"shard-{plan.storage_data['shard_index']:05d}.safetensors"
            save_file(shards, file, {PLACES: json.dumps(places)})
            with open(file, "rb") as shard_file:
                os.fsync(shard_file.fileno())
        done: Future[list[WriteResult]] = Future()
        done.set_result([])
        return done


_groups: dict[str, Any] = {}
"""The group of all processes ("all") and the group for background writes ("own")."""


def _background_group() -> Any:
    """One group for all trainings of this process, as a group has threads and open files. Collective."""
    if _groups.get("all") is not dist.group.WORLD:
        # A day, as disks can be slow.
        _groups["all"], _groups["own"] = (
            dist.group.WORLD,
            dist.new_group(backend="gloo", timeout=timedelta(days=1)),
        )
    return _groups["own"]


class ShardStore:
    """Writes and reads the shards of this process. All methods and the constructor are collective.

    Background writes have their own group, so that their messages never mix with those of the training.
    """

    def __init__(self) -> None:
        self.group = _background_group()
        pinned = torch.cuda.is_available()
        self.stager = DefaultStager(
            StagingOptions(pinned, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=False)
        )

    def stage(self, weights: dict[str, Tensor], moments: dict[str, Tensor]) -> Callable[[Path], None]:
        """Copy this process's shards to the CPU; returns a function that writes them into a folder on a shared disk, in
        a thread.

        Moments are written as shards, and weights as one file with the same bytes as in an unsharded training, for
        exports, evaluations and child experiments. Each process writes its part, and rank 0 joins the parts on disk.
        The next call overwrites the copies.

        The returned function raises:
            RunError: the disk refuses a process, or processes see different disks; on every rank.
        """
        copies = self.stager.stage({MOMENTS: moments, _WEIGHTS: weights})
        assert isinstance(copies, dict)

        def write(folder: Path) -> None:
            metadata = {name: self._write(folder / name, shards) for name, shards in copies.items()}
            if distributed.is_main():  # no collective call follows, so no process waits for one that raises here
                for name, about in metadata.items():
                    _require_all(folder / name, about)
                safetensors_stream.write(folder / _WHOLE, tensors(folder / _WEIGHTS))
                shutil.rmtree(folder / _WEIGHTS)

        return write

    def _write(self, folder: Path, shards: dict[str, Tensor]) -> Mapping[str, Any]:
        """Write shards; returns the metadata of the full tensors, by name."""
        try:
            return save(
                shards, storage_writer=_Writer(str(folder), save_distributed=True), process_group=self.group
            ).state_dict_metadata
        except CheckpointException as error:
            reasons = [reason for reason, _ in error.failures.values()]
            disk_error = next((reason for reason in reasons if isinstance(reason, (OSError, SafetensorError))), None)
            if disk_error is None:
                raise RuntimeError(str(error)) from error
            raise RunError(
                f"{folder}: cannot write: {disk_error}. Nothing complete was lost; make room or choose another folder."
            ) from error

    def load(self, folder: Path, into: dict[str, Tensor]) -> None:
        """Load tensors or shards from the safetensors files of a folder. Each process reads only its part.

        Raises:
            CheckpointError: a file is missing or damaged.
        """
        try:
            load(into, storage_reader=HuggingFaceStorageReader(str(folder)), process_group=self.group)
        except CheckpointException as error:
            reason = " ".join(str(next(iter(error.failures.values()))[0]).split())
            refusal = CheckpointError(f"{folder}: cannot be loaded ({reason[:300]}).")
            refusal.everywhere = True
            raise refusal from error

    def load_optimizer(self, folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Load a checkpoint's optimizer shards, or its optimizer.safetensors, into the optimizer of a sharded model.

        Raises:
            CheckpointError: it is for another model, or damaged.
        """
        shards = folder / MOMENTS
        if not distributed.broadcast_from_rank0(shards.is_dir):
            checkpoint.ensure_whole_optimizer(folder)
        with distributed.raise_together():
            stored_tensors = (
                tensors(shards) if shards.is_dir() else safetensors_stream.read(folder / checkpoint.OPTIMIZER)
            )
            entries = list(checkpoint.optimizer_entries(folder, model, stored_tensors))
        into: dict[str, Tensor] = {}
        for name, (parameter, key, value) in zip(stored_tensors, entries, strict=True):
            if value.shape and value.shape == parameter.shape:
                into[name] = torch.zeros_like(parameter, dtype=value.dtype, requires_grad=False)
            else:  # AdamW has its step count on the CPU
                into[name] = torch.zeros(value.shape, dtype=value.dtype)
            optimizer.state[parameter][key] = into[name]
        self.load(shards if shards.is_dir() else folder, into)


def _require_all(folder: Path, metadata: Mapping[str, Any]) -> None:
    """Check that this process sees the files of all processes."""
    tensors_by_name = {name: tensor.shape for name, tensor in tensors(folder).items()}
    if tensors_by_name != {name: tuple(getattr(about, "size", ())) for name, about in metadata.items()}:
        raise RunError(
            f"{folder}: process 0 does not see the files of all processes. "
            "Set -sb to a folder on a disk shared by all machines."
        )
