"""A stand-in for Slurm, and the folder of a submission to it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch.fake_slurm.cluster import Cluster


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path / "slurm", monkeypatch)
    yield cluster
    cluster.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "20260101-batch"
    path.mkdir()
    return path
