"""NaN in scores: null in scores.jsonl and status.json, NaN in the summary of Weights & Biases."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
from torch import nn

from src.experiments.config import Places
from src.runs import context
from src.runs.run_dir import RunDir
from src.runs.store import SavedRun
from src.training.monitoring.reporter import Reporter
from src.training.state import IntervalTotals
from tests import toy


def test_an_interval_without_a_finite_loss_is_nan():
    totals = IntervalTotals()
    assert "train_loss" not in totals.scores(), "no step"
    totals.add_step(math.nan, 2, 1.0, False)
    assert math.isnan(totals.scores()["train_loss"])
    totals.add_step(3.0, 2, 1.0, False)
    assert totals.scores()["train_loss"] == 1.5


def test_a_row_with_nan_is_null_in_the_files(tmp_path: Path):
    from src.experiments.config import load
    from src.training.config import LoopConfig

    config = load(LoopConfig, toy.BASE["loop"], "loop")
    with RunDir.open(tmp_path / "runs", toy.BASE, {}) as run_dir:
        run = context.Run(run_dir, Places(tmp_path, tmp_path / "runs"), context.Options())
        reporter = Reporter(run, config, nn.Linear(1, 1), 0)
        perf = {"tokens_per_second": 1.0, "steps_per_second": 1.0}
        reporter.report({"step": 1, "train_loss": 1.0, "val_loss": 0.4}, perf)
        assert SavedRun(run_dir.path).status["loss"] == 1.0
        reporter.report({"step": 2, "train_loss": math.nan, "val_loss": math.inf}, perf)
        reporter.close()
        assert SavedRun(run_dir.path).status["loss"] is None
        assert run_dir.scores.rows()[-1] == {"step": 2, "train_loss": None, "val_loss": None}


WANDB = """
import math, sys
from pathlib import Path
from torch import nn
from src.experiments.config import Places
from src.runs import context as runs
from src.runs.run_dir import RunDir
from src.training.monitoring.wandb import Wandb
from tests import toy

options = runs.Wandb(None, "p", None, False)
with RunDir.open(Path(sys.argv[1]), toy.BASE, {}) as opened:
    opened.scores.append({"step": 1, "val_loss": 0.4})
    opened.scores.append({"step": 2, "val_loss": math.nan})
    run = runs.Run(opened, Places(Path("data"), Path(sys.argv[1])), runs.Options(None, options))
    callback = Wandb(run, options, nn.Linear(1, 1))
    callback.close()
"""


@pytest.mark.slow
def test_the_summary_of_wandb_ends_in_nan(tmp_path: Path):
    """The rows come from scores.jsonl, as after a kill."""
    root = Path(__file__).resolve().parents[4]
    command = [sys.executable, "-c", WANDB, str(tmp_path / "runs")]
    subprocess.run(
        command, cwd=root, env={**toy.environment(), "PYTHONPATH": str(root)}, check=True, capture_output=True
    )
    (folder,) = (tmp_path / "runs").glob("*/wandb/offline-run-*")
    inspect = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(folder)]
    records = [
        json.loads(line)
        for line in subprocess.run(inspect, capture_output=True, text=True, check=True).stdout.splitlines()
    ]
    items = [record["history"]["item"] for record in records if record["type"] == "history"]
    values = [float(item["val_loss"]) for item in items if "val_loss" in item]
    assert values[0] == 0.4
    assert math.isnan(values[1])
