"""What several tests of training share."""

import shutil
from collections.abc import Iterator

import pytest

from tests.core.training.parallel.modes import Modes


@pytest.fixture(scope="session")
def every_mode(tmp_path_factory: pytest.TempPathFactory) -> Modes:
    """Finished runs are made once, when they are asked for first."""
    return Modes(tmp_path_factory.mktemp("modes"))


@pytest.fixture
def modes(every_mode: Modes) -> Iterator[Modes]:
    """No runs but the finished ones that are kept aside."""
    runs = every_mode.folder / "runs"
    shutil.rmtree(runs, ignore_errors=True)
    runs.mkdir()
    yield every_mode
    shutil.rmtree(runs, ignore_errors=True)
