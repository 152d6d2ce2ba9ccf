"""What happens to one of two processes, both do alike, at the same step; started again, they end as if it never had."""

import json
from pathlib import Path
from typing import Any

import pytest

from src.data.orders import IndexedOrder
from src.experiments.identity import exp_id
from src.runs import ledger
from src.runs.checkpoints import checkpoints
from src.runs.history import branches
from src.support import distributed
from tests import warm
from tests.core.training import small
from tests.core.training.divergence.test_guard import STEPS
from tests.core.training.pair import BATCHES, LAST_UNDISTURBED
from tests.core.training.reading import test_counts

pytestmark = pytest.mark.slow


class Pair:
    """What two processes have left of all scenarios."""

    def __init__(self, folder: Path) -> None:
        self.folder = small.write_data(folder)
        assert warm.torchrun(Path(__file__).with_name("pair.py"), [str(folder)], 2, folder / "log") == ""
        self.ranks: list[dict[str, Any]] = [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in (0, 1)]

    def ends(self, name: str, start: int) -> dict[str, Any]:
        """How a start ended, for both alike."""
        one, other = (rank[name][start] for rank in self.ranks)
        assert {**one, "seen": None} == {**other, "seen": None}
        return one

    def run(self, name: str) -> Path:
        """The save directory."""
        return self.folder / name.replace(" ", "_") / "runs" / exp_id(small.EXP)

    def outcome(self, name: str) -> list[bytes]:
        """What must come out the same whatever happened."""
        run = self.run(name)
        last = max((run / "checkpoints").glob("step-*"))
        return [
            (last / f"{file}").read_bytes() for file in ("model.safetensors", "optimizer.safetensors", "state.json")
        ] + [(run / "scores.jsonl").read_bytes()]

    def events(self, name: str, *kinds: str) -> list[tuple[str, int]]:
        """Of the ledger."""
        return [(event["event"], event["step"]) for event in ledger.read(self.run(name)) if event["event"] in kinds]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(tmp_path_factory.mktemp("pair"))


@pytest.mark.parametrize(
    ("name", "code", "why"),
    [
        ("time limit", distributed.REQUEUE, "time limit"),
        ("memory limit", distributed.REQUEUE, "99% of host memory in use"),
        ("stop file", distributed.INTERRUPTED_EXIT, "runs/stop (remove it to resume the training)"),
    ],
)
def test_a_limit_that_one_reaches_stops_both(pair: Pair, name: str, code: int, why: str):
    end = pair.ends(name, 0)
    step = LAST_UNDISTURBED + 1  # what one has seen is counted when the next step begins, which is finished
    assert (end["end"], end["step"], end["code"], end["everywhere"]) == ("stopped", step, code, True)
    assert why in end["why"]
    assert pair.events(name, "start", "stop") == [("start", 0), ("stop", step), ("start", step), ("stop", 12)]
    assert pair.events(name, "save") == [("save", at) for at in (4, step, 8, 12)], "one checkpoint more"
    assert pair.ends(name, 1) == pair.ends("undisturbed", 0)
    assert pair.outcome(name) == pair.outcome("undisturbed")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_signal_to_one_in_an_evaluation_stops_both_in_it(pair: Pair, rank: int):
    name = f"signal to {rank}"
    end = pair.ends(name, 0)
    assert (end["end"], end["step"], end["code"], end["everywhere"]) == ("stopped", 8, distributed.REQUEUE, True)
    assert "SIGTERM" in end["why"]
    assert end["batches"] == BATCHES + 2, "the batch that was begun is the last"
    assert pair.events(name, "start", "stop") == [("start", 0), ("stop", 8), ("start", 8), ("stop", 12)]
    assert pair.outcome(name) == pair.outcome("evaluated undisturbed")


def test_a_divergence_of_one_stops_both_before_the_optimizer_moves(pair: Pair):
    end, name = pair.ends("divergence stop", 0), "divergence stop"
    assert (end["end"], end["everywhere"]) == ("failed", True)
    assert "step 25: the loss is nan" in end["why"]
    messages = [event["message"] for event in ledger.read(pair.run(name)) if event["event"] == "divergence"]
    assert messages == ["step 25: the loss is nan.", "step 25: the gradient norm is nan."], "once"
    files = sorted(path.name for path in (pair.run(name) / "offending").iterdir())
    assert files == ["step-00000025-rank-0.json", "step-00000025-rank-1.json"]
    assert pair.events(name, "start") == [("start", 0), ("start", 20)]
    assert {**pair.ends(name, 1), "seen": None} == {**pair.ends("long undisturbed", 0), "seen": None}
    assert pair.outcome(name) == pair.outcome("long undisturbed")


def test_a_divergence_of_one_takes_both_back_and_past_it(pair: Pair):
    name = "divergence rewind"
    end = pair.ends(name, 0)
    assert (end["end"], end["step"], end["code"], end["everywhere"]) == ("stopped", 20, distributed.REQUEUE, True)
    assert "rewound to step 20: step 25: the loss is" in end["why"]
    (branch,) = branches.read(pair.run(name))
    assert (branch.from_step, branch.data) == (20, "skip:5")
    assert pair.events(name, "rewind") == [("rewind", 20)], "done once"
    assert pair.events(name, "start") == [("start", 0), ("start", 20)]
    after = IndexedOrder(0, 32, 4).keys(25 * 4)
    expected = [next(after)[1] for _ in range(4)]
    for rank, ends in enumerate(pair.ranks):
        assert ends[name][1]["seen"] == expected[rank::2], "micro-batches go to the processes in turn"
    assert pair.ends(name, 1)["step"] == STEPS
    assert checkpoints.step_of(checkpoints.list_all(pair.run(name))[-1]) == STEPS


def test_experience_is_loaded_when_both_can_resume(pair: Pair):
    assert "inputs changed since the start of the run: a" in pair.ends("experience loaded", 1)["why"]
    assert pair.ends("experience loaded", 2)["end"] == "done"


def test_two_share_questions_of_unequal_counts_as_one_reads_them(pair: Pair, tmp_path: Path):
    with small.open_run(small.write_data(tmp_path)) as run:
        _, weights = test_counts.train(run, test_counts.config())
        expected = test_counts.rows(run)
    rows = [json.loads(line) for line in (pair.run("replies") / "scores.jsonl").read_text().splitlines()]
    assert pair.ends("replies", 0)["weights"] == pytest.approx(weights.tolist(), rel=1e-6)
    assert [row["accuracy"] for row in rows] == [row["accuracy"] for row in expected]
    for name in ("train_loss", "grad_norm"):
        assert [row[name] for row in rows] == pytest.approx([row[name] for row in expected], rel=1e-6)


def test_one_that_works_for_longer_than_a_collective_waits_is_waited_for(pair: Pair):
    assert pair.ends("slow rank 0", 0)["end"] == "done"


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("experience differs", "other tensors on rank 1 than on rank 0"),
        ("names differ", "the sums of the loss are ['sum1'] here, but ['sum0'] in the first pass of rank 0"),
    ],
)
def test_unequal_experience_stops_both(pair: Pair, name: str, why: str):
    end = pair.ends(name, 0)
    assert (end["end"], end["everywhere"]) == ("failed", True)
    assert why in end["why"]
