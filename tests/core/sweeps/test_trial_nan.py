"""A trial whose metric ended in NaN failed; NaN before the end changes nothing."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import pytest

from src.runs.run_dir import RunDir
from src.sweeps.study import Training, TrialResult
from tests import toy

Row = dict[str, float | int]


def follow(runs: Path, rows: Sequence[Row], metric: str | None = "val_loss") -> TrialResult:
    with RunDir.open(runs, toy.BASE, {}) as run:
        for row in rows:
            run.scores.append(row)
        run.set_status("done", step=rows[-1]["step"])
        return Training(run.path, ["no-program"], metric).follow(lambda values: not all(map(math.isfinite, values)))


@pytest.mark.parametrize(
    ("values", "state", "value"),
    [
        ([0.4, math.nan], "failed", None),
        ([0.4, math.inf], "failed", None),
        ([math.nan], "failed", None),
        ([math.nan, 0.4], "done", 0.4),
        ([0.4, math.nan, 0.6], "done", 0.6),
        ([0.4, None], "done", 0.4),
    ],
)
def test_a_trial_has_the_last_value_of_its_metric(
    tmp_path: Path, values: list[float | None], state: Literal["done", "failed"], value: float | None
):
    """None: a row without the metric."""
    rows = [{"step": step} | ({} if each is None else {"val_loss": each}) for step, each in enumerate(values, start=1)]
    result = follow(tmp_path, rows)
    assert (result.state, result.value) == (state, value)
    assert ("'val_loss'" in result.reason) == (state == "failed")


def test_a_missing_metric_fails_and_a_grid_without_metric_does_not(tmp_path: Path):
    assert follow(tmp_path / "a", [{"step": 1, "em": 1.0}]).state == "failed"
    assert follow(tmp_path / "b", [{"step": 1, "em": math.nan}], None) == TrialResult("done", None)
