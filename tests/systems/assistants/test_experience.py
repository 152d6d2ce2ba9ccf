"""A training that makes what it reads with its own model, and continues bit for bit in the middle of that."""

import os
import signal
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from src.data.orders import Cursor, MicroBatch, RankShare
from src.data.text import tokenizers
from src.runs.context import Options, Run
from src.support import distributed
from src.training.checkpointing.checkpoint import CheckpointMetadata
from src.training.config import LoopConfig
from src.training.divergence.detector import Config as Divergence
from src.training.loop import fit
from src.training.parallel.engine import Engine
from src.training.spec import TrainSpec
from src.training.state import State
from tests.core.training import small
from tests.core.training.divergence.test_guard import LEAST, documents, findings
from tests.core.training.reading.test_counts import Guess

CONFIG = LoopConfig(steps=12, sequences_per_step=4, micro_batch=2, learning_rate=0.01, eval_every=6)
SIZE = 12
"""Samples of one rollout: three steps."""


class Rollouts(small.Numbers):
    """Each rollout holds what the model then guesses, a part on each process, and its samples are read three steps
    long."""

    fingerprint = "rollouts"
    engine: Engine

    def __init__(self) -> None:
        self.buffer = torch.empty(0)
        self.rolled_out: list[int] = []

    # spec.Experience
    def begin(self, engine: Engine) -> None:
        self.engine = engine

    def tensors(self) -> Mapping[str, Tensor]:
        return {"guesses": self.buffer}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        self.buffer = tensors["guesses"]

    def seconds(self) -> Mapping[str, float]:
        """None are told."""
        return {}

    # orders.OrderedDataset
    def order(self, seed: int, per_step: int, steps: int, branches: Sequence[Any]) -> "Rollouts":
        return self

    # orders.Order
    def micro_batches(self, first_step: int, share: RankShare, cursor: Cursor) -> Iterator[MicroBatch]:
        iteration, num_read = cursor.get("iteration", -1), cursor.get("taken", SIZE)
        while True:
            if num_read == SIZE:
                iteration, num_read = iteration + 1, 0
                self.rolled_out.append(iteration)
                local_size = SIZE // share.world_size
                with self.engine.generating() as model:
                    assert not model.training
                    part = model.guess.sum() + torch.rand(local_size)
                with self.engine.generating() as model:
                    part += torch.rand(local_size) / 8
                self.buffer = torch.tensor(distributed.all_gather_list(part.tolist()))
            for g in share.numbers:
                rows = range(num_read + g * share.micro_batch, num_read + (g + 1) * share.micro_batch)
                yield MicroBatch(
                    [(iteration, row) for row in rows], {"iteration": iteration, "taken": num_read + share.per_step}
                )
            num_read += share.per_step

    def describe(self, step: int, cursor: Cursor) -> Mapping[str, Any]:
        return cursor

    def sample(self, epoch: int, index: int) -> float:
        return float(self.buffer[index])

    def collate(self, samples: Sequence[float]) -> dict[str, Tensor]:
        return super().collate([0] * len(samples)) | {"guesses": torch.tensor(samples)}


def train(
    run: Run, stop_after: int | None = None, config: LoopConfig = CONFIG, spoiled_steps: Collection[int] = ()
) -> tuple[State, list[list[float]], list[int]]:
    """Final state, the guesses in each micro-batch, and the rollouts made. spoiled: steps whose loss is 1000 times."""
    torch.manual_seed(0)
    seen: list[list[float]] = []

    def loss(model: Any, batch: Mapping[str, Tensor]) -> Tensor:
        assert model.training
        seen.append(batch["guesses"].tolist())
        if len(seen) == 2 * (stop_after or 0):
            os.kill(os.getpid(), signal.SIGTERM)
        return ((model(batch) - batch["guesses"] - 0.1) ** 2).sum() * (
            1000 if (len(seen) + 1) // 2 in spoiled_steps else 1
        )

    data = Rollouts()
    about = CheckpointMetadata({}, tokenizers.load(run.places.data / "toy_tokenizer"))
    with distributed.stoppable():
        spec = TrainSpec(Guess(), about, data, {}, loss, lambda _: {"val_loss": 0.0}, experience=data)
        return fit(spec, run, config, seed=0), seen, data.rolled_out


@pytest.mark.parametrize("stop_after", [1, 2, 3, 7, 8])
def test_a_restart_in_the_middle_of_a_rollout_reads_on_in_it(tmp_path: Path, stop_after: int):
    with small.open_run(small.write_data(tmp_path / "whole")) as run:
        expected_weights, everything, rolled_out = train(run)
        weights = (max((run.path / "checkpoints").glob("step-*")) / "model.safetensors").read_bytes()
    assert rolled_out == [0, 1, 2, 3]
    assert len({guess for rows in everything for guess in rows}) == 4 * SIZE, "the model has moved between rollouts"
    with small.open_run(small.write_data(tmp_path / "stopped")) as run:
        with pytest.raises(distributed.StopTraining) as error_info:
            train(run, stop_after)
        step = error_info.value.step
        assert step is not None
        state, rest, rolled_out = train(run)
        assert state == expected_weights
        assert rest == everything[2 * step :]
        assert rolled_out == list(range(-(-step // 3), 4)), "what was begun is not made again"
        assert (max((run.path / "checkpoints").glob("step-*")) / "model.safetensors").read_bytes() == weights


def test_two_blocks_of_one_step_draw_other_numbers(tmp_path: Path):
    class Twice(Rollouts):
        def begin(self, engine: Engine) -> None:
            super().begin(engine)
            with engine.generating():
                first = torch.rand(4)
            with engine.generating():
                assert not torch.equal(torch.rand(4), first)

    with small.open_run(small.write_data(tmp_path)) as run:
        about = CheckpointMetadata({}, tokenizers.load(run.places.data / "toy_tokenizer"))
        data = Twice()
        fit(
            TrainSpec(
                small.Line(),
                about,
                data,
                {},
                lambda model, _: model.guess.sum() ** 2,
                lambda _: {"val_loss": 0.0},
                experience=data,
            ),
            run,
            CONFIG,
            0,
        )


def test_evaluation_samples_do_not_change_rollouts(tmp_path: Path):
    """Evaluated after every third step, saved after each, or after the first (the best) and the last; steps 4, 7, 10
    roll out."""
    results = []
    for save_every in (3, 12):
        data, losses = Rollouts(), count()

        def evaluate(_: Any, data: Rollouts = data, losses: Iterator[int] = losses) -> dict[str, float]:
            with data.engine.generating():
                return {"val_loss": float(next(losses))}

        with small.open_run(small.write_data(tmp_path / str(save_every)), Options(save_every=save_every)) as run:
            torch.manual_seed(0)
            about = CheckpointMetadata({}, tokenizers.load(run.places.data / "toy_tokenizer"))
            spec = TrainSpec(
                Guess(), about, data, {}, lambda model, batch: ((model(batch) - batch["guesses"]) ** 2).sum(), evaluate
            )
            fit(replace(spec, experience=data), run, CONFIG.model_copy(update={"eval_every": 3}), seed=0)
        results.append(data.buffer.tolist())
    assert results[0] == results[1]


def test_step_of_an_earlier_rollout_does_not_save_the_new_buffer(tmp_path: Path):
    """Step 24 is the last of a rollout, and its keys are rows of the next when step 25 is judged."""
    config = CONFIG.model_copy(
        update={"steps": 30, "divergence": Divergence(**{**LEAST, "loss_steps": 2, "on_loss_spike": "save_batch"})}
    )
    with small.open_run(small.write_data(tmp_path)) as run:
        train(run, config=config, spoiled_steps=(24, 25))
        assert ("loss_spike", 25, "save_batch") in findings(run.path)
        assert list(documents(run.path)) == ["step-00000025-rank-0.json"]
