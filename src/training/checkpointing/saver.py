"""Write checkpoints of a running training, atomically and, where possible, in the background."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from src import files
from src.errors import UserError
from src.runs import ledger
from src.runs.checkpoints import checkpoints
from src.runs.checkpoints.retention import Rotation
from src.runs.context import Run
from src.support import distributed
from src.training.checkpointing import checkpoint
from src.training.config import LoopConfig
from src.training.parallel.engine import Engine


class Writer:
    """One background write. `wait` re-raises its exception."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(self, write: Callable[[], None]) -> None:
        """Start a write. Call `wait` for the previous one first."""
        assert self._thread is None

        def run() -> None:
            try:
                write()
            except BaseException as error:  # noqa: BLE001  re-raised in `wait`
                self._error = error

        self._thread = threading.Thread(target=run, name="checkpoint")
        self._thread.start()

    @property
    def failed(self) -> bool:
        """Whether `wait` will raise."""
        return self._error is not None

    def wait(self) -> None:
        """Block until the write is finished, and raise its exception once."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if (error := self._error) is not None:
            self._error = None
            raise error


@dataclass(frozen=True)
class LoopSnapshot:
    """The loop's state at the step of a checkpoint."""

    step: int
    best_step: int | None
    state: dict[str, Any]
    more_tensors: dict[str, dict[str, Tensor]]
    """By file name: those of `spec.Experience` and `loop.ema`. Empty dicts make no file."""


class Saver:
    """Writes checkpoints in the background, marks the best one and applies retention. All methods are collective."""

    def __init__(self, run: Run, about: checkpoint.CheckpointMetadata, config: LoopConfig) -> None:
        self.run, self.about = run, about
        self.rotation = Rotation(run.path, run.options.keep, config.best_metric, config.best_mode)
        self.writer = Writer()
        self.origin = distributed.broadcast_from_rank0(lambda: checkpoint.origin(run.path))
        self.step = 0
        """Step of the newest checkpoint, including the one being written."""

    def save(self, engine: Engine, snapshot: LoopSnapshot) -> None:
        """Write a checkpoint, update the best pointer and delete old checkpoints. Returns when tensors are copied or
        shards written.

        Raises:
            RunError: the disk refuses this or the previous checkpoint, or another process has taken over the save
                directory.
        """
        self.wait()
        if write := engine.stage_shards():
            self._start_shards(snapshot, write)
            self.step = snapshot.step
            return
        weights, moments = engine.model_state(), engine.optimizer_state()
        if moments is None:
            self._save_shards(engine, snapshot, weights)
        elif distributed.is_main():
            self.writer.start(lambda: self._write(snapshot, weights, moments))
        self.step = snapshot.step

    def wait(self) -> None:
        """Wait for the checkpoint being written; its error is raised on every rank."""
        distributed.broadcast_from_rank0(self.writer.wait)
        self.writer.wait()  # writes of other ranks end no later than that of rank 0

    def load_best(self, engine: Engine) -> None:
        """Load the weights of the best checkpoint, if any, into the model after the training.

        Raises:
            CheckpointError: it is missing or damaged.
        """
        best = distributed.broadcast_from_rank0(lambda: checkpoints.best(self.run.path))
        if best is not None and checkpoints.step_of(best) != self.step:
            engine.load_weights(best / "model.safetensors")

    @contextlib.contextmanager
    def close_on_exit(self) -> Iterator[None]:
        """Wait for the current write at the end of the block, also after an exception."""
        try:
            yield
        except BaseException:
            with contextlib.suppress(UserError):  # the error that ended the training matters more
                self.writer.wait()
            raise
        self.wait()

    def _write(self, snapshot: LoopSnapshot, weights: dict[str, Tensor], moments: dict[str, Tensor]) -> None:
        self.run.dir.confirm()
        with checkpoint.begin(self.run.path, snapshot.step) as folder:
            self._write_folder(folder, snapshot, weights, moments)
        self._publish(snapshot)

    def _start_shards(self, snapshot: LoopSnapshot, write: Callable[[Path], None]) -> None:
        """Every process writes its part into one folder, in a thread. Rank 0 then writes the other files."""
        stack = contextlib.ExitStack()

        def begin() -> Path:
            self.run.dir.confirm()
            return stack.enter_context(checkpoint.begin(self.run.path, snapshot.step))

        def work() -> None:
            with stack:
                write(folder)
                if distributed.is_main():
                    self._write_folder(folder, snapshot, None, None)
            if distributed.is_main():
                self._publish(snapshot)

        folder = distributed.broadcast_from_rank0(begin)
        self.writer.start(work)

    def _save_shards(self, engine: Engine, snapshot: LoopSnapshot, weights: dict[str, Tensor]) -> None:
        """Every process writes its part into one folder."""
        with contextlib.ExitStack() as stack:

            def begin() -> Path:
                self.run.dir.confirm()
                folder = stack.enter_context(checkpoint.begin(self.run.path, snapshot.step))
                self._write_folder(folder, snapshot, weights, None)
                return folder

            engine.save_shards(distributed.broadcast_from_rank0(begin))
            distributed.broadcast_from_rank0(stack.close)
        distributed.broadcast_from_rank0(lambda: self._publish(snapshot))

    def _write_folder(
        self, folder: Path, snapshot: LoopSnapshot, weights: dict[str, Tensor] | None, moments: dict[str, Tensor] | None
    ) -> None:
        self.run.dir.scores.sync()  # so that the rows before a checkpoint survive a crash
        checkpoint.write(folder, weights, moments, snapshot.state, self.about)
        for name, tensors in snapshot.more_tensors.items():
            if tensors:
                save_file(tensors, folder / name)
        for name, content in self.origin.items():
            files.write_atomic(folder / name, content)

    def _publish(self, snapshot: LoopSnapshot) -> None:
        ledger.append(self.run.path, ledger.event("save", step=snapshot.step))
        if snapshot.best_step == snapshot.step:
            checkpoints.mark_best(self.run.path, snapshot.step)
        self.run.dir.confirm()  # the write can take long
        self.rotation.rotate(snapshot.step, snapshot.best_step)
