"""Shows where the time and the memory of a step go: continues a copy of a run for some steps under torch's profiler.

The run itself stays as it is, also while it trains. The new folder then has, of each process (RANK),

  trace_RANK.json             the timeline, for https://ui.perfetto.dev
  key_averages_RANK.txt       operations by time; the first process prints its own
  memory_RANK.pickle          with a GPU: what held its memory when, for https://pytorch.org/memory_viz
  flight_recorder_RANK        with several GPUs: the last collectives, for torch's torchfrtrace

python -m src.training.profile RUN --steps 10
torchrun --nproc-per-node 8 -m src.training.profile RUN --steps 10 -o FOLDER --fsdp
"""

import argparse
import contextlib
import logging
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from src import distributed, torch_settings
from src.command_line import make_parser, run_command
from src.config import Places
from src.errors import ConfigError, RunError
from src.files import defect, writing
from src.registry import resolved_dict
from src.runs import plan
from src.runs.checkpoints import folder as checkpoints
from src.runs.context import Options, Run
from src.runs.history import branches, transaction
from src.runs.metadata import CONFIG, EXP_DICT, expand_run, read_exp_dict, read_status
from src.runs.run_dir import RunDir

ROOT = Path(__file__).resolve().parents[2]
COPY = "copy"
"""Folder, in the new one, of the copy of the run, as long as it trains."""
OPTIONS = (
    *("deepspeed", "fsdp", "fsdp_replicas", "fsdp_sharded_gradients", "tensor_parallel"),
    *("gradient_checkpointing", "offload_activations", "num_workers"),
)
"""Arguments that are those of trainval.py."""
ROWS = 25
"""Of the table that is printed."""
log = logging.getLogger("src.training.profile")


class Profiled(distributed.TrainingStopped):
    """All steps are measured: ends the training, without a checkpoint."""


class StepProfiler:
    """Measures `steps` optimizer steps after the first of a start, which allocates memory and compiles,
    into files of `folder`."""

    def __init__(self, folder: Path, steps: int) -> None:
        self.folder, self.steps = folder, steps
        self.gpu = torch.cuda.is_available()
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self.gpu else [])]
        self.profile = profile(activities=activities, acc_events=True)
        self.first: int | None = None

    def after_step(self, step: int) -> None:
        """Called when `step` optimizer steps are finished.

        Raises:
            Profiled: this was the last to be measured.
        """
        if self.first is None:
            self.first = step
            if self.gpu:
                torch.cuda.memory._record_memory_history()
            self.profile.start()
        elif step == self.first + self.steps:
            self._write()
            raise Profiled(distributed.Reason("profile", "limit"), everywhere=True, step=step)

    def _write(self) -> None:
        rank = distributed.rank()
        if self.gpu:
            torch.cuda.synchronize()
        self.profile.stop()
        order = "self_device_time_total" if self.gpu else "self_cpu_time_total"
        table = self.profile.key_averages().table(sort_by=order, row_limit=ROWS, max_name_column_width=60)
        with writing(self.folder):
            self.profile.export_chrome_trace(str(self.folder / f"trace_{rank}.json"))
            (self.folder / f"key_averages_{rank}.txt").write_text(table)
            if self.gpu:
                torch.cuda.memory._dump_snapshot(str(self.folder / f"memory_{rank}.pickle"))
                torch.cuda.memory._record_memory_history(enabled=None)
            if self.gpu and distributed.world_size() > 1:
                recorded: bytes = torch._C._distributed_c10d._dump_nccl_trace()  # pyright: ignore[reportAttributeAccessIssue]  in NCCL builds
                Path(f"{os.environ[torch_settings.DUMP]}{rank}").write_bytes(recorded)
        if distributed.is_main():
            log.info("%s", table)


def choose_checkpoint(run: Path, last: int, steps: int) -> Path | None:
    """The newest whole checkpoint that at least `steps` + 1 of `last` steps follow; None:
    the run must be trained from its start.

    Raises:
        RunError: it has fewer steps than that.
    """
    if steps + 1 > last:
        raise RunError(
            f"{run}: trains {last} steps, and the first of a start is not measured. Take --steps {last - 1} or fewer."
        )
    fit = (each for each in reversed(checkpoints.list_all(run)) if checkpoints.step_of(each) + steps + 1 <= last)
    return next((each for each in fit if defect(each) is None), None)


@contextlib.contextmanager
def open_copy(run: Path, item: plan.Planned, checkpoint: Path | None, folder: Path) -> Iterator[RunDir]:
    """A run in `folder` that goes on from `checkpoint`, whose files are linked;
    it is deleted at the end. Collective."""
    target = folder / COPY / item.exp_id
    opened: list[RunDir] = []

    def begin() -> None:
        with writing(target):
            target.mkdir(parents=True)
            for name in (EXP_DICT, CONFIG, branches.FILE):
                if (run / name).exists():
                    shutil.copy(run / name, target)
            if checkpoint:
                # Links, as a checkpoint may be as large as the disk: nothing here writes into a file of a checkpoint.
                shutil.copytree(
                    checkpoint.resolve(), target / "checkpoints" / checkpoint.name, copy_function=os.symlink
                )
        opened.append(
            RunDir.open(target.parent, item.exp, resolved_dict(item.recipe, key="recipe"), recipe=item.recipe)
        )

    distributed.broadcast_from_rank0(begin)
    try:
        with opened[0] if opened else RunDir.attach(target) as run_dir:
            yield run_dir
    finally:
        if distributed.is_main():
            shutil.rmtree(folder / COPY, ignore_errors=True)


def profile_run(run: Path, steps: int, folder: Path, data: Path, options: dict[str, Any]) -> None:
    """Write the profile of `steps` steps of the save directory `run` to the new folder `folder`. Collective.

    Raises:
        UserError: there is no such run, it trains too few steps, `folder` is there already, or what its training
            raises.
    """

    def begin() -> Path | None:
        if steps < 1:
            raise ConfigError(f"--steps: expected a number of steps >= 1, got {steps}.")
        if folder.exists():
            raise ConfigError(f"{folder}: is there already. Name a folder that is not.")
        if unfinished := transaction.describe_unfinished(run):
            raise RunError(f"{run}: {unfinished} is not finished. Start the run, or the command, again first.")
        if loop is None:
            raise RunError(f"{run}: trains nothing, so there is no step to profile.")
        status = read_status(run)
        last = (
            min(loop.steps, status.get("step", loop.steps)) if status["state"] == "done" else loop.steps
        )  # it may have stopped early
        found = choose_checkpoint(run, last, steps)
        with writing(folder):
            folder.mkdir(parents=True)
        log.info("%s: a copy continues from step %d.", run, checkpoints.step_of(found) if found else 0)
        return found

    item = plan.load(read_exp_dict(run), "", str(run))
    loop: Any = getattr(item.recipe, "loop", None)
    checkpoint = distributed.broadcast_from_rank0(begin)
    torch_settings.place_flight_recorder(folder)
    profiler = StepProfiler(folder, steps)
    with open_copy(run, item, checkpoint, folder) as copy, contextlib.suppress(Profiled):
        item.recipe.run(Run(copy, Places(data, run.parent), Options(**options, after_step=profiler.after_step)))
        raise RunError(f"{run}: its training has ended before {steps + 1} more steps.")
    log.info("%s: trace_*.json, key_averages_*.txt%s", folder, ", memory_*.pickle" * profiler.gpu)
    if not profiler.gpu:
        log.info("There is no GPU: no snapshot of its memory, and no flight recorder of NCCL.")
    elif distributed.world_size() > 1:
        log.info("%s*: the flight recorder of NCCL.", os.environ[torch_settings.DUMP])


def make_profile_parser() -> argparse.ArgumentParser:
    """The parser of this command."""
    parser = make_parser("src.training.profile", __doc__)
    parser.add_argument("run", type=Path, help="a save directory, or the beginning of its id")
    parser.add_argument("--steps", type=int, default=5, metavar="N", help="optimizer steps to measure (default: 5)")
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FOLDER", help="the new folder (default: results/profiles/ID)"
    )
    parser.add_argument(
        "--data_path",
        type=Path,
        default=ROOT / "results" / "data",
        metavar="DIR",
        help="prepared data sets (results/data)",
    )
    parser.add_argument("--deepspeed", type=Path, metavar="JSON", help="as of trainval.py, and so are these:")
    parser.add_argument(
        "--gradient_checkpointing", nargs="?", const="full", choices=torch_settings.GRADIENT_CHECKPOINTING
    )
    for name in ("fsdp", "fsdp_sharded_gradients", "offload_activations"):
        parser.add_argument(f"--{name}", action="store_true")
    for name in ("fsdp_replicas", "tensor_parallel"):
        parser.add_argument(f"--{name}", type=int, default=1, metavar="N")
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--num_workers", type=int, metavar="N")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    args = make_profile_parser().parse_args(argv)
    options = {name: getattr(args, name) for name in OPTIONS}

    def act() -> int:
        run = expand_run(args.run)
        folder = args.output or ROOT / "results" / "profiles" / run.name
        Options(**options).check_parts(distributed.world_size())
        distributed.share_data(args.tensor_parallel)
        try:
            with distributed.stoppable(), distributed.session(args.deterministic):
                profile_run(run, args.steps, folder, args.data_path, options)
        except distributed.TrainingStopped as stopped:
            log.info("%s: stopped.", stopped.reason.by)
            return stopped.exit_code
        return 0

    return run_command(act, logging.INFO if distributed.is_main() else logging.ERROR)


if __name__ == "__main__":
    sys.exit(main())
