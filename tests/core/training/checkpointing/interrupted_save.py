"""A training shared by FSDP2, one process of which ends by SIGKILL where it opens a certain file of a checkpoint. For
torchrun.

python tests/core/training/checkpointing/interrupted_save.py FOLDER [RANK STEP FILE]

FOLDER has data/; FILE is the beginning of a file name.
"""

import os
import signal
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[4]))

from src.data.text import tokenizers
from src.runs.context import Options
from src.support import distributed
from src.training.checkpointing.checkpoint import CheckpointMetadata
from src.training.loop import fit
from src.training.spec import TrainSpec
from tests.core.training import small


def main(folder: Path, rank: int = -1, step: int = 0, file: str = "") -> None:
    """Train, or go on."""

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(arguments[0], str):
            path = Path(arguments[0])
            if path.name.startswith(file) and any(part.startswith(f".step-{step:08d}.") for part in path.parts):
                os.kill(os.getpid(), signal.SIGKILL)

    if distributed.rank() == rank:
        sys.addaudithook(watch)
    with distributed.session(), small.opened_together(folder, Options(fsdp=True)) as run:
        about = CheckpointMetadata({}, tokenizers.load(run.places.data / "toy_tokenizer"))
        spec = TrainSpec(small.Line(), about, small.Numbers(), {}, small.loss, lambda _: {"val_loss": 0.0})
        fit(spec, run, small.CONFIG, seed=0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:4]), *sys.argv[4:])
