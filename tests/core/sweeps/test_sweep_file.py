"""Sweep files: what is refused before anything starts, what the distributions draw, and what wandb agent would run."""

import os
import queue
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import exp_configs
from src.errors import ConfigError
from src.experiments.config import Places
from src.sweeps.__main__ import describe
from src.sweeps.search_space import parse_dimensions, random_values
from src.sweeps.sweep import load
from tests.conftest import ROOT

FILE: dict[str, Any] = {
    "program": "trainval.py",
    "command": ["${env}", "${interpreter}", "${program}", "-e", "base_tiny", "--set", "${args_no_hyphens}"],
    "method": "random",
    "metric": {"name": "val_loss"},
    "parameters": {"loop.learning_rate": {"min": 0.001, "max": 0.1}},
}
SWEEPS = sorted((ROOT / "resources" / "sweeps").glob("*.yaml"))


@pytest.fixture(autouse=True)
def in_the_project(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(ROOT)


def write_sweep(folder: Path, **changes: Any) -> Path:
    path = folder / "lr.yaml"
    path.write_text(yaml.safe_dump({**FILE, **changes}))
    return path


def places(folder: Path) -> Places:
    return Places(folder / "data", folder / "runs")


def parameters(**values: Any) -> dict[str, Any]:
    return {"parameters": {name.replace("__", "."): value for name, value in values.items()}}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"metod": "grid"}, r"^{file}: unknown key 'metod'\. Did you mean 'method'\?"),
        ({"method": "bayes", "metric": None}, r"^{file}: metric: missing\. method 'bayes' needs one"),
        (
            {"metric": {"name": "eval/accuracy"}},
            r"^{file}: metric\.name: unknown score 'eval/accuracy'\..* Known: .*val_loss, val_perplexity",
        ),
        ({"name": "../x"}, r"^{file}\.name: expected text of the form"),
        (
            {"early_terminate": {"type": "hyperband"}},
            r"^{file}\.early_terminate: hyperband needs min_iter, or max_iter and s\.",
        ),
        (
            {"early_terminate": {"type": "hyperband", "min_iter": 9, "max_iter": 9}},
            r"max_iter: 9, but the first bracket is at iteration 9",
        ),
        ({"early_terminate": {"type": "median", "eta": 3}}, r"type 'median' takes only min_iter"),
        (
            {"command": ["${program}", "-e", "base_tiny", "${args}"]},
            r"^{file}: command: the parameters must reach the program",
        ),
        (
            {"command": [*FILE["command"], "${args}"]},
            r"^{file}: command: \${{args}}: trainval\.py takes parameters only as --set",
        ),
        ({"command": ["python", "trainval.py"]}, r"^{file}: command: \${{program}} is missing"),
        (
            {"command": ["${program}", "--set", "${args_no_hyphens}"]},
            r"^{file}: command: a sweep starts from one experiment",
        ),
        (
            {"command": ["${program}", "-e", "base_tiny", "-r", "1", "--set", "${args_no_hyphens}"]},
            r"-r and -j are not allowed here",
        ),
        (
            {"command": [w.replace("base", "bass") for w in FILE["command"]]},
            r"unknown group 'bass_tiny'\. Did you mean 'base_tiny'",
        ),
        (
            {"command": [w.replace("base", "crossattn") for w in FILE["command"]]},
            r"choose crossattn_tiny\[0\] to crossattn_tiny\[7\]",
        ),
        ({"program": "train.py"}, r"^{file}: command: program 'train\.py': no such file"),
        (
            parameters(loop__learning_rte={"value": 1.0}),
            r"^{file}: parameters\.loop: unknown key 'learning_rte'\. Did you mean",
        ),
        (parameters(lop__steps={"value": 1}), r"unknown key 'lop'\. Did you mean 'loop'\?"),
        (parameters(loop__steps={"values": [1, 2.5]}), r"^{file}: parameters\.loop\.steps: expected int, got 2\.5"),
        (
            parameters(loop__weight_decay={"min": -1.0, "max": 1.0}),
            r"loop\.weight_decay: expected a number >= 0\.0, got -1\.0",
        ),
        (
            parameters(loop__early_stopping={"values": [None]}),
            r'wandb agent would pass .*=None.* Write "null"',
        ),
        (
            parameters(x={"distribution": "unifrm", "min": 1, "max": 2}),
            r"x\.distribution: unknown value 'unifrm'\. Did you mean 'uniform'",
        ),
        (
            parameters(x={"min": "1e-5", "max": 1.0}),
            r"x\.min: expected a finite number, got '1e-5'\. YAML reads .* write 1\.0e-5\.",
        ),
        (parameters(x={"min": 2.0, "max": 1.0}), r"x: expected min below max, got 2\.0 and 1\.0"),
        (
            parameters(x={"values": [1, 2], "probabilities": [0.5, 0.5]}),
            r"x: unknown key 'probabilities'",
        ),
        (parameters(x={"distribution": "log_uniform_values", "min": 0, "max": 1}), r"x: expected min > 0"),
        (parameters(x={"values": [1, 1]}), r"x: values: duplicate value"),
        (parameters(x={"values": []}), r"x\.values: expected a list that is not empty"),
        (parameters(x={"min": 1}), r"x: expected max and min for uniform"),
        (parameters(x={"value": 1, "sigma": 1}), r"x: unknown key 'sigma'"),
        (parameters(x={"distribution": "int_uniform", "min": 1, "max": 2.5}), r"x: int_uniform needs integers"),
        (parameters(x=3), r"parameters\.x: expected a dict, got 3"),
        (
            {"parameters": {"loop.steps": {"value": 1}, "loop": {"parameters": {"steps": {"value": 2}}}}},
            r"loop\.steps: also set by",
        ),
        ({"method": "grid"}, r"parameters\.loop\.learning_rate: method 'grid' needs values"),
    ],
)
def test_mistake_is_reported_before_the_first_trial(tmp_path: Path, changes: dict, message: str):
    path = write_sweep(tmp_path, **changes)
    with pytest.raises(ConfigError, match=message.replace("{file}", str(path)).replace("{{", "{").replace("}}", "}")):
        load(path, places(tmp_path))
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("method: grid\nmethod: random\n", r":2: not valid YAML: .*'method'"),
        ("method: [grid\n", r":2: not valid YAML"),
        ("- grid\n", r": expected the keys of a sweep .*, got list\."),
        ("", r": expected the keys of a sweep .*, got NoneType\."),
        ("a: !!python/object:os.system x\n", r":1: not valid YAML: could not determine a constructor"),
    ],
)
def test_a_file_that_is_no_sweep(tmp_path: Path, text: str, message: str):
    (tmp_path / "x.yaml").write_text(text)
    with pytest.raises(ConfigError, match=f"^{tmp_path}/x.yaml{message}"):
        load(tmp_path / "x.yaml", Places(tmp_path, tmp_path))
    with pytest.raises(ConfigError, match="no such file"):
        load(tmp_path / "y.yaml", Places(tmp_path, tmp_path))


@pytest.mark.parametrize(
    ("spec", "kind", "low", "high"),
    [
        ({"min": 1.0, "max": 3}, "float", 1.0, 3.0),
        ({"distribution": "uniform", "min": 1, "max": 3}, "float", 1.0, 3.0),
        ({"distribution": "log_uniform_values", "min": 0.01, "max": 1}, "log", 0.01, 1.0),
        ({"min": 1, "max": 9}, "int", 1, 9),
        ({"distribution": "int_uniform", "min": 4, "max": 4}, "int", 4, 4),
    ],
)
def test_draws_of_distributions(spec: dict, kind: str, low: float, high: float):
    (dimension,) = parse_dimensions({"x": spec}, "")
    assert (dimension.kind, dimension.low, dimension.high) == (kind, low, high)
    assert {type(dimension.value(number)) for number in (dimension.low, dimension.high)} == {
        int if kind == "int" else float
    }


def test_nested_parameters_are_paths():
    nested = {
        "loop": {
            "parameters": {"steps": {"value": 3}, "early_stopping": {"parameters": {"patience": {"values": [1, 2]}}}}
        }
    }
    dimensions = parse_dimensions(nested, "")
    assert random_values(dimensions, random.Random(0)) == {"loop.steps": 3, "loop.early_stopping.patience": 2}


@pytest.mark.parametrize("file", SWEEPS, ids=lambda path: path.stem)
def test_the_sweeps_of_the_project_can_be_run(file: Path, tmp_path: Path):
    """All but that the data are there."""
    sweep = load(file, places(tmp_path))
    assert sweep.name == file.stem
    assert len(describe(sweep, 4)) > 2
    names = {
        place
        for name, group in exp_configs.EXP_GROUPS.items()
        for place in (name, *(f"{name}[{i}]" for i in range(len(group))))
    }
    assert sweep.command.group in names


def test_there_are_sweeps():
    assert len(SWEEPS) >= 2


def test_a_dry_run_answers_quickly_and_touches_nothing(tmp_path: Path):
    path = write_sweep(tmp_path)
    command = [
        sys.executable,
        "-X",
        "importtime",
        "-m",
        "src.sweeps",
        path,
        "--dry-run",
        "--trials",
        "3",
        "-sb",
        tmp_path / "runs",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert "sweep/lr: random, 3 trials that start from base_tiny[0], minimize val_loss" in done.stdout
    assert not [
        line
        for line in done.stderr.splitlines()
        if line.split("|")[-1].strip() in ("torch", "numpy", "optuna", "sqlalchemy")
    ]
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_wandb_agent_runs_the_same_experiment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    """Its own code starts a trial, as it does when a server sends the values; the experiment has the id that the sweep
    expects."""
    from wandb.wandb_agent import Agent

    for name, value in {
        "WANDB_DIR": tmp_path,
        "WANDB_RUN_ID": "",
        "WANDB_SWEEP_PARAM_PATH": "",
        "WANDB_SWEEP_ID": "s",
    }.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")  # it starts what is called python
    values = {
        "loop.learning_rate": 1e-05,
        "loop.schedule": "linear",
        "loop.early_stopping": '{"patience": 3}',
        "loop.steps": 7,
    }
    command = [*FILE["command"][:5], "--list", *FILE["command"][5:]]
    path = write_sweep(tmp_path, command=command, parameters={name: {"value": value} for name, value in values.items()})
    sweep = load(path, places(tmp_path))
    agent = Agent(None, queue.Queue(), sweep_id="s")
    agent._sweep_command = list(sweep.file.command)
    agent._command_run(
        {"run_id": "r", "program": "trainval.py", "args": {name: {"value": value} for name, value in values.items()}}
    )
    assert agent._run_processes["r"].wait() == 0
    assert capfd.readouterr().out.split()[0] == sweep.source.trial(values, "").exp_id


def test_environment_of_a_server_reaches_the_training(tmp_path: Path):
    """Without these words trainval.py logs to files, and a server sees no score."""
    words = ["--wandb_entity_name", "e", "--wandb_project_name", "p"]
    sweep = load(write_sweep(tmp_path, command=[*FILE["command"][:5], *words, *FILE["command"][5:]]), places(tmp_path))
    assert sweep.command.argv("ID", sweep.places)[-4:] == words
