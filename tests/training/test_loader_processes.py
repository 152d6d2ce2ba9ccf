"""Processes that read for a training: they end with it, however it ends."""

import os
import signal
import subprocess
import sys

import psutil

from tests.conftest import ROOT

READING = """
import os, signal
import torch
from torch.utils.data import DataLoader
from src import distributed

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


def test_a_worker_ends_with_a_process_that_was_killed():
    """It would wait for ever to hand over what it has read, and keep the files of the shard cache that it has open."""
    started = subprocess.Popen([sys.executable, "-c", READING], cwd=ROOT, stdout=subprocess.PIPE)
    assert started.stdout
    started.stdout.readline()
    (worker,) = psutil.Process(started.pid).children()
    os.kill(started.pid, signal.SIGKILL)
    started.wait()
    started.stdout.close()
    _, alive = psutil.wait_procs([worker], timeout=60)
    for process in alive:
        process.kill()
    assert not alive
