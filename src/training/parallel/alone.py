"""One process that shares a model with nobody, for libraries that ask for a process group all the same."""

import os

import torch
import torch.distributed as dist
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]  it is in torch's manual

from src import distributed


def ensure_group() -> None:
    """Make a process group of one where the launcher has made none. It ends with the process."""
    if distributed.world_size() == 1 and not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
        os.environ.setdefault("OMPI_COMM_WORLD_LOCAL_RANK", "0")  # where DeepSpeed looks when nobody launched it
