"""A private Slurm for the session, started by .ci/slurm: four virtual nodes of this machine, accounting, two
partitions."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.slurm.real import Cluster

REQUIRED_PROGRAMS = ("slurmctld", "slurmd", "slurmdbd", "munged", "mariadbd", "sbatch")


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    path = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
    if lacking := [name for name in REQUIRED_PROGRAMS if shutil.which(name, path=path) is None]:
        pytest.skip(f"no Slurm on this machine: {', '.join(lacking)} not found; `bash .ci/slurm install` installs it")
    folder = tmp_path_factory.mktemp("slurm")
    script = ["bash", str(ROOT / ".ci" / "slurm")]
    process = subprocess.run(
        [*script, "start", str(folder), str(os.getpid())], capture_output=True, text=True, check=False
    )
    assert process.returncode == 0, process.stderr
    patch = pytest.MonkeyPatch()
    patch.setenv("SLURM_CONF", str(folder / "slurm.conf"))
    try:
        yield Cluster(folder)
    finally:
        subprocess.run([*script, "stop", str(folder)], check=True)
        patch.undo()


@pytest.fixture(autouse=True)
def _nothing_stays_queued(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test that failed half way leaves nothing to the next."""
    yield
    if "cluster" in request.fixturenames:
        real: Cluster = request.getfixturevalue("cluster")
        real.clear()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "batch-1"
    path.mkdir()
    return path
