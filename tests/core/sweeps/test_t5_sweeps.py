"""The sweeps over tasks of GLUE: what they look for is logged, and no draw of theirs is refused, which would end an
agent of wandb."""

import random
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import yaml

import exp_configs
from data_prep.t5 import prepare_task
from src.errors import ConfigError
from src.experiments.config import Places
from src.sweeps.search_space import random_values
from src.sweeps.sweep import load
from tests.conftest import ROOT

TASKS = ["cola", "sst2", "mrpc", "stsb", "qqp", "mnli", "qnli", "rte"]
FOLDER = ROOT / "resources" / "sweeps"


@pytest.fixture(autouse=True)
def in_the_project(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(ROOT)


@pytest.mark.parametrize("task", TASKS)
def test_each_looks_for_the_best_by_the_score_of_its_task(task: str, tmp_path: Path):
    sweep = load(FOLDER / f"t5_base_{task}.yaml", Places(tmp_path, tmp_path))
    (exp,) = exp_configs.EXP_GROUPS[f"t5_base_{task}"]
    assert (exp["recipe"], exp["data"]["task"]) == ("seq2seq", task)
    assert sweep.file.metric
    assert (sweep.file.metric.name, sweep.file.metric.goal) == (exp["loop"]["best_metric"], "maximize")
    draws = random.Random(0)
    seen = [sweep.source.trial(random_values(sweep.dimensions, draws), "parameters").exp["loop"] for _ in range(60)]
    assert all(1e-5 <= loop["learning_rate"] <= 1e-3 for loop in seen)
    assert 4e-4 < mean(loop["learning_rate"] for loop in seen) < 6e-4, "uniform"
    assert {(loop["schedule"], loop["warmup_rate"] > 0) for loop in seen} >= {
        ("constant_with_warmup", False),
        ("constant_with_warmup", True),
        ("linear", True),
        ("cosine", True),
    }


def write_sweep(folder: Path, sweep: dict[str, Any]) -> Path:
    """A sweep file, beside the prepared task that it needs."""
    for split, kind in (("train", "film"), ("val", "play")):
        (folder / f"{split}.tsv").write_text(f"sentence\tlabel\na good {kind}\t1\na bad {kind}\t0\n")
    words = ["--task", "sst2", "--data_path", str(folder)]
    prepare_task.main([*words, f"--train={folder}/train.tsv", f"--val={folder}/val.tsv"])
    (folder / "sweep.yaml").write_text(yaml.safe_dump(sweep))
    return folder / "sweep.yaml"


@pytest.mark.parametrize("name", ["eval/accuracy", "eval/example_accuracy", "matthews"])
def test_a_metric_that_nobody_logs_is_refused(name: str, tmp_path: Path):
    sweep = yaml.safe_load((FOLDER / "t5_base_sst2.yaml").read_text())
    load(write_sweep(tmp_path, sweep), Places(tmp_path, tmp_path))
    sweep["metric"]["name"] = name
    with pytest.raises(ConfigError, match=rf"metric\.name: unknown score '{name}'.* Known: .*accuracy"):
        load(write_sweep(tmp_path, sweep), Places(tmp_path, tmp_path))


def test_a_command_that_has_slipped_below_the_parameters_is_refused(tmp_path: Path):
    sweep = yaml.safe_load((FOLDER / "t5_base_sst2.yaml").read_text())
    sweep["parameters"]["command"] = sweep.pop("command")
    with pytest.raises(ConfigError, match=r"sweep\.yaml\.command: missing"):
        load(write_sweep(tmp_path, sweep), Places(tmp_path, tmp_path))
