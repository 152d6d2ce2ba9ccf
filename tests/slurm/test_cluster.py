"""Grids on a real Slurm: over two nodes with torchrun on both, disturbed in the middle, repaired, watched and ended."""

import copy
import hashlib
import json
import re
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from src.experiments.grid import grid, ref
from src.experiments.identity import exp_id
from src.launch import status
from src.runs.store import RunStore, SavedRun
from tests import toy
from tests.slurm.real import Cluster, command, wait_until

pytestmark = [pytest.mark.slurm, pytest.mark.slow]
STEPS = 32
PARENT: dict[str, Any] = copy.deepcopy(toy.BASE)
CHILD: dict[str, Any] = copy.deepcopy(toy.CROSSATTN)
CHILD["loop"] |= {"steps": STEPS, "sequences_per_step": 8, "micro_batch": 2, "eval_every": 8}
GRID = grid({**CHILD, "model": {**CHILD["model"], "base": ref(PARENT)}}, {"seed": [0, 1]})
LIMITED_ID, PREEMPTED_ID = map(exp_id, GRID)
"""The second loses a node, too, when it trains again."""
SMALL: dict[str, Any] = {**copy.deepcopy(toy.BASE)}
SMALL["loop"] = {**SMALL["loop"], "steps": 8}
FRAGILE = [
    {**SMALL, "seed": seed, "data": {**SMALL["data"], "corpus": corpus}}
    for seed, corpus in enumerate(("toy_text", "fragile"))
]
LONG = [{**SMALL, "seed": seed, "loop": {**SMALL["loop"], "steps": 4000, "eval_every": 2000}} for seed in (8, 9)]
GROUPS = {"parents": [PARENT], "grid": GRID, "fragile": FRAGILE, "long": LONG}
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
JOB_CONFIGS: dict[str, Any] = {
    "two_nodes": {
        "launcher": "slurm",
        "cpus_per_task": 4,
        "environment": ONE_THREAD,
        "processes": {"starter": "torchrun", "nodes": 2},
        "overrides": [
            {"where": "recipe == 'lm'", "processes": {"starter": "python", "nodes": 1}},
            {"where": "seed == 0 and recipe == 'crossattn'", "time": 30, "signal_seconds": 120},
        ],
    },
    "one": {"launcher": "slurm", "cpus_per_task": 2, "environment": ONE_THREAD},
    "held": {"launcher": "slurm", "cpus_per_task": 2, "environment": ONE_THREAD, "options": {"hold": True}},
}


@pytest.fixture
def world(tmp_path: Path) -> tuple[Path, Path]:
    """(project, folder with data and runs)."""
    data = toy.write_data(tmp_path / "data")
    subprocess.run(["cp", "-r", str(data / "toy_text"), str(data / "fragile")], check=True)
    root = toy.project(tmp_path, f"EXP_GROUPS = {GROUPS!r}\n")
    (root / "job_configs.py").write_text(f"JOB_CONFIGS = {JOB_CONFIGS!r}\n")
    return root, tmp_path


def trainval(world: tuple[Path, Path], *arguments: str) -> str:
    """What trainval.py says; it must succeed."""
    done = toy.run_cold(world[0], arguments, world[1])
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def states(world: tuple[Path, Path], group: str) -> dict[str, str]:
    """State of each experiment as --job_option status prints it."""
    lines = trainval(world, "-e", group, "--job_option", "status").splitlines()
    return {line.split()[0]: line.split()[2] for line in lines if re.match(r"[0-9a-f]{32} ", line)}


def job_id(folder: Path, identity: str) -> str:
    job = SavedRun(folder / "runs" / identity).job
    assert job is not None
    return job["job_id"]


def rows_written(folder: Path, identity: str) -> int:
    path = folder / "runs" / identity / "scores.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def ranks(identity: str) -> Iterator[psutil.Process]:
    """The training processes of an experiment, on all nodes, which are all here."""
    for process in psutil.process_iter():
        try:
            if identity in process.cmdline() and "RANK" in process.environ():
                yield process
        except psutil.Error:
            continue


def told_to_stop(process: psutil.Process) -> bool:
    """Whether SIGTERM waits for a process that is frozen, or has ended it."""
    if not process.is_running():
        return True
    text = Path(f"/proc/{process.pid}/status").read_text()
    return any(int(mask, 16) >> (signal.SIGTERM - 1) & 1 for mask in re.findall(r"(?:SigPnd|ShdPnd):\s*(\w+)", text))


def fingerprints(folder: Path, identity: str, steps: int) -> list[str]:
    """Hashes of the weights and of the scores of a finished run."""
    run = folder / "runs" / identity
    paths = [run / "checkpoints" / f"step-{steps:08d}" / "model.safetensors", run / "scores.jsonl"]
    return [hashlib.sha256(path.read_bytes()).hexdigest() for path in paths]


class Disturbances:
    """Each victim is frozen in the middle of its training, and only then hit; so that it is hit there, however fast it
    trains."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.cluster, self.folder = cluster, folder
        self.due = {LIMITED_ID: ["limit"], PREEMPTED_ID: ["preempt", "lose"]}
        self.frozen: dict[str, list[psutil.Process]] = {LIMITED_ID: [], PREEMPTED_ID: []}
        self.rows = dict.fromkeys(self.due, 0)
        self.limited_processes: list[psutil.Process] = []
        self.nodes_down: list[str] = []
        self.hit: list[str] = []

    @property
    def over(self) -> list[str]:
        """What was done, once nothing of it lasts."""
        return sorted(self.hit) if not self.limited_processes and not self.nodes_down else []

    def step(self) -> bool:
        """Do what is due; True once all jobs have ended."""
        self.cluster.hurry()
        for victim, due in self.due.items():
            if due and self.rows[victim] + 3 <= rows_written(self.folder, victim) < STEPS - 8:
                self.freeze(victim)
        if self.limited_processes and all(map(told_to_stop, self.limited_processes)):
            self.cluster.extend(
                job_id(self.folder, LIMITED_ID)
            )  # else it would reach the limit again after its next start
            for process in self.limited_processes:
                process.resume()
            self.limited_processes = []
        if self.nodes_down:
            job = self.cluster.job(job_id(self.folder, PREEMPTED_ID))
            if job["Restarts"] == "2" and job["JobState"] in {"RUNNING", "COMPLETED"}:
                # Not sooner: what Slurm still sends there to end the second start would end the third.
                self.cluster.regain(self.nodes_down.pop())
        return not self.cluster.alive()

    def freeze(self, victim: str) -> None:
        processes = list(ranks(victim))
        if len(processes) != 2 or set(processes) & set(self.frozen[victim]):
            return
        for process in processes:
            process.suspend()
        self.frozen[victim], self.rows[victim] = processes, rows_written(self.folder, victim)
        self.hit.append(self.due[victim].pop(0))
        where = job_id(self.folder, victim)
        if self.hit[-1] == "preempt":
            self.cluster.preempt(where)  # Slurm wakes the processes when it tells them to stop
        elif self.hit[-1] == "limit":
            self.limited_processes = processes
            self.cluster.shorten(where)
        else:
            self.nodes_down.append(self.cluster.nodes(where)[-1])
            self.cluster.lose(self.nodes_down[-1])


def test_a_grid_over_two_nodes_ends_as_an_uninterrupted_local_run(cluster: Cluster, world: tuple[Path, Path]):
    root, folder = world
    reference_folder = folder / "local"
    reference_folder.mkdir()
    (reference_folder / "data").symlink_to(folder / "data")
    arguments = ["-e", "grid", "--with-parents", "--log_every", "1"]
    output = trainval(world, *arguments, "-j", "two_nodes")
    assert "nothing to submit" in trainval(world, *arguments, "-j", "two_nodes"), output
    arrays = {job_id(folder, exp_id(exp)).partition("_")[0] for exp in [PARENT, *GRID]}
    assert len(arrays) == 3, "the parent, its children, and the one that the override names"
    disturbances = Disturbances(cluster, folder)
    wait_until(disturbances.step, "the grid", 900)
    assert disturbances.over == ["limit", "lose", "preempt"]
    rows = {row.exp_id: row for row in status.table(RunStore(folder / "runs"), [exp_id(exp) for exp in GRID])}
    assert {row.state for row in rows.values()} == {"done"}, rows
    for victim, restarts in ((LIMITED_ID, 1), (PREEMPTED_ID, 2)):
        assert cluster.job(job_id(folder, victim))["Restarts"] == str(restarts)
        assert "continues from step" in (folder / "runs" / victim / "logs" / "train.log").read_text()
        assert rows[victim].attempts == 1 + restarts
    assert SavedRun(folder / "runs" / exp_id(PARENT)).attempts == 1
    assert not cluster.alive()

    for group, processes in (("parents", 1), ("grid", 2)):
        done = toy.run(root, ["-e", group, "--log_every", "1"], reference_folder, processes=processes)
        assert done.returncode == 0, done.stderr
    for exp in [PARENT, *GRID]:
        steps = exp["loop"]["steps"]
        assert fingerprints(folder, exp_id(exp), steps) == fingerprints(reference_folder, exp_id(exp), steps)


def submissions(folder: Path) -> list[list[str]]:
    """The experiments of each submission, the oldest first."""
    paths = sorted((folder / "runs" / "submissions").glob("*/submission.json"))
    return [json.loads(path.read_text())["experiments"] for path in paths]


def test_retry_runs_exactly_what_failed(cluster: Cluster, world: tuple[Path, Path]):
    folder = world[1]
    trainval(world, "-e", "fragile", "-j", "held")
    (folder / "data" / "fragile").rename(folder / "data" / "away")
    command("scontrol", "release", *cluster.alive())
    cluster.wait_for_all(120)
    fragile = {exp_id(exp) for exp in FRAGILE if exp["data"]["corpus"] == "fragile"}
    sound = {exp_id(exp) for exp in FRAGILE} - fragile
    assert states(world, "fragile") == dict.fromkeys(fragile, "failed") | dict.fromkeys(sound, "done")
    (folder / "data" / "away").rename(folder / "data" / "fragile")
    trainval(world, "-e", "fragile", "-j", "one", "--job_option", "retry")
    assert set(submissions(folder)[-1]) == fragile
    assert len(cluster.alive()) == 1
    cluster.wait_for_all(120)
    assert states(world, "fragile") == dict.fromkeys(fragile | sound, "done")
    assert {SavedRun(folder / "runs" / identity).attempts for identity in sound} == {1}
    assert "nothing to submit" in trainval(world, "-e", "fragile", "-j", "one", "--job_option", "retry")
    assert len(submissions(folder)) == 2


def test_jobs_are_watched_and_ended(cluster: Cluster, world: tuple[Path, Path]):
    folder = world[1]
    first, second = (exp_id(exp) for exp in LONG)
    trainval(world, "-e", "long", "-j", "held", "--log_every", "5")
    assert states(world, "long") == {first: "queued", second: "queued"}
    assert "nothing to submit" in trainval(world, "-e", "long", "-j", "held", "--log_every", "5")
    assert len(cluster.alive()) == 2
    command("scontrol", "release", job_id(folder, first))
    wait_until(lambda: rows_written(folder, first) > 2, "scores")
    (row, _) = status.table(RunStore(folder / "runs"), [first, second])
    assert (row.state, row.attempts, row.job_id) == ("running", 1, job_id(folder, first))
    assert row.node == socket.gethostname(), (
        "all virtual nodes are this machine, whose living processes are seen without asking"
    )
    assert row.step is not None
    assert row.step >= 5
    assert row.steps == 4000
    assert row.log is not None
    trainval(world, "-e", "long", "--job_option", "kill")
    assert states(world, "long") == {first: "stopped", second: "stopped"}
    assert not cluster.alive()
    row_steps = rows_written(folder, first)
    trainval(world, "-e", "long", "--job_option", "kill")  # what is dead stays so
    assert rows_written(folder, first) == row_steps
    assert first[:8] in trainval(world, "-e", "long", "--job_option", "logs")
    trainval(world, "--exp_id", first, "-j", "one", "--log_every", "5")
    wait_until(lambda: rows_written(folder, first) > row_steps, "the run to go on where it was stopped")
    assert "continues from step" in (folder / "runs" / first / "logs" / "train.log").read_text()
    trainval(world, "-e", "long", "--job_option", "kill")
    assert states(world, "long")[first] == "stopped"
