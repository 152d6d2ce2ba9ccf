"""A training on packed rows whose processes write down what they read. For torchrun; test_world_sizes.py compares.

python tests/core/training/reading/read_keys.py FOLDER [KILL_IN]      FOLDER has data/; process 1 ends by SIGKILL in
this step
"""

import itertools
import json
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[4]))

import torch
from torch import Tensor

from src.data.orders import Key, RankShare
from src.data.packing.dataset import PackedDataset, Sample
from src.data.text import tokenizers
from src.experiments.registry import DATASETS, MODELS, bind
from src.runs import ledger
from src.runs.context import Options
from src.support import distributed
from src.training.checkpointing.checkpoint import CheckpointMetadata
from src.training.loop import fit
from src.training.loss import causal_lm_loss
from src.training.spec import TrainSpec
from tests.core.training import small
from tests.core.training.reading import test_packed_training

CONFIG = test_packed_training.CONFIG.model_copy(update={"steps": 10, "sequences_per_step": 8, "eval_every": 10})


class RecordedData(PackedDataset):
    """Packed rows that record the requested keys."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.requested_keys: list[Key] = []

    def sample(self, epoch: int, index: int, *more: int) -> Sample:
        self.requested_keys.append((epoch, index, *more))
        return super().sample(epoch, index, *more)


def main(folder: Path, kill_in: int = 0) -> None:
    """Train, or resume. Each process appends {"step", "keys"} of each step to <folder>/keys-RANK.jsonl."""
    with distributed.session(), small.opened_together(folder, Options(log_every=2)) as run:
        torch.manual_seed(0)
        model = bind(MODELS, test_packed_training.MODEL).build(run.places)
        tokenizer = tokenizers.load(run.places.data / "toy_tokenizer")
        dataset: Any = bind(DATASETS, test_packed_training.DATA).build(run.places, tokenizer, "train", 0)
        data, calls = RecordedData(dataset.config, dataset.documents), itertools.count()
        passes = RankShare(
            CONFIG.sequences_per_step, CONFIG.micro_batch, distributed.rank(), distributed.world_size()
        ).passes

        def loss(model: Any, batch: Mapping[str, Tensor]) -> Tensor:
            finished, number = divmod(next(calls), passes)
            if number == 0:
                step = (
                    [event["step"] for event in ledger.read(run.path) if event["event"] == "start"][-1] + finished + 1
                )
                with open(folder / f"keys-{distributed.rank()}.jsonl", "a") as file:
                    file.write(json.dumps({"step": step, "keys": data.requested_keys}) + "\n")
                data.requested_keys = []
                if step == kill_in and distributed.rank() == 1:
                    os.kill(os.getpid(), signal.SIGKILL)
            return causal_lm_loss(model, batch)

        fit(
            TrainSpec(model, CheckpointMetadata({}, tokenizer), data, {}, loss, lambda _: {"val_loss": 0.0}),
            run,
            CONFIG,
            seed=0,
        )


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
