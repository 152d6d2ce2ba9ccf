"""Orders with a cursor: what a step reads depends on the samples before it, and is the same at any world size and after
any restart."""

import multiprocessing
import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from src.data.orders import Cursor, Key, MicroBatch, RankShare, order_of
from src.data.text import tokenizers
from src.runs import ledger
from src.runs.context import Options, Run
from src.support import distributed
from src.training import loader
from src.training.checkpointing.checkpoint import CheckpointMetadata
from src.training.config import LoopConfig
from src.training.loop import fit
from src.training.spec import TrainSpec
from src.training.state import State
from tests.core.training import small

CONFIG = LoopConfig(steps=12, sequences_per_step=6, micro_batch=2, learning_rate=0.01, eval_every=3)


class Lanes:
    """Row v of a step is the next of lane v that is not left out: a lane takes every 6th number of an endless
    sequence."""

    def __init__(self, lanes: int, left_out: frozenset[int]) -> None:
        self.lanes, self.left_out = lanes, left_out

    def micro_batches(self, first_step: int, share: RankShare, cursor: Cursor) -> Iterator[MicroBatch]:
        num_taken = {v: cursor.get(str(v), 0) for v in range(self.lanes)}
        while True:
            for g in share.numbers:
                lanes = range(g * share.micro_batch, (g + 1) * share.micro_batch)
                keys = []
                for v in lanes:
                    while (num_taken[v] * self.lanes + v) % 32 in self.left_out:
                        num_taken[v] += 1
                    keys.append(divmod(num_taken[v] * self.lanes + v, 32))
                    num_taken[v] += 1
                yield MicroBatch(keys, {str(v): num_taken[v] for v in lanes})

    def describe(self, step: int, cursor: Cursor) -> Mapping[str, Any]:
        return {"taken": sum(cursor.values())}


class FilteredNumbers(small.Numbers):
    """Numbers in an order of its own."""

    fingerprint = "filtered"

    def order(self, seed: int, per_step: int, steps: int, branches: Sequence[Any]) -> Lanes:
        return Lanes(per_step, frozenset({3, 9, 10, 15}))


class Processes:
    """What `world_size` processes read in each step; the processes are this one, in turn."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.monkeypatch = monkeypatch

    def read(self, world_size: int, start: State, steps: int, num_workers: int = 0) -> tuple[list[list[Key]], Cursor]:
        read: list[list[list[Key]]] = []
        cursor: Cursor = dict(start.cursor)
        for rank in range(world_size):
            self.monkeypatch.setenv("RANK", str(rank))
            self.monkeypatch.setenv("WORLD_SIZE", str(world_size))
            data = FilteredNumbers()
            order = order_of(data, 0, CONFIG.sequences_per_step, CONFIG.steps)
            keys = list(
                islice(
                    loader.StepLoader(data, order, CONFIG, torch.device("cpu"), num_workers=num_workers).steps(start),
                    steps,
                )
            )
            assert all(step.passes == -(-3 // world_size) for step in keys)
            read.append([[key for rows in step.keys for key in rows] for step in keys])
            for step in keys:
                indices = [index for batch in step.batches for index in batch["input_ids"][:, 1].tolist()]
                assert indices == [key[1] for rows in step.keys for key in rows], "a batch comes with its own keys"
            cursor |= keys[-1].cursor
        return [sorted(key for rank in read for key in rank[s]) for s in range(steps)], cursor


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> Processes:
    return Processes(monkeypatch)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_every_world_size_and_number_of_readers_reads_the_same(processes: Processes, world_size: int, num_workers: int):
    assert processes.read(world_size, State(), 20, num_workers) == processes.read(1, State(), 20)


@pytest.mark.parametrize("world_sizes", [(1, 3), (3, 2), (2, 1)])
def test_a_restart_at_another_world_size_reads_on(processes: Processes, world_sizes: tuple[int, int]):
    whole, end = processes.read(1, State(), 11)
    first, cursor = processes.read(world_sizes[0], State(), 4)
    rest, last = processes.read(world_sizes[1], State(step=4, cursor=cursor), 7)
    assert (first + rest, last) == (whole, end)
    assert len({key for step in whole for key in step}) == 66, "nothing twice"


def test_an_order_does_not_change_the_given_cursor():
    """The loop adds to that of the state at each checkpoint."""

    class Late(Lanes):
        def micro_batches(self, first_step: int, share: RankShare, cursor: Cursor) -> Iterator[MicroBatch]:
            while True:
                yield MicroBatch([(0, cursor.get("place", 0))] * share.micro_batch, {})

    start = State()
    steps = loader.StepLoader(FilteredNumbers(), Late(6, frozenset()), CONFIG, torch.device("cpu")).steps(start)
    first = next(steps).keys
    start.cursor["place"] = 7
    assert next(steps).keys == first


def train(run: Run, stop_after: int | None = None) -> tuple[State, list[list[int]]]:
    """Final state, and the numbers of each micro-batch. stop_after: the step after which a stop is requested."""
    torch.manual_seed(0)
    seen: list[list[int]] = []

    def loss(model: Any, batch: Mapping[str, Any]) -> Any:
        seen.append(batch["input_ids"][:, 1].tolist())
        if len(seen) == 3 * (stop_after or 0):
            os.kill(os.getpid(), signal.SIGTERM)
        return small.loss(model, batch)

    about = CheckpointMetadata({}, tokenizers.load(run.places.data / "toy_tokenizer"))
    with distributed.stoppable():
        spec = TrainSpec(small.Line(), about, FilteredNumbers(), {}, loss, lambda _: {"val_loss": 0.0})
        return fit(spec, run, CONFIG, seed=0), seen


def test_readers_end_with_the_training_whoever_holds_its_traceback(tmp_path: Path):
    before = set(multiprocessing.active_children())
    with (
        small.open_run(small.write_data(tmp_path), Options(num_workers=2)) as run,
        pytest.raises(distributed.StopTraining) as stop,
    ):
        train(run, 3)
    assert stop.tb is not None
    assert set(multiprocessing.active_children()) <= before


@pytest.mark.parametrize("stop_after", [1, 3, 4, 8])
def test_a_stopped_training_resumes_reading_after_its_last_step(tmp_path: Path, stop_after: int):
    with small.open_run(small.write_data(tmp_path / "whole")) as run:
        expected, everything = train(run)
    with small.open_run(small.write_data(tmp_path / "stopped")) as run:
        with pytest.raises(distributed.StopTraining) as stop:
            train(run, stop_after)
        step = stop.value.step
        assert step is not None
        state, rest = train(run)
        assert state == expected
        assert rest == everything[3 * step :]
        starts = [event for event in ledger.read(run.path) if event["event"] == "start"]
        assert starts[1]["cursor"]["taken"] > starts[0]["cursor"]["taken"] == 0


def test_state_round_trips_through_json():
    assert State.from_json(State(step=3).to_json()) == State(step=3)
    assert State.from_json(State(step=3, cursor={"0": 4}).to_json()).cursor == {"0": 4}
