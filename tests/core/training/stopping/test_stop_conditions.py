"""A training stops in order: after a step, or in the evaluation after it, with its checkpoint, and goes on as if it
never had."""

import hashlib
import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Mapping
from itertools import count
from pathlib import Path
from typing import Any

import psutil
import pytest

from src.errors import RunError
from src.experiments.identity import exp_id
from src.runs import ledger
from src.runs.checkpoints import checkpoints, pins
from src.runs.checkpoints.pins import Pin
from src.runs.context import Limits, Options, Run
from src.runs.history.journal import manifest_hash
from src.runs.lease import Lease
from src.runs.store import SavedRun
from src.support import distributed
from src.training.stopping import stop_conditions
from tests import toy, warm
from tests.core.training import small


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return small.write_data(tmp_path)


def outcome(run: Path) -> dict[str, str]:
    """What must come out the same whatever stops the training."""
    last = checkpoints.folder(run, small.CONFIG.steps)
    paths = [last / "model.safetensors", last / "optimizer.safetensors", last / "state.json", run / "scores.jsonl"]
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


def expected_files(folder: Path) -> dict[str, str]:
    (folder / "undisturbed").mkdir()
    (folder / "undisturbed" / "data").symlink_to(folder / "data")
    with small.open_run(folder / "undisturbed") as run:
        small.train(run)
        return outcome(run.path)


def events(run: Path) -> list[tuple[str, int]]:
    return [(event["event"], event["step"]) for event in ledger.read(run)]


def send_stop(step: int) -> Callable[..., Any]:
    """A loss that sends a signal to this process in step number `step`."""
    calls: list[int] = []

    def learn(model: Any, batch: Mapping[str, Any]) -> Any:
        calls.append(1)
        if len(calls) == 2 * (step - 1) + 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return small.loss(model, batch)

    return learn


@pytest.mark.parametrize("step", [1, 4, 6])
def test_a_signal_leaves_a_checkpoint_of_the_next_step_and_changes_nothing(folder: Path, step: int):
    with small.open_run(folder) as run:
        with pytest.raises(distributed.TrainingStopped) as stop:
            small.train(run, learn=send_stop(step))
        # The signal of a step is counted when the next one begins, which is finished.
        assert stop.value.step == step + 1
        assert [checkpoints.step_of(path) for path in checkpoints.list_all(run.path)][-1] == step + 1
        small.train(run)
        assert outcome(run.path) == expected_files(folder)
        assert events(run.path)[0] == ("start", 0)
        assert ("stop", step + 1) in events(run.path)
        assert events(run.path)[-1] == ("stop", 12)


def test_an_evaluation_that_is_stopped_is_made_after_the_restart(folder: Path):
    answers = iter([False, True])

    def evaluate() -> dict[str, float]:
        if next(answers):
            os.kill(os.getpid(), signal.SIGTERM)
        distributed.stop_together()  # as between two batches
        return {"val_loss": 0.0}

    with small.open_run(folder) as run:
        with pytest.raises(distributed.TrainingStopped) as stop:
            small.train(run, evaluate=evaluate)
        assert stop.value.step == 8
        assert [row["step"] for row in run.dir.scores.rows()] == [4]
        run.dir.scores.append(
            {"step": 8, "val_loss": 1.0}
        )  # as a kill between the evaluation and its checkpoint leaves it
        small.train(run)
        assert [row["step"] for row in run.dir.scores.rows()] == [4, 8, 10, 12]
        assert outcome(run.path) == expected_files(folder)


@pytest.mark.parametrize("stop_step", [8, 12])
def test_the_checkpoint_of_a_stopped_evaluation_is_not_replaced_while_in_use(folder: Path, stop_step: int):
    """Whose files would change while he reads them, and who would hold a checkpoint that is no more."""
    with small.open_run(folder) as run:
        step = asked_in_the_evaluation(run, stop_step)
        checkpoint = checkpoints.folder(run.path, stop_step)
        before = manifest_hash(checkpoint)
        assert step == stop_step
        assert before
        holder = Lease.acquire(folder / "holder")
        pins.place(run.path, "job", Pin("../../holder", steps={checkpoint.name: before}))
        try:
            small.train(run)
        finally:
            holder.release()
        assert manifest_hash(checkpoint) == before
        assert [row["step"] for row in run.dir.scores.rows()] == [4, 8, 10, 12]
        if stop_step == 8:
            assert outcome(run.path) == expected_files(folder)


def test_the_checkpoint_of_a_stopped_evaluation_is_replaced_where_nobody_works_on_it(folder: Path):
    with small.open_run(folder) as run:
        asked_in_the_evaluation(run, 12)
        before = manifest_hash(checkpoints.folder(run.path, 12))
        pins.place(run.path, "job", Pin("../../nobody", steps={"step-00000012": str(before)}))
        small.train(run)
        assert manifest_hash(checkpoints.folder(run.path, 12)) != before
        assert outcome(run.path) == expected_files(folder)


def asked_in_the_evaluation(run: Run, step: int) -> int | None:
    """Train until the evaluation after `step` is asked to stop; the step that it stopped at."""
    evaluations = count(4, 4)

    def evaluate() -> dict[str, float]:
        if next(evaluations) == step:
            os.kill(os.getpid(), signal.SIGTERM)
        distributed.stop_together()
        return {"val_loss": 0.0}

    with pytest.raises(distributed.TrainingStopped) as stop:
        small.train(run, evaluate=evaluate)
    return stop.value.step


def test_a_checkpoint_that_cannot_be_written_ends_the_training_soon(folder: Path):
    with small.open_run(folder, Options(log_every=200)) as run:

        def learn(model: Any, batch: Any) -> Any:
            place = run.path / "checkpoints"
            if not place.is_file():
                shutil.rmtree(place, ignore_errors=True)
                place.write_text("in the way")
            if run.dir.scores.rows():
                time.sleep(0.02)  # the write that fails comes long before the next row
            return small.loss(model, batch)

        with pytest.raises(RunError, match="cannot write"):
            small.train(run, small.CONFIG.model_copy(update={"steps": 400, "eval_every": 200}), learn)
        assert [row["step"] for row in run.dir.scores.rows()] == [200]


@pytest.mark.parametrize("where", ["run", "runs"])
def test_a_stop_file_stops_until_it_is_removed(folder: Path, where: str):
    with small.open_run(folder) as run:
        with pytest.raises(distributed.TrainingStopped):
            small.train(run, learn=send_stop(5))
        saved = checkpoints.folder(run.path, 6).stat()
        file = (run.path if where == "run" else run.path.parent) / stop_conditions.STOP_FILE
        file.touch()
        for _ in range(2):
            with pytest.raises(distributed.TrainingStopped, match="remove it") as stop:
                small.train(run)
            assert (stop.value.step, stop.value.exit_code) == (6, distributed.INTERRUPTED)
        assert checkpoints.folder(run.path, 6).stat().st_ino == saved.st_ino, "what is saved is not saved again"
        file.unlink()
        small.train(run)
        assert outcome(run.path) == expected_files(folder)


def test_a_stop_file_that_appears_is_seen_soon(folder: Path):
    began = time.monotonic()
    with small.open_run(folder) as run:

        def learn(model: Any, batch: Any) -> Any:
            (run.path / stop_conditions.STOP_FILE).touch()
            assert time.monotonic() - began < 300, "nobody looks at the file"
            return small.loss(model, batch)

        with pytest.raises(distributed.TrainingStopped, match="remove it"):
            small.train(run, small.CONFIG.model_copy(update={"steps": 10**6, "eval_every": 10**6}), learn)


@pytest.mark.parametrize(
    ("limits", "reason"),
    [(Limits(end=0.0), "time limit"), (Limits(host_memory=1e-9), "of host memory in use")],
)
def test_limits_stop_and_are_to_be_started_again(folder: Path, limits: Limits, reason: str):
    with small.open_run(folder, Options(limits=limits)) as run:
        with pytest.raises(distributed.TrainingStopped, match=reason) as stop:
            small.train(run)
        assert stop.value.exit_code == distributed.REQUEUE


def test_a_limit_that_goes_away_again_has_still_stopped_the_training(folder: Path, monkeypatch: pytest.MonkeyPatch):
    """Between the look that all agreed on and the stop a whole step goes by."""
    monkeypatch.setattr(stop_conditions, "LOOK_SECONDS", 0.0)
    with small.open_run(folder) as run:
        file, calls = run.path / stop_conditions.STOP_FILE, count()

        def learn(model: Any, batch: Any) -> Any:
            call = next(calls) % 4  # two a step: the file is there when every second step begins, and not when it ends
            if call == 0:
                file.touch()
            elif call == 2:
                file.unlink()
            return small.loss(model, batch)

        with pytest.raises(distributed.TrainingStopped, match="remove it"):
            small.train(run, small.CONFIG.model_copy(update={"steps": 10**5, "eval_every": 100}), learn)


def test_the_memory_in_use_is_that_of_the_machine():
    assert psutil.virtual_memory().percent / 100 - 0.05 <= stop_conditions.memory_used() < 1


@pytest.mark.parametrize(
    ("version", "files", "share"),
    [
        (
            "0::/job",
            {
                "job/memory.max": "max",
                "job/memory.current": "5",
                "job/memory.stat": "inactive_file 1",
                "memory.max": "max",
            },
            None,
        ),
        (
            "0::/job",
            {"job/memory.max": "100", "job/memory.current": "103", "job/memory.stat": "anon 9\ninactive_file 4"},
            0.99,
        ),
        ("0::/a/b", {"a/memory.max": "100", "a/memory.current": "99", "a/memory.stat": "inactive_file 0"}, 0.99),
        (
            "4:memory:/job",
            {
                "memory/job/memory.limit_in_bytes": "100",
                "memory/job/memory.usage_in_bytes": "100",
                "memory/job/memory.stat": "cache 3\ntotal_inactive_file 1",
            },
            0.99,
        ),
    ],
)
def test_control_groups_count_where_they_allow_less(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, files: dict[str, str], share: float | None
):
    monkeypatch.setattr(stop_conditions, "_GROUP", tmp_path / "cgroup")
    monkeypatch.setattr(stop_conditions, "_GROUPS", tmp_path / "groups")
    (tmp_path / "cgroup").write_text(f"1:cpu:/\n{version}\n")
    for name, text in files.items():
        path = tmp_path / "groups" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    if share is None:
        assert stop_conditions.memory_used() < 0.99
    else:
        assert stop_conditions.memory_used() == pytest.approx(share)


def test_a_system_without_meminfo_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(stop_conditions, "_MEMORY", tmp_path / "none")
    with pytest.raises(RunError, match="--max_host_memory"):
        stop_conditions.memory_used()


class TrainingProcess:
    """trainval.py on a toy experiment that takes long, in a process of its own."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        exp = {**toy.BASE, "loop": {**toy.BASE["loop"], "steps": 3000, "eval_every": 3000}}
        root = toy.project(folder, f"EXP_GROUPS = {{'base': [{exp!r}]}}\n")
        toy.write_data(folder / "data")
        self.run, self.errors = folder / "runs" / exp_id(exp), folder / "errors.txt"
        command = toy.command(root, ["-e", "base", "--log_every", "2", *arguments], folder)
        self.process = warm.Process(command, toy.environment(), None, folder / "printed.txt", self.errors)

    def row(self) -> int:
        """The step of the newest score row, once there is another than now."""
        path, deadline = self.run / "scores.jsonl", time.monotonic() + 300
        before = path.read_bytes() if path.exists() else b""
        while not path.exists() or path.read_bytes() == before:
            assert self.process.poll() is None, self.errors.read_text()
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return json.loads(path.read_text().splitlines()[-1])["step"]

    def end(self) -> int:
        return self.process.wait(timeout=300)


@pytest.mark.slow
def test_processes_that_read_data_do_not_take_the_signals_of_the_training(tmp_path: Path):
    """A scheduler signals every process of a job: the training stops in order, and those that read for it end with
    it."""
    training = TrainingProcess(tmp_path, "--num_workers", "2")
    training.row()
    workers = [child for child in psutil.Process(training.process.pid).children() if child.is_running()]
    assert len(workers) == 2
    for number in distributed.STOP_SIGNALS:
        for worker in workers:
            worker.send_signal(number)
    training.row()
    assert all(worker.is_running() for worker in workers)
    for process in (*workers, psutil.Process(training.process.pid)):
        process.send_signal(signal.SIGTERM)
    assert training.end() == distributed.REQUEUE
    _, alive = psutil.wait_procs(workers, timeout=300)
    assert not alive
    status = SavedRun(training.run).status
    assert status["state"] == "stopped"
    assert "SIGTERM" in status["reason"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "code", "reason", "kind"),
    [(["--stop_after", "12"], 75, "time limit", "limit"), ([], 130, "SIGINT", "person")],
)
def test_the_command_line_says_why_it_stopped(tmp_path: Path, arguments: list[str], code: int, reason: str, kind: str):
    process = TrainingProcess(tmp_path, *arguments)
    if not arguments:
        process.row()
        os.kill(process.process.pid, signal.SIGINT)
    assert process.end() == code
    assert reason in SavedRun(process.run).status["reason"]
    assert f'"stopped_by": "{kind}"' in (process.run / "status.json").read_text(), (
        "what the script of a Slurm job looks for"
    )
    assert arguments or checkpoints.newest_whole(process.run) is not None
