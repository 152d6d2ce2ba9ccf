"""Write DeepSpeed's shards so that other processes do not wait for one that cannot write. Imports DeepSpeed."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine

from src.errors import RunError
from src.support import distributed


class ShardWriter(TorchCheckpointEngine):
    """Writes as DeepSpeed does, but defers write errors to `check`, where all processes raise them together."""

    def __init__(self) -> None:
        super().__init__()
        self._written_sizes: dict[str, int] = {}
        self._error: RunError | None = None

    def save(self, state_dict: Any, path: str) -> None:
        """Write one shard, or remember the error."""
        try:
            with open(path, "wb") as file:
                torch.save(state_dict, file)
        except (OSError, RuntimeError) as error:
            reason = next((e for e in _causes(error) if isinstance(e, OSError)), None)
            if reason is None:
                raise
            self._error = _write_error(path, reason)
        else:
            self._written_sizes[path] = Path(path).stat().st_size

    def check(self) -> None:
        """Check that every process has written all its shards, and that rank 0 sees complete files. Collective.

        Raises:
            RunError: the disk refuses a shard, or processes see different disks; on every rank.
        """
        sizes, error = self._written_sizes, self._error
        self._written_sizes, self._error = {}, None
        with distributed.raise_together():
            if error:
                raise error
        everyone = distributed.all_gather_list([(distributed.rank(), *item) for item in sizes.items()])
        with distributed.raise_together():
            for rank, path, size in everyone if distributed.is_main() else ():
                if not Path(path).is_file() or Path(path).stat().st_size != size:
                    raise RunError(
                        f"{path}: written by process {rank}, but missing or incomplete for process 0. "
                        "Set -sb to a folder on a disk shared by all machines."
                    )


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield `error` and its causes. torch reports a broken archive, caused by the operating system's error."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _write_error(path: str, error: OSError) -> RunError:
    reason = error.strerror or str(error)
    return RunError(f"{path}: cannot write: {reason}. Nothing complete was lost; make room or choose another folder.")
