"""Writes or reads a checkpoint's shards of FSDP2 with numbers that are known. For torchrun; test_dcp_shards.py
compares.

python tests/core/training/checkpointing/shared_store.py FOLDER PROCESSES_BEFORE [REPLICAS [APART]]

PROCESSES_BEFORE: 0 writes.

APART: each into a folder of its own, as if it were another disk. Writing, each process puts into <folder>/peak-RANK the
bytes by which its memory has grown at most, and those of all moments.
"""

import json
import sys
import zlib
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[4]))

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from src.errors import CheckpointError
from src.support import distributed
from src.support.weights import trained_weights
from src.training.checkpointing import checkpoint
from src.training.checkpointing.shard_store import ShardStore


def make_sharded(replicas: int) -> tuple[nn.Module, torch.optim.AdamW]:
    """Of some tensors there are fewer rows than processes."""
    wide = [nn.Linear(1024, 1024, bias=False) for _ in range(12)]
    model = nn.Sequential(*wide, nn.Linear(1024, 7), nn.BatchNorm1d(7), nn.Linear(7, 3), nn.Linear(3, 1))
    distributed.ensure_group()
    shape = (replicas, distributed.world_size() // replicas)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replica", "shard"))
    for layer in model:
        fully_shard(layer, mesh=mesh if replicas > 1 else mesh["shard"])
    fully_shard(model, mesh=mesh if replicas > 1 else mesh["shard"])
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def expected_tensor(name: str, tensor: Tensor) -> Tensor:
    """The numbers of a tensor."""
    numbers = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))
    return numbers.to(tensor.dtype)


def fill(tensors: dict[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        numbers = expected_tensor(name, tensor)
        tensor.copy_(
            distribute_tensor(numbers, tensor.device_mesh, tensor.placements)
            if isinstance(tensor, DTensor)
            else numbers
        )


def compare(tensors: dict[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        assert torch.equal(full, expected_tensor(name, full)), name


def kilobytes(field: str) -> int:
    """Of this process's memory: VmRSS now, VmHWM at most."""
    return next(
        int(line.split()[1]) for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field)
    )


def main(folder: Path, before: int, replicas: int = 1, apart: int = 0) -> None:
    with distributed.session(), torch.no_grad():
        model, optimizer = make_sharded(replicas)
        store = ShardStore()
        if before:
            store.load_optimizer(folder, model, optimizer)
            store.load(folder, weights := trained_weights(model))
            moments = checkpoint.optimizer_tensors(model, optimizer)
            assert len(moments) == 3 * len(list(model.parameters()))
            compare(moments)
            compare(weights)
            with pytest.raises(
                CheckpointError, match=r"cannot be loaded \(Missing key in checkpoint state_dict: another\.\)"
            ):
                store.load(folder, {"another": torch.zeros(1)})
            return
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        weights, moments = trained_weights(model), checkpoint.optimizer_tensors(model, optimizer)
        fill(weights)
        fill(moments)
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        start = kilobytes("VmRSS")
        rank_folder = folder / str(distributed.rank()) if apart else folder
        rank_folder.mkdir(exist_ok=True)
        store.stage(weights, moments)(rank_folder)
        peak_bytes = 1024 * (kilobytes("VmHWM") - start)
        whole = sum(tensor.numel() * tensor.element_size() for tensor in moments.values())
        (folder / f"peak-{distributed.rank()}").write_text(json.dumps([peak_bytes, whole]))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
