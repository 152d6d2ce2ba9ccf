"""What the workers of a sweep share, and how one of them follows a training, without a sweep around them."""

import json
import math
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from src.errors import RunError
from src.experiments import config
from src.runs import lease
from src.runs.lease import LEASE
from src.runs.run_dir import RunDir
from src.sweeps.search_space import parse_dimensions
from src.sweeps.study import ClaimedTrial, Study, Training, TrialResult
from src.sweeps.sweep import SweepFile
from tests import toy

FILE: dict[str, Any] = {
    "program": "trainval.py",
    "command": ["${program}"],
    "method": "random",
    "metric": {"name": "val_loss"},
    "parameters": {"lr": {"distribution": "log_uniform_values", "min": 0.0001, "max": 1.0}},
}
STEPS = 8
OPEN: list[Study] = []


def study(runs: Path, **changes: Any) -> Study:
    """As one worker opens it."""
    file = config.load(SweepFile, {**FILE, **changes}, "lr.yaml")
    dimensions = parse_dimensions(file.parameters, "", file.method == "grid")
    OPEN.append(Study(runs, "lr", file, dimensions, {}))
    return OPEN[-1]


def test_the_database_is_within_folders_of_any_name(tmp_path: Path):
    runs = tmp_path / "a?mode=ro&x#y {z} %41"
    study(runs)
    assert [path.name for path in (runs / "sweeps").glob("*.sqlite")] == ["lr.sqlite"]
    assert [path.name for path in tmp_path.iterdir()] == [runs.name]


@pytest.fixture(autouse=True)
def _no_connection_stays_open() -> Iterator[None]:
    yield
    while OPEN:
        OPEN.pop().close()


def claim_trial(worker: Study, total: int = 100) -> ClaimedTrial:
    trial = worker.claim(total)
    assert trial is not None
    return trial


def states(worker: Study) -> list[str]:
    return [trial.state.name for trial in worker.trials()]


@pytest.fixture
def two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Study, Study]:
    """Two workers of a grid that take each other for dead after a second."""
    monkeypatch.setattr("src.sweeps.study.HEARTBEAT_SECONDS", 1)
    monkeypatch.setattr("src.sweeps.study.STALE_SECONDS", 2)
    grid: dict[str, Any] = {"method": "grid", "parameters": {"lr": {"values": [0.1, 0.2]}}}
    return study(tmp_path, **grid), study(tmp_path, **grid)


def wait_for_claim(worker: Study, seconds: float = 10) -> ClaimedTrial:
    end = time.monotonic() + seconds
    while (trial := worker.claim(2)) is None:
        assert time.monotonic() < end
        time.sleep(0.1)
    return trial


@pytest.mark.slow
def test_the_trial_of_a_dead_worker_is_repeated_under_a_new_number(two: tuple[Study, Study]):
    first, second = two
    dead, claim = claim_trial(first), claim_trial(second)
    with claim.heartbeat:
        again = wait_for_claim(second)
        with again.heartbeat:
            assert (again.trial.number, again.values) == (2, dead.values)
            assert [trial.number for trial in second.trials()] == [1, 2]
            assert second.claim(2) is None, "the living one keeps its trial"
            with pytest.raises(RunError, match="trial 0: no heartbeat for 2 s, so another worker has taken it over"):
                first.report(dead, [1.0])
            first.end(dead, TrialResult("done", 5.0, "late"))
            second.end(again, TrialResult("done", 1.0))
        second.end(claim, TrialResult("done", 2.0))
    assert [trial.value for trial in second.trials()] == [2.0, 1.0]
    assert second.is_finished()


@pytest.mark.slow
def test_a_worker_that_died_before_its_first_heartbeat_holds_up_nobody(two: tuple[Study, Study]):
    first, second = two
    first.study.enqueue_trial(first.grid[0])  # type: ignore[index]
    first.study.ask()
    with claim_trial(second).heartbeat:
        assert wait_for_claim(second).values == {"lr": 0.1}


def test_a_released_trial_is_repeated_once_and_at_once(two: tuple[Study, Study]):
    first, second = two
    claim = claim_trial(first)
    first.hand_back(claim)
    first.hand_back(claim)
    assert claim_trial(second).values == claim.values
    assert [trial.number for trial in second.trials()] == [1]


@pytest.mark.slow
def test_bayes_looks_where_it_was_good(tmp_path: Path):
    """After ten trials by chance it comes nearer to the best; by chance the mean distance is one decade."""
    worker = study(tmp_path, method="bayes")
    distances = []
    for _ in range(30):
        claim = claim_trial(worker)
        distances.append(abs(math.log10(claim.values["lr"]) + 2))
        worker.end(claim, TrialResult("done", loss(claim.values["lr"], STEPS)))
    assert sum(distances[10:]) / 20 < 0.75


def loss(rate: float, step: int) -> float:
    """Best at 0.01."""
    return abs(math.log10(rate) + 2) + 1 / step


RATES = [0.01, 0.02, 0.005, 0.02001, 0.0101, 0.5, 0.0002, 0.9]
EARLY = [{"type": "median", "min_iter": 2}, {"type": "hyperband", "max_iter": 8, "s": 2, "eta": 2}]


@pytest.mark.parametrize("together", [1, STEPS], ids=["one by one", "at once"])
@pytest.mark.parametrize("early", EARLY, ids=["median", "hyperband"])
def test_bad_trials_are_stopped_early(tmp_path: Path, early: dict[str, Any], together: int):
    """The last three are the bad ones. Rows may come one by one, or several between two looks."""
    worker = study(tmp_path, method="grid", parameters={"lr": {"values": RATES}}, early_terminate=early)
    for rate in RATES:
        claim = claim_trial(worker)
        values = [loss(rate, step) for step in range(1, STEPS + 1)]
        is_pruned = any(worker.report(claim, values[:seen]) for seen in range(together, STEPS + 1, together))
        worker.end(claim, TrialResult("pruned" if is_pruned else "done", values[-1]))
    end_states = states(worker)
    assert end_states[0] == "COMPLETE"
    assert "PRUNED" in end_states[5:]


def test_trials_with_early_bad_scores_are_stopped(tmp_path: Path):
    """Several rows come at once, and the last is good: it would have been stopped before."""
    worker = study(tmp_path, method="grid", parameters={"lr": {"values": RATES}}, early_terminate=EARLY[0])
    for _ in range(5):
        claim = claim_trial(worker)
        worker.report(claim, [1.0, 0.9, 0.8])
        worker.end(claim, TrialResult("done", 0.8))
    assert worker.report(claim_trial(worker), [9.0, 8.0, 0.1])


def test_without_early_termination_nothing_is_stopped(tmp_path: Path):
    worker = study(tmp_path)
    claim = claim_trial(worker)
    assert not worker.report(claim, [1.0, 100.0])
    assert worker.trials()[0].intermediate_values == {1: 1.0, 2: 100.0}


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunDir]:
    """A save directory that this process trains in."""
    with RunDir.open(tmp_path / "runs", toy.BASE, {}) as run_dir:
        yield run_dir


def training(run: RunDir) -> tuple[Training, Path]:
    """One that leaves a file where it is started, and writes nothing else."""
    mark = run.path.parent / "started"
    return Training(run.path, [sys.executable, "-c", f"open({str(mark)!r}, 'w')"], "val_loss"), mark


def looks(run: RunDir, number: int) -> Any:
    """Never prunes; after `number` looks the training ends well."""
    remaining = [number]

    def prune(_: Sequence[float]) -> bool:
        remaining[0] -= 1
        if remaining[0] == 0:
            run.scores.append({"step": 1, "val_loss": 0.5})
            run.set_status("done", step=1)
        return False

    return prune


def test_a_training_that_runs_already_is_followed_and_never_doubled(run: RunDir):
    """A killed worker leaves it behind."""
    follower, mark = training(run)
    assert follower.follow(looks(run, 5)) == TrialResult("done", 0.5)
    assert follower.child is None
    assert not mark.exists()


@pytest.mark.slow
def test_a_training_of_another_machine_is_followed_while_it_beats_and_started_again_once_it_is_silent(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(lease, "STALE_SECONDS", 0.25)
    path = run.path / LEASE
    elsewhere = {**json.loads(path.read_bytes()), "boot_id": "another"}
    run.close()
    beats = [8]

    def prune(_: Sequence[float]) -> bool:
        beats[0] -= 1
        if beats[0] > 0:  # beats on for longer than it may be silent
            path.write_text(json.dumps({**elsewhere, "beat": beats[0]}))
            assert not mark.exists()
        return False

    follower, mark = training(run)
    prune([])
    ending = follower.follow(prune)
    assert mark.exists()
    assert ending.state == "failed", "what was started left the status as it was"
