"""A run that is killed at any moment and started again ends bit for bit where the uninterrupted one ends."""

import copy
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from src.experiments.grid import ref
from src.experiments.identity import exp_id
from src.support import distributed
from tests import toy, warm

STEPS = 40
BASE = copy.deepcopy(toy.BASE)
CHILD: dict[str, Any] = copy.deepcopy(toy.CROSSATTN)
CHILD["model"] |= {"base": ref(BASE), "context_dropout_rate": 0.3}
CHILD["loop"] |= {
    "steps": STEPS,
    "sequences_per_step": 8,
    "micro_batch": 2,
    "eval_every": 8,
    "schedule": "cosine",
    "warmup_rate": 0.1,
}
EXP_CONFIGS = f"EXP_GROUPS = {{'base': [{BASE!r}], 'child': [{CHILD!r}]}}\n"
ARGUMENTS = ["-e", "child", "--log_every", "2"]
TrainingProcess = subprocess.Popen[Any] | warm.Process
_processes: list[TrainingProcess] = []


@pytest.fixture(scope="module")
def run_folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(project, folder with data and the parent's run)."""
    folder = tmp_path_factory.mktemp("resume")
    toy.write_data(folder / "data")
    root = toy.project(folder, EXP_CONFIGS)
    finish(root, folder, ["-e", "base"], processes=1)
    return root, folder


@pytest.fixture(scope="module")
def expected_files(run_folders: tuple[Path, Path]) -> dict[str, str]:
    """Fingerprints of a run with two processes that nobody disturbed; its save directory is moved to `undisturbed`."""
    root, folder = run_folders
    finish(root, folder)
    hashes = fingerprints(folder)
    (folder / "undisturbed").mkdir()
    (folder / "runs" / exp_id(CHILD)).rename(folder / "undisturbed" / "runs")
    return hashes


@pytest.fixture(autouse=True)
def _begins_anew(run_folders: tuple[Path, Path]) -> Iterator[None]:
    """A test that failed half way leaves nothing to the next."""
    root, folder = run_folders
    shutil.rmtree(folder / "runs" / exp_id(CHILD), ignore_errors=True)
    (root / "exp_configs.py").write_text(EXP_CONFIGS)
    yield
    for process in _processes:
        if process.poll() is None:
            process.kill()  # and the kernel its ranks
            process.wait()
    _processes.clear()


def fingerprints(folder: Path) -> dict[str, str]:
    """Hashes of everything that must come out the same."""
    run = folder / "runs" / exp_id(CHILD)
    last = run / "checkpoints" / f"step-{STEPS:08d}"
    paths = [
        last / "model.safetensors",
        last / "optimizer.safetensors",
        last / "state.json",
        run / "scores.jsonl",
        run / "score_list.pkl",
    ]
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in [*paths, run / "checkpoints" / "best.json"]
    }


def ranks(torchrun: TrainingProcess) -> dict[int, psutil.Process]:
    """The training processes by rank."""
    if isinstance(torchrun, warm.Process):
        return torchrun.ranks()
    processes = {}
    for child in psutil.Process(torchrun.pid).children():
        try:
            processes[int(child.environ()["RANK"])] = child
        except (psutil.Error, KeyError):
            continue
    return processes


def start(root: Path, folder: Path, arguments: Sequence[str] = ARGUMENTS, processes: int = 2) -> warm.Process:
    """Its processes are forked from one that has the libraries loaded; what they print goes to `folder`/log."""
    (folder / "log").unlink(missing_ok=True)
    _processes.append(
        process := warm.Process(
            toy.command(root, arguments, folder, processes), toy.environment(), None, folder / "log"
        )
    )
    return process


def finish(root: Path, folder: Path, arguments: Sequence[str] = ARGUMENTS, processes: int = 2) -> None:
    process = start(root, folder, arguments, processes)
    try:
        assert process.wait(timeout=300) == 0, (folder / "log").read_text()
    finally:
        process.kill()


def start_anew(root: Path, folder: Path) -> subprocess.Popen[bytes]:
    """By the command line itself: every process loads all that it needs."""
    command, quiet = toy.command(root, ARGUMENTS, folder, processes=2), subprocess.DEVNULL
    _processes.append(
        process := subprocess.Popen(command, env=toy.environment(), stdout=quiet, stderr=quiet, start_new_session=True)
    )
    return process


def wait_until(condition: Callable[[], bool], process: TrainingProcess) -> bool:
    """False where the process ended first."""
    while process.poll() is None:
        if condition():
            return True
        time.sleep(0.0002)
    return False


def steps_written(folder: Path) -> int:
    path = folder / "runs" / exp_id(CHILD) / "scores.jsonl"
    return path.read_bytes().count(b"\n") * 2 if path.exists() else 0


def began(folder: Path) -> bool:
    """True once rank 0 has opened the save directory."""
    return (folder / "runs" / exp_id(CHILD) / "status.json").exists()


def kill(torchrun: TrainingProcess, victims: Sequence[psutil.Process]) -> None:
    """SIGKILL to `victims`; returns when torchrun and all ranks are gone."""
    everyone = [*ranks(torchrun).values(), psutil.Process(torchrun.pid)]
    assert victims
    assert all(victim.is_running() for victim in victims), "the training ended before it could be killed"
    for victim in victims:
        victim.kill()
    torchrun.wait(timeout=300)
    _, alive = psutil.wait_procs(everyone, timeout=300)
    assert not alive


@pytest.mark.slow
def test_ten_kills_at_random_moments_change_nothing(run_folders: tuple[Path, Path], expected_files: dict[str, str]):
    """The last of them hits processes of torchrun itself, and torchrun itself brings the training to its end."""
    root, folder = run_folders
    draw = random.Random(20)
    # One kill before the first step, nine spread over the training; each some milliseconds after a row was written.
    moments = [0, *sorted(draw.sample(range(1, STEPS // 2 - 3), 9))]
    for i, moment in enumerate(moments):
        process = start_anew(root, folder) if moment == moments[-1] else start(root, folder)
        # Rows that an earlier attempt has left do not tell that this one has begun.
        at = max(moment * 2, steps_written(folder) + 2) if moment else 0
        wait_until(
            lambda at=at, p=process: began(folder) and steps_written(folder) >= at and len(ranks(p)) == 2, process
        )
        time.sleep(draw.random() * (0.05 if moment else 0.15))
        everyone = ranks(process)
        kill(
            process,
            [everyone[0]]
            if i % 3 == 0
            else [everyone[1]]
            if i % 3 == 1
            else [psutil.Process(process.pid), *everyone.values()],
        )
        assert json.loads((folder / "runs" / exp_id(CHILD) / "status.json").read_text())["state"] != "done"
    done = toy.run(root, ARGUMENTS, folder, processes=2)
    assert done.returncode == 0, done.stderr
    log = (folder / "runs" / exp_id(CHILD) / "logs" / "train.log").read_text()
    assert log.count("continues from step") >= len(moments) - 2, (
        "they were restarts from the beginning, not continuations"
    )
    assert fingerprints(folder) == expected_files


@pytest.mark.slow
def test_a_kill_inside_a_checkpoint_write_changes_nothing(
    run_folders: tuple[Path, Path], expected_files: dict[str, str]
):
    root, folder = run_folders
    checkpoints = folder / "runs" / exp_id(CHILD) / "checkpoints"
    incomplete_folders: list[Path] = []
    for _ in range(10):
        process = start(root, folder)
        assert wait_until(lambda: any(checkpoints.glob(".step-*")) and steps_written(folder) >= 4, process)
        kill(process, [ranks(process)[0]])
        incomplete_folders = list(checkpoints.glob(".step-*"))
        if incomplete_folders:
            break
    assert incomplete_folders, "no write was hit in ten attempts"
    finish(root, folder)
    assert fingerprints(folder) == expected_files
    assert not list(checkpoints.glob(".step-*")), "the torn checkpoint is swept up"


def status(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "runs" / exp_id(CHILD) / "status.json").read_text())


def tell(
    torchrun: TrainingProcess, everyone: dict[int, psutil.Process], victim: int | None, number: signal.Signals
) -> None:
    """Send a signal to one rank, or to torchrun, which passes it on to all; the training stands still until it has
    arrived."""
    for rank in everyone.values():
        rank.suspend()
    # A thread that is not yet suspended would take the signal, and nothing would ever be pending.
    assert wait_until(lambda: all(stands_still(rank) for rank in everyone.values()), torchrun)
    os.kill(torchrun.pid if victim is None else everyone[victim].pid, number)
    receivers = everyone.values() if victim is None else [everyone[victim]]
    assert wait_until(lambda: all(pending(rank) >> (number - 1) & 1 for rank in receivers), torchrun)
    for rank in everyone.values():
        rank.resume()


def stands_still(process: psutil.Process) -> bool:
    """Whether every thread has been suspended."""
    return all(
        stat.read_text().rpartition(")")[2].split()[0] == "T"
        for stat in Path(f"/proc/{process.pid}/task").glob("*/stat")
    )


def pending(process: psutil.Process) -> int:
    """Bit n - 1 is set where signal n waits to be delivered."""
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    return next(int(line.split()[1], 16) for line in lines if line.startswith("ShdPnd:"))


@pytest.mark.slow
def test_a_signal_to_one_rank_stops_all_at_the_same_step(
    run_folders: tuple[Path, Path], expected_files: dict[str, str]
):
    """Each stop writes one checkpoint more, ends the session in order, and changes nothing in the end."""
    root, folder = run_folders
    checkpoints = folder / "runs" / exp_id(CHILD) / "checkpoints"
    stops = [(6, 1, signal.SIGUSR1), (20, None, signal.SIGTERM)]  # None: torchrun, which tells both
    for moment, victim, number in stops:
        process = start(root, folder)
        assert wait_until(lambda at=moment, p=process: steps_written(folder) >= at and len(ranks(p)) == 2, process)
        everyone = ranks(process)
        tell(process, everyone, victim, number)
        assert process.wait(timeout=300) == 1, "what torchrun makes of exit code 75"
        assert not psutil.wait_procs(everyone.values(), timeout=300)[1], "some live on"
        record = status(folder)
        assert record["state"] == "stopped"
        assert record["reason"] == f"{number.name}: stopped at step {record['step']}; restart it to resume"
        assert moment <= record["step"] < STEPS
        assert max(checkpoints.glob("step-*")).name == f"step-{record['step']:08d}"
        assert not (folder / "runs" / exp_id(CHILD) / "lease").exists(), "it was not unlocked"
    finish(root, folder)
    log = (folder / "runs" / exp_id(CHILD) / "logs" / "train.log").read_text()
    assert log.count("continues from step") == len(stops)
    assert fingerprints(folder) == expected_files


def test_a_stopped_process_exits_with_the_code_to_requeue_on_and_starts_nothing_more(run_folders: tuple[Path, Path]):
    root, folder = run_folders
    second = {**CHILD, "seed": 5}
    (root / "exp_configs.py").write_text(f"EXP_GROUPS = {{'base': [{BASE!r}], 'child': [{CHILD!r}, {second!r}]}}\n")
    process = start(root, folder, processes=1)
    assert wait_until(lambda: steps_written(folder) >= 4, process)
    os.kill(process.pid, signal.SIGTERM)
    assert process.wait(timeout=300) == 75
    assert "SIGTERM: stopped. The same command resumes from here." in (folder / "log").read_text()
    assert status(folder)["state"] == "stopped"
    assert not (folder / "runs" / exp_id(second)).exists()


def test_a_process_that_is_stopped_while_it_starts_leaves_at_once(run_folders: tuple[Path, Path]):
    root, folder = run_folders
    process = start(root, folder, processes=1)
    assert wait_until(lambda: began(folder), process)
    os.kill(process.pid, signal.SIGUSR1)
    assert process.wait(timeout=300) == 75
    assert status(folder)["state"] == "stopped"
    assert status(folder)["reason"].startswith("SIGUSR1: stopped while it was starting")


@pytest.mark.slow
def test_one_process_gives_the_numbers_of_two(run_folders: tuple[Path, Path], expected_files: dict[str, str]):
    """Token-weighted loss, gradient norm and dropout do not depend on how a step is shared: 1 x 4 or 2 x 2
    micro-batches."""
    root, folder = run_folders
    finish(root, folder, processes=1)
    one = toy.rows(folder, exp_id(CHILD))
    two = [json.loads(line) for line in (folder / "undisturbed" / "runs" / "scores.jsonl").read_text().splitlines()]
    assert [row["tokens"] for row in one] == [row["tokens"] for row in two]
    for a, b in zip(one[:10], two[:10], strict=True):  # before rounding has had time to grow
        assert a["train_loss"] == pytest.approx(b["train_loss"], rel=1e-5)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-4)


@pytest.mark.slow
def test_three_processes_continue_bit_for_bit(run_folders: tuple[Path, Path]):
    """With three, sums depend on their order: the restarted run must add in the order of the first."""
    root, folder = run_folders
    wide = {**CHILD, "seed": 3, "loop": {**CHILD["loop"], "steps": 8, "sequences_per_step": 6}}
    (root / "exp_configs.py").write_text(
        f"EXP_GROUPS = {{'base': [{BASE!r}], 'child': [{CHILD!r}], 'wide': [{wide!r}]}}\n"
    )
    run = folder / "runs" / exp_id(wide)
    contents = []
    for _ in range(2):
        finish(root, folder, ["-e", "wide", "--log_every", "2"], processes=3)
        last = run / "checkpoints" / "step-00000008"
        contents.append(
            [(last / name).read_bytes() for name in ("model.safetensors", "optimizer.safetensors", "state.json")]
        )
        contents[-1].append((run / "scores.jsonl").read_bytes())
        shutil.rmtree(last)
        (run / "status.json").unlink()
    assert contents[0] == contents[1]


@pytest.mark.slow
def test_restarts_that_would_hang_are_refused(run_folders: tuple[Path, Path], tmp_path: Path):
    root, folder = run_folders
    command = toy.command(root, ARGUMENTS, folder, processes=2)
    at = command.index("--nproc-per-node")
    command = [*command[:at], "--max-restarts", "1", *command[at:]]
    environment = {name: value for name, value in toy.environment().items() if name != distributed.OWN_STORE}
    _processes.append(process := warm.Process(command, environment, None, tmp_path / "log"))
    assert process.wait(timeout=300) == 1
    assert f"unless {distributed.OWN_STORE}=1 is set" in (tmp_path / "log").read_text()
