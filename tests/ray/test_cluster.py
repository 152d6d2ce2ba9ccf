"""Twelve experiments on a real Ray of two nodes: a worker killed, a node lost, submitted again; then a training that is
ended in order."""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from src.experiments.identity import exp_id
from src.launch import resources, status
from src.runs.plan import PlannedExperiment
from src.runs.store import RunStore, SavedRun
from tests import toy
from tests.core.launch.test_status import PROGRAM, World, make_item
from tests.ray.real import Cluster, wait_until

pytestmark = [pytest.mark.ray, pytest.mark.slow]
PARENTS = [make_item("end", f"parent {n}", waits="parents may end") for n in range(2)]
CHILDREN = [make_item("end", f"child {n}", PARENTS[n % 2].exp_id, waits="children may end") for n in range(10)]
LONG = [
    {**toy.BASE, "seed": seed, "loop": {**toy.BASE["loop"], "steps": 20_000, "eval_every": 10_000}} for seed in (8, 9)
]


class Grid(World):
    """Experiments that cost nothing, each of which waits for the file that it names."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        super().__init__(folder)
        self.cluster = cluster
        (self.root / "trainval.py").write_text(PROGRAM.replace('"go"', 'exp["waits"]'))

    def resources_with(self, **values: Any) -> resources.Resources:
        entry = {
            "launcher": "ray",
            "address": self.cluster.address,
            "num_cpus": 0,
            "resources": {"slot": 1},
            "retries": 1,
        }
        return resources.load("here", {**entry, "parent_poll_seconds": 0.2, **values}, self.runs)

    def let(self, event: str) -> None:
        (self.runs / event).touch()

    def submit_counts(self) -> Counter[str]:
        return Counter(
            job["submission_id"].rpartition(".")[2]
            for job in self.cluster.jobs()
            if not job["submission_id"].startswith("probe")
        )


def processes(identity: str) -> Iterator[psutil.Process]:
    """Those that run an experiment, wherever they run."""
    for process in psutil.process_iter():
        try:
            words = process.cmdline()
            is_named = any(word.rpartition("/")[2] == identity for word in words)
            if (
                is_named
                and any(word.endswith("trainval.py") for word in words)
                and Path(words[0]).name.startswith("python")
            ):
                yield process
        except psutil.Error:
            continue


@pytest.fixture
def grid(cluster: Cluster, tmp_path: Path) -> Grid:
    return Grid(cluster, tmp_path)


def test_twelve_experiments(cluster: Cluster, grid: Grid):
    cluster.add("second", {"slot": 2})
    items: list[PlannedExperiment] = [*PARENTS, *CHILDREN]
    parents, children = [item.exp_id for item in PARENTS], [item.exp_id for item in CHILDREN]
    before = grid.submit_counts()
    grid.run(items)
    once = dict.fromkeys((*parents, *children), 1)

    # A worker is killed: its node starts it again. All are alive, so that nothing more is submitted.
    wait_until(lambda: set(grid.start_log()) == set(parents), "the parents to start")
    for process in processes(parents[0]):
        process.kill()
    wait_until(lambda: grid.start_log().count(parents[0]) == 2, "its second start")
    grid.run(items)
    assert grid.submit_counts() - before == once
    assert Counter(grid.start_log()) == {parents[0]: 2, parents[1]: 1}, "children wait for their parents"

    # A node dies, with the two children that run there.
    grid.let("parents may end")
    wait_until(lambda: len(set(grid.start_log()) & set(children)) == 4, "children on both nodes")

    def running() -> dict[str, str]:  # Ray says so some time after they have begun
        return {
            job["submission_id"]: job["driver_agent_http_address"]
            for job in cluster.jobs()
            if job["status"] == "RUNNING"
        }

    def on_second() -> set[str]:
        end = f":{cluster.ports['second']}"
        return {name.rpartition(".")[2] for name, address in running().items() if address.endswith(end)}

    wait_until(lambda: len(running()) == 4 and len(on_second()) == 2, "Ray to know of two children on each node")
    victims = on_second()
    cluster.lose("second")
    grid.let("children may end")
    wait_until(lambda: not cluster.alive(), "the others to end")
    lost_states = {row.exp_id: f"{row.state}: {row.reason}" for row in grid.rows(items) if row.state != "done"}
    assert len(victims) == 2
    assert victims <= lost_states.keys(), lost_states
    assert all(state.startswith("failed: ") and "Ray lost it" in state for state in lost_states.values()), lost_states
    # Ray also loses a queued job if that node was asked for a place when it died.
    assert all("never ran" in lost_states[identity] for identity in lost_states.keys() - victims), lost_states

    # Only what Ray lost is submitted again, once.
    grid.run(items)
    assert grid.submit_counts() - before == once
    grid.run(items, "retry")
    assert set(grid.final_states(items)) == {"done"}
    grid.run(items, "retry")
    assert grid.submit_counts() - before == {identity: 1 + (identity in lost_states) for identity in once}
    assert Counter(grid.start_log()) == {
        identity: 1 + (identity in victims or identity == parents[0]) for identity in once
    }


def rows_written(folder: Path, identity: str) -> int:
    path = folder / "runs" / identity / "scores.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def test_a_stopped_training_resumes(cluster: Cluster, tmp_path: Path):
    """By the command line; beside one that waits for its turn."""
    toy.write_data(tmp_path / "data")
    root = toy.project(tmp_path, f"EXP_GROUPS = {{'long': {LONG!r}}}\n")
    entry = {
        "launcher": "ray",
        "address": cluster.address,
        "num_cpus": 0,
        "resources": {"slot": 2},
        "environment": {"OMP_NUM_THREADS": "1"},
    }
    (root / "job_configs.py").write_text(f"JOB_CONFIGS = {{'whole': {entry!r}}}\n")

    def trainval(*arguments: str) -> None:
        done = toy.run_cold(root, arguments, tmp_path)
        assert done.returncode == 0, done.stderr

    def states() -> dict[str, str]:
        return {
            row.exp_id: row.state for row in status.table(RunStore(tmp_path / "runs"), [exp_id(exp) for exp in LONG])
        }

    trainval("-e", "long", "-j", "whole", "--log_every", "5")
    wait_until(lambda: any(rows_written(tmp_path, identity) > 2 for identity in states()), "scores")
    assert sorted(states().values()) == ["queued", "running"]
    first, second = sorted(states(), key=lambda identity: states()[identity], reverse=True)
    trainval("-e", "long", "--job_option", "kill")
    assert states() == {first: "stopped", second: "stopped"}
    run = tmp_path / "runs" / first
    assert json.loads((run / "status.json").read_text())["state"] == "stopped"
    assert list((run / "checkpoints").glob("step-*")), "it has written a checkpoint"
    wait_until(lambda: not cluster.alive(), "Ray to start the other for its end")
    assert SavedRun(tmp_path / "runs" / second).attempts == 0
    row_steps = rows_written(tmp_path, first)
    trainval("--exp_id", first, "-j", "whole", "--log_every", "5")
    wait_until(lambda: rows_written(tmp_path, first) > row_steps, "the training to go on")
    assert "continues from step" in (run / "logs" / "train.log").read_text()
