"""Profile the time and memory of some optimizer steps with torch's profiler.

Each process (RANK) writes to the save directory:

profile/trace_RANK.json           timeline for https://ui.perfetto.dev
profile/key_averages_RANK.txt     operations by time; rank 0 also logs its own
profile/memory_RANK.pickle        with a GPU: memory over time for https://pytorch.org/memory_viz
"""

import logging
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from src.files import writing
from src.support import distributed

FOLDER = "profile"
ROWS = 25
"""Rows of the table of operations."""
log = logging.getLogger(__name__)


class StepProfiler:
    """Profiles `steps` optimizer steps after the first one, which allocates memory and compiles."""

    def __init__(self, run: Path, steps: int) -> None:
        """run: save directory. steps: 0 turns profiling off."""
        self.folder, self.steps = run / FOLDER, steps
        self.gpu = torch.cuda.is_available()
        self.first: int | None = None

    def after_step(self, step: int) -> None:
        """Call it when `step` optimizer steps are finished.

        Raises:
            RunError: the disk refuses.
        """
        if self.first is None and self.steps:
            self.first = step
            if self.gpu:
                torch.cuda.memory._record_memory_history()
            self.profile = profile(
                activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self.gpu else [])], acc_events=True
            )
            self.profile.start()
        elif self.first is not None and step == self.first + self.steps:
            self._write()

    def _write(self) -> None:
        rank = distributed.rank()
        if self.gpu:
            torch.cuda.synchronize()
        self.profile.stop()
        order = "self_device_time_total" if self.gpu else "self_cpu_time_total"
        table = self.profile.key_averages().table(sort_by=order, row_limit=ROWS, max_name_column_width=60)
        with writing(self.folder):
            self.folder.mkdir(exist_ok=True)
            self.profile.export_chrome_trace(str(self.folder / f"trace_{rank}.json"))
            (self.folder / f"key_averages_{rank}.txt").write_text(table)
            if self.gpu:
                torch.cuda.memory._dump_snapshot(str(self.folder / f"memory_{rank}.pickle"))
                torch.cuda.memory._record_memory_history(enabled=None)
        if distributed.is_main():
            log.info("%s\n%s: steps %d to %d", table, self.folder, self.first + 1, self.first + self.steps)  # type: ignore[operator]  set in `after_step`
