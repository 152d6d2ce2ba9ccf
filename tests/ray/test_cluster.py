"""Twelve experiments on a real Ray of two nodes: a worker killed, a node lost, submitted again, repaired, and ended in order."""

import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from src.experiments.grid import grid, ref
from src.experiments.identity import exp_id
from src.launch import status as jobs
from src.runs import metadata
from tests import toy
from tests.ray.real import Cluster, wait_until

pytestmark = [pytest.mark.ray, pytest.mark.slow]
PARENTS = [{**toy.BASE, "seed": seed, "loop": {**toy.BASE["loop"], "steps": 240, "eval_every": 20}} for seed in (0, 1)]
CHILD: dict[str, Any] = {name: value for name, value in toy.CROSSATTN.items() if name != "answers"}
CHILD["loop"] = {**CHILD["loop"], "steps": 8, "eval_every": 8}
CHILDREN = [
    child for parent in PARENTS for child in grid({**CHILD, "model": {**CHILD["model"], "base": ref(parent)}}, {"seed": [0, 1, 2, 3, 4]})
]
LONG = [{**toy.BASE, "seed": seed, "loop": {**toy.BASE["loop"], "steps": 20_000, "eval_every": 10_000}} for seed in (8, 9)]
GROUPS = {"parents": PARENTS, "grid": CHILDREN, "long": LONG}


@pytest.fixture
def world(cluster: Cluster, tmp_path: Path) -> tuple[Path, Path]:
    """(project, folder with data and runs)."""
    toy.write_data(tmp_path / "data")
    root = toy.project(tmp_path, f"EXP_GROUPS = {GROUPS!r}\n")
    entry = {"launcher": "ray", "address": cluster.address, "num_cpus": 0, "retries": 1, "environment": {"OMP_NUM_THREADS": "1"}}
    entries = {"one": {**entry, "resources": {"slot": 1}}, "whole": {**entry, "resources": {"slot": 2}}}
    (root / "job_configs.py").write_text(f"JOB_CONFIGS = {entries!r}\n")
    return root, tmp_path


def trainval(world: tuple[Path, Path], *arguments: str) -> str:
    """What trainval.py says; it must succeed."""
    done = toy.run_cold(world[0], arguments, world[1])
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def rows_written(folder: Path, identity: str) -> int:
    path = folder / "runs" / identity / "scores.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def trainings(identity: str) -> Iterator[psutil.Process]:
    """The processes that train an experiment, wherever they run."""
    for process in psutil.process_iter():
        try:
            words = process.cmdline()
            if (
                identity in words
                and any(word.endswith("trainval.py") for word in words)
                and words[0].rpartition("/")[2].startswith("python")
            ):
                yield process
        except psutil.Error:
            continue


def alive(cluster: Cluster) -> list[str]:
    return [job["submission_id"] for job in cluster.jobs() if job["status"] in ("PENDING", "RUNNING")]


def states(folder: Path, experiments: list[dict[str, Any]]) -> dict[str, str]:
    return {row.exp_id: row.state for row in jobs.table(folder / "runs", [exp_id(exp) for exp in experiments])}


def test_twelve_experiments(cluster: Cluster, world: tuple[Path, Path]):
    folder = world[1]
    everything = [*PARENTS, *CHILDREN]
    parents, children = [exp_id(exp) for exp in PARENTS], [exp_id(exp) for exp in CHILDREN]
    cluster.add("second", {"slot": 2})
    submit = ["-e", "grid", "--with-parents", "--log_every", "1", "-j", "one"]
    trainval(world, *submit)

    # A worker is killed in the middle of its training.
    wait_until(lambda: list((folder / "runs" / parents[0] / "checkpoints").glob("step-*")), "the first checkpoint of a parent")
    killed = list(trainings(parents[0]))
    for process in killed:
        process.kill()
    assert metadata.state_of(folder / "runs" / parents[0]) != "done", "it trains for longer than that"
    assert "nothing to submit" in trainval(world, *submit)

    # A node dies with what runs on it: a child, which is stopped so that it is there then.
    head = cluster.ports["head"]
    victims: list[str] = []

    def found_a_victim() -> bool:
        for job in cluster.jobs():
            identity = job["submission_id"].rpartition(".")[2]
            if job["status"] == "RUNNING" and identity in children and not job["driver_agent_http_address"].endswith(f":{head}"):
                for process in trainings(identity):
                    process.suspend()
                    victims.append(identity)
        return bool(victims)

    wait_until(found_a_victim, "a child to train on the second node")
    cluster.lose("second")
    wait_until(lambda: not alive(cluster), "the others to end")
    rows = {row.exp_id: row for row in jobs.table(folder / "runs", [*parents, *children])}
    lost = [identity for identity, row in rows.items() if row.state != "done"]
    assert set(victims) <= set(lost) <= set(children)
    for identity in lost:
        assert rows[identity].state == "failed"
        assert "Ray lost it" in rows[identity].reason
    submitted = Counter(job["submission_id"].rpartition(".")[2] for job in cluster.jobs())
    assert {submitted[identity] for identity in rows} == {1}

    # Only what the node took with it is submitted again.
    assert "nothing to submit" in trainval(world, *submit)
    trainval(world, *submit, "--job_option", "retry")
    wait_until(lambda: not alive(cluster), "all to end")
    assert set(states(folder, everything).values()) == {"done"}
    submitted = Counter(job["submission_id"].rpartition(".")[2] for job in cluster.jobs())
    assert {identity: submitted[identity] for identity in rows} == {identity: 2 if identity in lost else 1 for identity in rows}
    assert metadata.attempts(folder / "runs" / parents[0]) == 2
    assert "continues from step" in (folder / "runs" / parents[0] / "logs" / "train.log").read_text()
    untouched = set(rows) - {parents[0], *lost}
    assert {metadata.attempts(folder / "runs" / identity) for identity in untouched} == {1}
    assert "nothing to submit" in trainval(world, *submit)


def test_jobs_are_ended_in_order(cluster: Cluster, world: tuple[Path, Path]):
    folder = world[1]
    first, second = (exp_id(exp) for exp in LONG)
    trainval(world, "--exp_id", first, "-j", "whole", "--log_every", "5")
    trainval(world, "--exp_id", second, "-j", "whole", "--log_every", "5")
    wait_until(lambda: rows_written(folder, first) > 2, "scores")
    assert states(folder, LONG) == {first: "running", second: "queued"}
    trainval(world, "-e", "long", "--job_option", "kill")
    assert states(folder, LONG) == {first: "stopped", second: "stopped"}
    assert json.loads((folder / "runs" / first / "status.json").read_text())["state"] == "stopped"
    assert list((folder / "runs" / first / "checkpoints").glob("step-*")), "it has written a checkpoint"
    wait_until(lambda: not alive(cluster), "Ray to start the other for its end")
    assert metadata.attempts(folder / "runs" / second) == 0
    written = rows_written(folder, first)
    trainval(world, "--exp_id", first, "-j", "one", "--log_every", "5")
    wait_until(lambda: rows_written(folder, first) > written, "the run to go on where it was stopped")
    assert "continues from step" in (folder / "runs" / first / "logs" / "train.log").read_text()
    trainval(world, "-e", "long", "--job_option", "kill")
    assert states(folder, LONG)[first] == "stopped"
    assert not list(trainings(first))


def test_a_lost_cluster_is_told(cluster: Cluster, world: tuple[Path, Path]):
    """The last test: nothing of the cluster is left after it."""
    folder = world[1]
    identity = exp_id(LONG[0])
    trainval(world, "--exp_id", identity, "-j", "one", "--log_every", "5")
    wait_until(lambda: rows_written(folder, identity) > 2, "scores")
    cluster.lose("head")
    wait_until(lambda: not list(trainings(identity)), "its job to die with it")
    said = toy.run_cold(world[0], ["--exp_id", identity, "--job_option", "status"], folder).stdout
    assert re.search(r" unknown .*Ray does not answer: .*refused. Does its dashboard run there\?", said), said
