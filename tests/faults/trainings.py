"""Trainings to kill that no experiment describes, as their losses report named sums. For torchrun; test_faults.py
compares what they leave.

python tests/faults/trainings.py KIND FOLDER      FOLDER has data/, as test_packed_training.write_data makes it
"""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch import Tensor

from src.data.packing.dataset import PackedDataset
from src.data.text import tokenizers
from src.experiments.registry import DATASETS, MODELS, bind
from src.runs.context import Options, Run
from src.support import distributed
from src.training.checkpointing.checkpoint import CheckpointMetadata
from src.training.loop import fit
from src.training.loss import causal_lm_loss, watch_cross_entropy
from src.training.spec import TrainSpec
from tests.core.training import small
from tests.core.training.reading import test_counts, test_packed_training
from tests.systems.assistants import test_experience

STEPS = {"packed": 100, "replies": 400, "rollouts": 400}


class Halves(PackedDataset):
    """Packed rows with two sources, by the number of their first document."""

    sources = ("even", "odd")

    def sample_source(self, *key: Any) -> str:
        return self.sources[key[1] % 2]


def hits_and_loss(model: Any, batch: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, tuple[Tensor, Tensor]]]:
    """The loss of a language model, and how often its guess is right."""
    values: list[Tensor] = []

    def count(logits_NV: Tensor, targets_N: Tensor) -> None:
        mask = targets_N >= 0
        values.append(torch.stack([(logits_NV.argmax(-1) == targets_N)[mask].sum(), mask.sum()]))

    with watch_cross_entropy(count):
        loss = causal_lm_loss(model, batch)
    return loss, {"right": (values[0][0], values[0][1])}


def packed(run: Run) -> None:
    torch.manual_seed(0)
    model = bind(MODELS, test_packed_training.MODEL).build(run.places)
    tokenizer = tokenizers.load(run.places.data / "toy_tokenizer")
    dataset: Any = bind(DATASETS, test_packed_training.DATA).build(run.places, tokenizer, "train", 0)
    config = test_packed_training.CONFIG.model_copy(update={"steps": STEPS["packed"], "eval_every": 20})
    about, data = CheckpointMetadata({}, tokenizer), Halves(dataset.config, dataset.documents)
    fit(TrainSpec(model, about, data, {}, hits_and_loss, lambda _: {"val_loss": 0.0}), run, config, seed=0)


def replies(run: Run) -> None:
    test_counts.train(run, test_counts.config(steps=STEPS["replies"], eval_every=40, sequences_per_step=8))


def rollouts(run: Run) -> None:
    test_experience.train(
        run, config=test_experience.CONFIG.model_copy(update={"steps": STEPS["rollouts"], "eval_every": 40})
    )


def main(kind: str, folder: Path) -> None:
    """Train, or go on."""
    with distributed.session(), distributed.stoppable(), small.opened_together(folder, Options(log_every=4)) as run:
        {"packed": packed, "replies": replies, "rollouts": rollouts}[kind](run)
        if distributed.is_main():
            run.dir.set_status("done")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
