"""Where a training comes from stands with what it leaves: in each checkpoint, and in the ledger at each start."""

import json
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from src.errors import RunError
from src.files import write_json
from src.runs import ledger
from src.runs.checkpoints import checkpoints
from src.runs.context import Run
from src.runs.history import branches
from src.runs.history.branches import Branch
from src.runs.run_dir import RunDir
from src.runs.store import CONFIG
from src.support import distributed
from tests.core.training import small
from tests.core.training.parallel.modes import MODES, Modes, pairs


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return small.write_data(tmp_path)


def send_stop(step: int) -> Any:
    """A loss that sends a signal to this process in step number `step`."""
    calls: list[int] = []

    def learn(model: Any, batch: Mapping[str, Any]) -> Any:
        calls.append(1)
        if len(calls) == 2 * (step - 1) + 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return small.loss(model, batch)

    return learn


def test_a_checkpoint_says_which_experiment_and_which_branch_it_is_of(folder: Path):
    with small.open_run(folder) as run:
        with pytest.raises(distributed.StopTraining):
            small.train(run, learn=send_stop(5))
        branch = Branch(number=1, from_step=6, data="skip:2")
        write_json(run.path / branches.FILE, {"branches": [branch.model_dump(mode="json")]})
        small.train(run)
        before, after = checkpoints.folder(run.path, 8), checkpoints.folder(run.path, 12)
        for path in (before, after):
            assert (path / CONFIG).read_bytes() == (run.path / CONFIG).read_bytes()
            assert json.loads((path / CONFIG).read_text()) == small.EXP
            assert branches.read(path) == (branch,)
            assert {CONFIG, branches.FILE} <= json.loads((path / "manifest.json").read_text())["files"].keys()


def test_an_origin_without_a_branch(folder: Path):
    with small.open_run(folder) as run:
        small.train(run)
        assert not (checkpoints.folder(run.path, 12) / branches.FILE).exists()


@pytest.mark.slow
@pytest.mark.parametrize("mode", pairs(MODES, "replicated", "zero3"))
def test_it_does_so_however_the_model_is_shared(modes: Modes, mode: str):
    run = modes.trained(mode)
    for path in checkpoints.list_all(run):
        assert (path / CONFIG).read_bytes() == (run / CONFIG).read_bytes()


def test_a_deleted_config_is_refused_with_advice(folder: Path):
    with small.open_run(folder) as run:
        (run.path / CONFIG).unlink()
        with pytest.raises(RunError, match=r"config\.json: no such file"):
            small.train(run)


def test_each_start_is_recorded_with_its_code_job_and_data_position(folder: Path):
    facts = {
        "commit": "c0ffee",
        "dirty": True,
        "variables": {"SLURM_JOB_ID": "58", "SLURM_ARRAY_JOB_ID": "57", "SLURM_ARRAY_TASK_ID": "3"},
    }
    with small.open_run(folder) as run, pytest.raises(distributed.StopTraining):
        small.train(run, learn=send_stop(9))
    with RunDir.open(folder / "runs", small.EXP, small.EXP, facts=facts) as run_dir:
        small.train(Run(run_dir, run.places))
    first, second = [event for event in ledger.read(run.path) if event["event"] == "start"]
    assert (first["step"], first["cursor"], first["commit"], first["job"]) == (0, {"epoch": 0, "offset": 0}, None, None)
    # An epoch has 32 samples, and a step reads 4.
    assert (second["step"], second["cursor"]) == (10, {"epoch": 1, "offset": 8})
    assert (second["commit"], second["job"]) == ("c0ffee+", "57_3")


@pytest.mark.parametrize(
    ("env", "commit", "job"),
    [
        ({}, None, None),
        ({"commit": None, "dirty": None, "variables": {}}, None, None),
        ({"commit": "abc", "dirty": False, "variables": {"SLURM_JOB_ID": "7"}}, "abc", "7"),
        ({"commit": "abc", "dirty": True, "variables": {"EAI_JOB_ID": "f3"}}, "abc+", "f3"),
    ],
)
def test_recorded_facts_of_a_start(tmp_path: Path, env: dict[str, Any], commit: str | None, job: str | None):
    write_json(tmp_path / "env.json", env)
    assert ledger.last_start(tmp_path) == {"commit": commit, "job": job}
