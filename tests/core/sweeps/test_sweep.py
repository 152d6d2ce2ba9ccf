"""Sweeps that run: counted once, stopped early, continued after a kill. Most train with a program that writes scores
and learns nothing."""

import contextlib
import gc
import io
import json
import os
import signal
import sqlite3
import subprocess
import sys
import textwrap
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from src.sweeps.__main__ import main
from src.tables import results
from tests import toy

TRAINER = """
    import json, os, signal, sys, time
    from math import log10
    from pathlib import Path
    from src.runs.run_dir import RunDir
    from src.runs.store import SavedRun

    words = dict(zip(sys.argv[1::2], sys.argv[2::2]))
    runs, exp_id = Path(words["-sb"]), words["--exp_id"]
    exp = json.loads((runs / exp_id / "exp_dict.json").read_text())
    run = RunDir.open(runs, exp, {})
    if "WORDS" in os.environ:
        print(*sys.argv[1:])
    if run.status()["state"] == "done":
        sys.exit(0)

    def leave(*_):
        if os.environ.get("DEAF") != "1":
            run.set_status("stopped", reason="SIGTERM")
            run.close()
            os._exit(75)

    signal.signal(signal.SIGTERM, leave)
    loop = exp["loop"]
    done = len(run.scores.rows())
    for step in range(done + 1, loop["steps"] + 1):
        if step == 3 and exp["seed"] == 666:
            run.set_status("failed", reason="loss is not finite")
            run.close()
            sys.exit(1)
        if step == 3 and exp["seed"] == 15 and (SavedRun(run.path).attempts == 1 or "ALWAYS" in os.environ):
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)
        val_loss = abs(log10(loop["learning_rate"]) + 2) + 1 / step
        run.scores.append({"step": step, "train_loss": 1.0, "val_loss": val_loss})
        while step == 2 and "HOLD" in os.environ and not Path(os.environ["HOLD"]).exists():
            time.sleep(0.02)
        time.sleep(float(os.environ.get("PAUSE", 0)) if loop["learning_rate"] > 0.1 else 0)
    run.set_status("done", step=loop["steps"])
    run.close()
"""
BASE: dict[str, Any] = {**toy.BASE, "loop": {**toy.BASE["loop"], "steps": 8}}
FILE: dict[str, Any] = {
    "program": "trainer.py",
    "command": ["${env}", "${interpreter}", "${program}", "-e", "base", "--set", "${args_no_hyphens}"],
    "method": "random",
    "metric": {"name": "val_loss", "goal": "minimize"},
    "parameters": {"loop.learning_rate": {"distribution": "log_uniform_values", "min": 0.0001, "max": 1.0}},
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a project with data."""
    folder = tmp_path_factory.mktemp("sweep")
    toy.write_data(folder / "data")
    project = toy.project(folder, f"EXP_GROUPS = {{'base': [{BASE!r}]}}\n")
    (project / "trainer.py").write_text(textwrap.dedent(TRAINER))
    return project


class World:
    """A sweep file, its runs, and the command that works on it: in this process, or in one of its own that can be
    killed."""

    def __init__(self, root: Path, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.root, self.folder, self.runs, self.patch = root, folder, folder / "runs", patch
        groups = types.ModuleType("exp_configs")
        groups.EXP_GROUPS = {"base": [BASE]}  # type: ignore[attr-defined]
        patch.setitem(sys.modules, "exp_configs", groups)
        patch.chdir(root)
        for name, value in {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "error"}.items():
            patch.setenv(name, value)

    def write(self, **changes: Any) -> None:
        (self.folder / "lr.yaml").write_text(yaml.safe_dump({**FILE, **changes}, sort_keys=False))

    def arguments(self, *more: str) -> list[str]:
        return [
            str(self.folder / "lr.yaml"),
            *more,
            "-sb",
            str(self.runs),
            "--data_path",
            str(self.root.parent / "data"),
        ]

    def start(self, *arguments: str, **environment: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "src.sweeps", *self.arguments(*arguments)]
        environment = {**toy.environment(), **environment}
        return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def run(self, *arguments: str, **environment: str) -> tuple[int, str, str]:
        with (
            self.patch.context() as patch,
            contextlib.redirect_stdout(io.StringIO()) as out,
            contextlib.redirect_stderr(io.StringIO()) as err,
        ):
            for name, value in environment.items():
                patch.setenv(name, value)
            code = main(self.arguments(*arguments))
        return code, out.getvalue(), err.getvalue()

    def states(self) -> list[str]:
        return [row.split()[1] for row in self.last.splitlines()[1:] if row[:1].isdigit()]

    def sweep(self, *arguments: str, code: int = 0, **environment: str) -> list[str]:
        """Run to the end; the states of the trials."""
        got, self.last, self.err = self.run(*arguments, **environment)
        assert got == code, self.err
        return self.states()

    def start_counts(self) -> dict[str, int]:
        """How often each run was started, by id."""
        return {
            path.parent.name: len(list((path.parent / "attempts").iterdir()))
            for path in self.runs.glob("*/exp_dict.json")
        }

    def rows(self) -> list[results.Row]:
        return results.load_rows(self.runs, "sweep/lr")[0]


@pytest.fixture
def world(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    new_world = World(root, tmp_path, monkeypatch)
    new_world.write()
    return new_world


def wait_for(condition: Callable[[], Any], seconds: float = 300) -> Any:
    end = time.monotonic() + seconds
    while not (result := condition()):
        assert time.monotonic() < end, f"waited {seconds} seconds in vain"
        time.sleep(0.02)
    return result


@pytest.mark.slow
def test_trials_is_the_total_of_all_calls(world: World):
    world.write(method="bayes")
    assert world.sweep("--trials", "2") == ["complete"] * 2
    first = world.last
    assert world.sweep("--trials", "5") == ["complete"] * 5
    assert [line.split()[3] for line in world.last.splitlines()[1:3]] == [
        line.split()[3] for line in first.splitlines()[1:3]
    ]
    assert world.sweep("--trials", "5") == ["complete"] * 5
    assert world.sweep("--trials", "3") == ["complete"] * 5
    assert set(world.start_counts().values()) == {1}
    rows = world.rows()
    assert [row["state"] for row in rows] == ["done"] * 5
    assert {row["group"] for row in rows} == {"sweep/lr"}
    best = min(rows, key=lambda row: row["val_loss"])
    assert f"{best['val_loss']:.6g}, {best['exp_id']}" in world.last.splitlines()[-1]


@pytest.mark.slow
def test_the_command_logs_its_trials(world: World):
    process = world.start("--trials", "1")
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    (row,) = world.rows()
    trial_lines = [line for line in errors.splitlines() if line.startswith("trial 0: ")]
    assert trial_lines == [
        f"trial 0: {row['exp_id']} loop.learning_rate={row['loop.learning_rate']}",
        f"trial 0: done {row['val_loss']:g} ",
    ]


@pytest.mark.slow
def test_a_grid_goes_in_order_and_needs_no_metric(world: World):
    world.write(
        method="grid",
        metric=None,
        parameters={"seed": {"values": [3, 1, 2]}, "loop.learning_rate": {"values": [0.1, 0.01]}},
    )
    assert world.sweep("--trials", "4") == ["complete"] * 4
    cells = [line.split()[2:4] for line in world.last.splitlines()[1:]]
    assert cells == [["3", "0.1"], ["3", "0.01"], ["1", "0.1"], ["1", "0.01"]]
    assert len(world.sweep()) == 6
    assert len(world.sweep("--trials", "100")) == 6


@pytest.mark.slow
def test_the_training_gets_the_arguments_of_the_file(world: World):
    world.write(command=[*FILE["command"][:5], "--set", "seed=4", "${args_no_hyphens}", "--log_every", "2"])
    world.sweep("--trials", "1", WORDS="1")
    (row,) = world.rows()
    paths = f"-sb {world.runs} --data_path {world.root.parent / 'data'}"
    assert (
        world.runs / "logs" / f"{row['exp_id']}.out.log"
    ).read_text() == f"--exp_id {row['exp_id']} {paths} --log_every 2\n"
    assert row["seed"] == 4


@pytest.mark.slow
def test_equal_parameters_are_trained_once(world: World):
    world.write(parameters={"loop.learning_rate": {"values": [0.1, 0.01]}}, run_cap=8)
    assert world.sweep("--workers", "2") == ["complete"] * 8
    assert list(world.start_counts().values()) == [1, 1]


def test_finished_trials_are_not_repeated(world: World):
    world.write(method="grid", parameters={"seed": {"values": [1, 2]}})
    world.sweep("--trials", "1")
    for path in (world.runs / "sweeps").glob("*.sqlite"):
        path.unlink()
    assert world.sweep() == ["complete"] * 2
    assert list(world.start_counts().values()) == [1, 1]


def test_a_failed_training_is_reported_and_the_rest_continue(world: World):
    world.write(method="grid", parameters={"seed": {"values": [666, 1]}})
    assert world.sweep(code=1) == ["fail", "complete"]
    assert "trial 0 failed: loss is not finite. See " in world.last
    assert world.sweep(code=1) == ["fail", "complete"]
    assert set(world.start_counts().values()) == {1}


def test_the_target_ends_the_sweep(world: World):
    world.write(
        method="grid",
        metric={"name": "val_loss", "target": 0.5},
        parameters={"loop.learning_rate": {"values": [1.0, 0.01, 0.1]}},
    )
    assert world.sweep() == ["complete"] * 2


@pytest.mark.slow
def test_bad_trials_are_stopped_early(world: World):
    """The last is the bad one, and slow enough to be caught. It ends in order, with what it has."""
    rates = [0.01, 0.0101, 0.0102, 0.0099, 0.0098, 0.5]
    parameters = {"loop.learning_rate": {"values": rates}}
    world.write(method="grid", parameters=parameters, early_terminate={"type": "median", "min_iter": 2})
    states = world.sweep(PAUSE="0.3")
    assert states == ["complete"] * 5 + ["pruned"]
    rows = {row["loop.learning_rate"]: row for row in world.rows()}
    assert [rows[rate]["state"] for rate in rates] == ["done"] * 5 + ["stopped"]
    assert rows[0.5]["step"] < 8
    assert world.sweep() == states, "what was pruned stays so"
    assert set(world.start_counts().values()) == {1}


def test_a_training_that_dies_of_a_signal_is_started_again(world: World):
    world.write(method="grid", parameters={"seed": {"values": [15]}})
    assert world.sweep() == ["complete"]
    assert list(world.start_counts().values()) == [2]


def test_a_training_that_always_dies_is_given_up(world: World):
    world.write(method="grid", parameters={"seed": {"values": [15]}})
    assert world.sweep(code=1, ALWAYS="1") == ["fail"]
    assert "killed 4 times. See" in world.last


@pytest.mark.slow
def test_a_killed_worker_loses_nothing(world: World):
    """Its training stops in order; the next worker begins the trial again, and the training goes on."""
    worker = world.start("--trials", "3", HOLD=str(world.folder / "go"))
    wait_for(
        lambda: (
            len([path for path in world.runs.glob("*/scores.jsonl") if len(path.read_text().splitlines()) == 2]) == 1
        )
    )
    os.kill(worker.pid, signal.SIGKILL)
    worker.communicate()
    wait_for(lambda: not trainers(world))
    assert [row["state"] for row in world.rows()] == ["stopped"]
    expire_heartbeats(world)
    assert world.sweep("--trials", "3") == ["complete"] * 3
    assert [line.split()[0] for line in world.last.splitlines()[1:4]] == ["1", "2", "3"]
    assert trial_states(world) == ["FAIL", *["COMPLETE"] * 3]
    assert sorted(world.start_counts().values()) == [1, 1, 2]


def expire_heartbeats(world: World) -> None:
    """As if the workers had been dead for a day."""
    with contextlib.closing(sqlite3.connect(world.runs / "sweeps" / "lr.sqlite")) as database, database:
        database.execute("UPDATE trial_heartbeats SET heartbeat = datetime(heartbeat, '-1 day')")


def trial_states(world: World) -> list[str]:
    with contextlib.closing(sqlite3.connect(world.runs / "sweeps" / "lr.sqlite")) as database:
        return [state for (state,) in database.execute("SELECT state FROM trials ORDER BY number")]


@pytest.mark.slow
def test_a_worker_and_its_training_that_are_killed_lose_nothing(world: World):
    worker = world.start("--trials", "2", HOLD=str(world.folder / "go"))
    wait_for(lambda: [path for path in world.runs.glob("*/scores.jsonl") if len(path.read_text().splitlines()) == 2])
    os.kill(worker.pid, signal.SIGKILL)
    worker.communicate()
    for trainer in trainers(world):
        with contextlib.suppress(psutil.NoSuchProcess):  # it ends with the worker
            trainer.kill()
    expire_heartbeats(world)
    assert world.sweep("--trials", "2") == ["complete"] * 2
    assert sorted(world.start_counts().values()) == [1, 2]
    assert all(
        [json.loads(line)["step"] for line in path.read_text().splitlines()] == [*range(1, 9)]
        for path in world.runs.glob("*/scores.jsonl")
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.slow
def test_a_stopped_worker_stops_its_training_gracefully(world: World, number: signal.Signals):
    worker = world.start("--trials", "2", "--workers", "2", HOLD=str(world.folder / "go"))
    wait_for(
        lambda: (
            len([path for path in world.runs.glob("*/scores.jsonl") if len(path.read_text().splitlines()) == 2]) == 2
        )
    )
    worker.send_signal(number)
    worker.communicate(timeout=300)
    assert worker.returncode in (143, 130)
    assert not trainers(world)
    assert [row["state"] for row in world.rows()] == ["stopped"] * 2
    assert world.sweep("--trials", "2") == ["complete"] * 2


def trainers(world: World) -> list[psutil.Process]:
    pids = []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if (
            "trainer.py" in words
            and str(world.runs) in words
            and words[0] != "/bin/sh"
            and process.status() != psutil.STATUS_ZOMBIE
        ):
            pids.append(process)
    return pids


def test_a_study_is_for_one_sweep(world: World):
    world.sweep("--trials", "1")
    world.write(method="grid", parameters={"seed": {"values": [1]}})
    code, _, err = world.run("--trials", "2")
    assert code == 1
    assert "lr.sqlite: this study was started with another method, metric, experiment or parameters." in err


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_damaged_study_is_named(world: World):
    (world.runs / "sweeps").mkdir(parents=True)
    (world.runs / "sweeps" / "lr.sqlite").write_bytes(b"no database at all" * 100)
    code, _, err = world.run("--trials", "2")
    assert code == 1
    assert "lr.sqlite: cannot be used: file is not a database." in err
    gc.collect()  # Optuna leaves that connection open, which Python 3.13 warns of


def test_how_many_must_be_said(world: World):
    assert "error: --trials: missing." in world.run()[2]
    assert "error: --trials: expected a number above 0, got 0." in world.run("--trials", "0")[2]


@pytest.mark.slow
def test_two_workers_train_real_trials(world: World):
    parameters = {"loop.learning_rate": {"values": [0.01, 0.001]}}
    world.write(program="trainval.py", method="grid", parameters=parameters, early_terminate={"type": "median"})
    assert world.sweep("--workers", "2") == ["complete"] * 2
    rows = {row["loop.learning_rate"]: row for row in world.rows()}
    assert [row["state"] for row in rows.values()] == ["done"] * 2
    assert rows[0.01]["val_loss"] < rows[0.001]["val_loss"]
