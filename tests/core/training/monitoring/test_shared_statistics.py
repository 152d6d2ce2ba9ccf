"""Statistics of a model that two processes share."""

from pathlib import Path

import pytest

from tests import warm

ZERO = [pytest.param(stage, marks=pytest.mark.slow) for stage in ("1", "2", "3")]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["fsdp", *ZERO])
def test_statistics_of_shards_equal_those_of_the_full_model(mode: str, tmp_path: Path):
    if mode != "fsdp":
        pytest.importorskip("deepspeed")
    assert warm.torchrun(Path(__file__).with_name("shared_statistics.py"), [mode], 2, tmp_path / "log") == ""
