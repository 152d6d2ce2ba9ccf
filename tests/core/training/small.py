"""A training of a second: four numbers to learn, on the real loop."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from src.data.text import tokenizers
from src.experiments.config import Places
from src.runs.context import Options, Run
from src.runs.run_dir import RunDir
from src.support import distributed
from src.training.checkpointing.checkpoint import CheckpointMetadata
from src.training.config import LoopConfig
from src.training.loop import fit
from src.training.loss import Loss
from src.training.spec import Experience, TrainSpec
from src.training.state import State
from tests import toy

EXP: dict[str, Any] = {"recipe": "small"}
CONFIG = LoopConfig(steps=12, sequences_per_step=4, micro_batch=2, learning_rate=0.01, eval_every=4)


class Numbers:
    """Sample i is the token i; each appears once in an epoch."""

    fingerprint = "numbers"

    def __len__(self) -> int:
        return 32

    def sample(self, epoch: int, index: int) -> int:
        return index

    def collate(self, samples: list[int]) -> dict[str, Tensor]:
        ids = torch.tensor([[0, index] for index in samples])
        return {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids).bool(),
            "loss_mask": torch.tensor([[False, True]] * len(samples)),
        }


class Line(nn.Module):
    """Guesses half the token's number, and always the same."""

    def __init__(self) -> None:
        super().__init__()
        self.guess = nn.Parameter(torch.zeros(4))

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        return ((self.guess.sum() - batch["input_ids"][:, 1] / 32) ** 2).sum()


def loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Sum of squares over the batch."""
    return model(batch)


@contextlib.contextmanager
def open_run(folder: Path, options: Options | None = None, exp: dict[str, Any] = EXP) -> Iterator[Run]:
    """The run below `folder`, new or to be continued; `folder` has data/toy_tokenizer."""
    with RunDir.open(folder / "runs", exp, exp) as run_dir:
        yield Run(run_dir, Places(folder / "data", folder / "runs"), options or Options())


@contextlib.contextmanager
def opened_together(folder: Path, options: Options | None = None, exp: dict[str, Any] = EXP) -> Iterator[Run]:
    """`opened` by rank 0; the other processes attach. Collective."""
    options = options or Options()
    with contextlib.ExitStack() as stack:
        runs: list[Run] = []

        def begin() -> Path:
            runs.append(stack.enter_context(open_run(folder, options, exp)))
            return runs[0].path

        path = distributed.broadcast_from_rank0(begin)
        yield runs[0] if runs else Run(RunDir.attach(path), Places(folder / "data", folder / "runs"), options)


def train(
    run: Run,
    config: LoopConfig = CONFIG,
    learn: Loss = loss,
    evaluate: Callable[[], Mapping[str, float]] = lambda: {"val_loss": 0.0},
    *,
    inputs: Mapping[str, str] = {},
    experience: Experience | None = None,
    data: Any = None,
) -> tuple[State, Line]:
    """The final state, and the model that was trained. data: None: `Numbers`."""
    torch.manual_seed(0)
    model = Line()
    about = CheckpointMetadata({}, tokenizers.load(run.places.data / "toy_tokenizer"))
    with distributed.stoppable():
        spec = TrainSpec(model, about, data or Numbers(), inputs, learn, lambda _: evaluate(), experience=experience)
        return fit(spec, run, config, seed=0), model


def write_data(folder: Path) -> Path:
    """What `opened` needs; returns `folder`."""
    toy.write_data(folder / "data")
    return folder
