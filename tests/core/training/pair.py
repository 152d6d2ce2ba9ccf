"""Small trainings on two processes, of which something happens to one alone. For torchrun; test_pair.py looks at what
they leave.

Each process writes how its starts ended, by scenario, to <folder>/rank-R.json.
"""

import itertools
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from src.errors import UserError
from src.runs.context import Limits, Options
from src.support import distributed
from src.training.config import LoopConfig
from src.training.stopping import stop_conditions
from src.training.validation import measure
from tests.core.training import small
from tests.core.training.divergence.test_guard import config as diverging
from tests.core.training.divergence.test_guard import spoil
from tests.core.training.reading import test_counts

SIGNAL_RANK = 1
"""The process to which it happens, where nothing else is said."""
LAST_UNDISTURBED = 5
"""Step within which a limit is reached."""
Learn = Callable[..., Any]
End = dict[str, Any]
CONFIG = small.CONFIG.model_copy(update={"micro_batch": 1})


def link_data(folder: Path) -> None:
    """Make the folder of a scenario."""
    if distributed.is_main() and not (folder / "data").exists():
        folder.mkdir(exist_ok=True)
        (folder / "data").symlink_to(folder.parent / "data")


def start(
    folder: Path, config: LoopConfig = CONFIG, learn: Learn = small.loss, options: Options | None = None, **more: Any
) -> End:
    """Train, or go on; how that ended for this process."""
    link_data(folder)
    with small.opened_together(folder, options) as run:
        try:
            state, model = small.train(run, config, learn, **more)
        except distributed.StopTraining as stopped:
            outcome = {"end": "stopped", "step": stopped.step, "code": stopped.exit_code}
            return {**outcome, "why": str(stopped), "everywhere": stopped.everywhere}
        except UserError as error:
            return {"end": "failed", "why": str(error), "everywhere": error.everywhere}
        return {"end": "done", "step": state.step, "weights": model.guess.tolist()}


def within(step: int, act: Callable[[], object]) -> Learn:
    """A loss that acts in step number `step`. Steps have two micro-batches."""
    calls = itertools.count()

    def learn(model: Any, batch: Mapping[str, Any]) -> Any:
        if next(calls) == 2 * (step - 1):
            act()
        return small.loss(model, batch)

    return learn


def is_signal_rank() -> bool:
    """Whether it happens to this process."""
    return distributed.rank() == SIGNAL_RANK


def time_is_over(folder: Path) -> list[End]:
    """For one, whose clock is another."""
    end = time.monotonic() + 8

    def wait() -> None:
        while time.monotonic() < end:
            time.sleep(0.01)

    options = Options(limits=Limits(end=end if is_signal_rank() else None))
    return [start(folder, learn=within(LAST_UNDISTURBED, wait), options=options), start(folder)]


def file_is_seen(folder: Path) -> list[End]:
    """By one, as the other does not look again."""
    stop_conditions.LOOK_SECONDS = 0.0 if is_signal_rank() else 1e9
    file = folder / "runs" / stop_conditions.STOP_FILE
    first = start(folder, learn=within(LAST_UNDISTURBED, file.touch if is_signal_rank() else bool))
    distributed.broadcast_from_rank0(file.unlink)
    stop_conditions.LOOK_SECONDS = 1.0
    return [first, start(folder)]


def memory_is_used(folder: Path) -> list[End]:
    """On the machine of one."""
    before = stop_conditions.LOOK_SECONDS, stop_conditions._MEMORY, stop_conditions._GROUP
    memory_file = folder.with_suffix(f".{distributed.rank()}")
    memory_file.write_text("MemTotal: 100 kB\nMemAvailable: 90 kB\n")
    stop_conditions.LOOK_SECONDS, stop_conditions._MEMORY, stop_conditions._GROUP = 0.0, memory_file, folder / "none"

    def fill() -> None:
        if is_signal_rank():
            memory_file.write_text("MemTotal: 100 kB\nMemAvailable: 1 kB\n")

    first = start(folder, learn=within(LAST_UNDISTURBED, fill), options=Options(limits=Limits(host_memory=0.95)))
    stop_conditions.LOOK_SECONDS, stop_conditions._MEMORY, stop_conditions._GROUP = before
    return [first, start(folder)]


def signal_in_evaluation(folder: Path, rank: int) -> list[End]:
    """To process number `rank`, between two batches of the second evaluation."""
    calls = itertools.count()

    def loss(model: Any, batch: Mapping[str, Any]) -> Any:
        if next(calls) == BATCHES + 1 and distributed.rank() == rank:
            os.kill(os.getpid(), signal.SIGTERM)
        return small.loss(model, batch)

    first = start(folder, evaluate=lambda: {"val_loss": evaluate_with(loss)})
    second = start(folder, evaluate=lambda: {"val_loss": evaluate_with(small.loss)})
    return [{**first, "batches": next(calls)}, second]


BATCHES = 4
"""Of each process in one evaluation: 32 samples."""


def evaluate_with(loss: Learn) -> float:
    """The loss of a model that stays as it is."""
    return measure(small.Line(), small.Numbers(), loss, 32 // (2 * BATCHES), small.torch.device("cpu")).loss


def divergence(folder: Path, **actions: Any) -> list[End]:
    """The loss of one is 100 times, or is no, number in step 25; what the next start then reads."""
    settings = diverging(**actions).model_copy(update={"micro_batch": 1})
    seen: list[list[int]] = []

    def learn(model: Any, batch: Mapping[str, Any]) -> Any:
        seen.append(batch["input_ids"][:, 1].tolist())
        return small.loss(model, batch)

    value = float("nan") if "on_non_finite" in actions else 1000.0
    first = start(folder, settings, spoil(value, 25) if is_signal_rank() else small.loss)
    second = start(folder, settings, learn)
    return [first, {**second, "seen": [index for batch in seen[:2] for index in batch]}]


class SavedExperience:
    """Experience that asks the other process at a start, and may differ from its."""

    def __init__(self, value: float) -> None:
        self.value = value

    def begin(self, engine: Any) -> None:
        """Nothing to make."""

    def tensors(self) -> dict[str, Any]:
        """One."""
        return {"kept": small.torch.tensor(self.value)}

    def load(self, tensors: Mapping[str, Any]) -> None:
        """Collective."""
        assert distributed.all_gather_list([tensors["kept"].item()]) == [self.value] * 2

    def seconds(self) -> Mapping[str, float]:
        """None are told."""
        return {}


def experience_is_loaded(folder: Path) -> list[End]:
    """By neither where the inputs of one have changed."""
    first = start(
        folder,
        learn=within(LAST_UNDISTURBED, lambda: os.kill(os.getpid(), signal.SIGTERM)),
        experience=SavedExperience(1),
        inputs={"a": "0"},
    )
    second = start(folder, experience=SavedExperience(1), inputs={"a": str(distributed.rank())})
    return [first, second, start(folder, experience=SavedExperience(1), inputs={"a": "0"})]


def names_differ(folder: Path) -> list[End]:
    """Of what the losses of the two report."""

    def learn(model: Any, batch: Mapping[str, Any]) -> Any:
        loss = small.loss(model, batch)
        return loss, {f"sum{distributed.rank()}": (loss, loss)}

    return [start(folder, learn=learn)]


def replies_are_shared(folder: Path) -> list[End]:
    """Questions with unequal numbers of replies, and so with unequal counts on the two."""
    link_data(folder)
    with small.opened_together(folder) as run:
        return [{"end": "done", "weights": test_counts.train(run, test_counts.config(micro_batch=1))[1].tolist()}]


def rank_0_works_for_long(folder: Path) -> list[End]:
    """Twice as long as a collective waits, as it waits itself for what nobody sends."""
    import torch.distributed as dist

    usual, short = timedelta(minutes=30), timedelta(seconds=1)
    silent: Any = dist.new_group(timeout=2 * short)

    def work() -> str:
        with pytest.raises(RuntimeError, match="imed out"):
            dist.recv(small.torch.zeros(1), src=1, group=silent)
        return "done"

    dist.distributed_c10d._set_pg_timeout(short)
    try:
        return [{"end": distributed.broadcast_from_rank0(work, timeout=usual)}]
    except RuntimeError as error:
        return [{"end": f"no longer waited for: {error}"}]
    finally:
        dist.distributed_c10d._set_pg_timeout(usual)


SCENARIOS: dict[str, Callable[[Path], list[End]]] = {
    "undisturbed": lambda folder: [start(folder)],
    "time limit": time_is_over,
    "stop file": file_is_seen,
    "memory limit": memory_is_used,
    "evaluated undisturbed": lambda folder: [start(folder, evaluate=lambda: {"val_loss": evaluate_with(small.loss)})],
    "signal to 0": lambda folder: signal_in_evaluation(folder, 0),
    "signal to 1": lambda folder: signal_in_evaluation(folder, 1),
    "long undisturbed": lambda folder: [start(folder, diverging().model_copy(update={"micro_batch": 1}))],
    "experience loaded": experience_is_loaded,
    "experience differs": lambda folder: [start(folder, experience=SavedExperience(distributed.rank()))],
    "names differ": names_differ,
    "replies": replies_are_shared,
    "slow rank 0": rank_0_works_for_long,
    "divergence stop": lambda folder: divergence(folder, on_non_finite="stop"),
    "divergence rewind": lambda folder: divergence(folder, on_loss_spike="rewind"),
}


def main(folder: Path) -> None:
    """Run every scenario."""
    outcomes = {}
    with distributed.session():
        for name, scenario in SCENARIOS.items():
            outcomes[name] = scenario(folder / name.replace(" ", "_"))
    (folder / f"rank-{distributed.rank()}.json").write_text(json.dumps(outcomes))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
