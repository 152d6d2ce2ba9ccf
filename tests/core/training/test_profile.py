"""--profile: steps are measured, and the numbers stay."""

import json
from pathlib import Path

import pytest

from src.experiments.identity import exp_id
from tests import toy


def train(folder: Path, *options: str) -> Path:
    """A toy run in `folder`; returns its save directory."""
    toy.write_data(folder / "data")
    assert toy.main(["-e", "base", *options], {"base": [toy.BASE]}, folder) == 0
    return folder / "runs" / exp_id(toy.BASE)


@pytest.mark.slow
def test_profiled_steps_change_no_number(tmp_path: Path):
    plain, with_profile = train(tmp_path / "plain"), train(tmp_path / "profiled", "--profile", "3")
    assert (with_profile / "scores.jsonl").read_bytes() == (plain / "scores.jsonl").read_bytes()
    assert not (plain / "profile").exists()
    assert sorted(path.name for path in (with_profile / "profile").iterdir()) == ["key_averages_0.txt", "trace_0.json"]
    events = json.loads((with_profile / "profile" / "trace_0.json").read_text())["traceEvents"]
    assert sum(event["name"] == "Optimizer.step#AdamW.step" for event in events) == 3
    assert "aten::addmm" in (with_profile / "profile" / "key_averages_0.txt").read_text()
