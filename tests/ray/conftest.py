"""A private Ray for the session, of the environment that .ci/ray installs: a head with room for two jobs."""

from collections.abc import Iterator

import psutil
import pytest

from tests.ray.real import PYTHON, Cluster


@pytest.fixture(scope="session")
def _cluster_of_the_session() -> Iterator[Cluster]:
    if not PYTHON.exists():
        pytest.skip("no Ray on this machine: .ray/bin/python not found; `bash .ci/ray` installs it")
    real = Cluster()
    yield real
    real.close()
    remaining = [
        process.pid
        for process in psutil.process_iter(["cmdline"])
        if str(real.folder) in " ".join(process.info["cmdline"] or ())
    ]
    assert not remaining, "processes of Ray outlive it"


@pytest.fixture
def cluster(_cluster_of_the_session: Cluster) -> Iterator[Cluster]:
    """The head alone, with no job alive; what a test leaves is ended."""
    _cluster_of_the_session.start()
    yield _cluster_of_the_session
    _cluster_of_the_session.clear()
