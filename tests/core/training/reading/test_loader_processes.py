"""Processes that read for a training: they end with it, however it ends."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from src.data.orders import order_of
from src.training import loader
from src.training.config import LoopConfig
from src.training.state import State
from tests.conftest import ROOT
from tests.core.launch.test_status import wait_until

READING = """
import os, signal
import torch
from torch.utils.data import DataLoader
from src.support import distributed

class Large(torch.utils.data.Dataset):
    def __len__(self):
        return 100
    def __getitem__(self, index):
        return bytes(1 << 20)  # more than a pipe holds

batches = DataLoader(Large(), num_workers=1, collate_fn=list, worker_init_fn=distributed.ignore_stops)
stream = iter(batches)
next(stream)
print(os.getpid(), flush=True)
signal.pause()
"""


@pytest.mark.slow
def test_a_worker_ends_with_a_process_that_was_killed():
    """It would wait for ever to hand over what it has read, and keep the files of the shard cache that it has open."""
    reader = subprocess.Popen([sys.executable, "-c", READING], cwd=ROOT, stdout=subprocess.PIPE)
    assert reader.stdout
    reader.stdout.readline()
    (worker,) = psutil.Process(reader.pid).children()
    os.kill(reader.pid, signal.SIGKILL)
    reader.wait()
    reader.stdout.close()
    _, alive = psutil.wait_procs([worker], timeout=60)
    for process in alive:
        process.kill()
    assert not alive


class RecordedData:
    """Samples that leave a file behind when they are read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def sample(self, epoch: int, index: int) -> int:
        (self.folder / f"{epoch}-{index}").touch()
        return index

    def collate(self, samples: list[int]) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.tensor(samples)[:, None], "loss_mask": torch.ones(len(samples), 1, dtype=torch.bool)}

    def __len__(self) -> int:
        return 64


@pytest.mark.parametrize("workers", [1, 2])
def test_the_next_step_is_read_while_one_trains(tmp_path: Path, workers: int):
    """Eight micro-batches of one: torch reads two ahead by itself, and the others would be waited for in each step."""
    values = {"steps": 4, "sequences_per_step": 8, "micro_batch": 1, "learning_rate": 1e-3, "eval_every": 4}
    config = LoopConfig.model_validate({**values, "best_metric": "val_loss", "best_mode": "min"})
    dataset: Any = RecordedData(tmp_path)
    order = order_of(dataset, 0, config.sequences_per_step, config.steps)
    reader = loader.StepLoader(dataset, order, config, torch.device("cpu"), num_workers=workers)
    with contextlib.closing(reader.steps(State(inputs={}))) as steps:
        assert len(next(steps).batches) == 8
        wait_until(lambda: len(list(tmp_path.iterdir())) >= 16)
