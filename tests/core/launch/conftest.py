"""A stand-in for Slurm, and the folder of a submission to it. No process of a test outlives it."""

import contextlib
import os
import signal
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from tests.core.launch.fakes.fake_slurm.cluster import Cluster


@pytest.fixture(autouse=True)
def _no_process_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """End the jobs of a test that fails, or is interrupted, half way: every process whose command or variables name its
    folder.

    SIGTERM, as of `timeout`, interrupts a test as Ctrl-C does.
    """
    if "tmp_path" not in request.fixturenames:
        yield
        return
    folder: Path = request.getfixturevalue("tmp_path")
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
        while remaining_pids := [
            pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if _names(pid, folder)
        ]:
            for pid in remaining_pids:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)


def _names(pid: int, folder: Path) -> bool:
    """Whether a process other than this one was started for a test with this folder. Zombies, which name nothing, were
    not."""
    name = os.fsencode(folder)
    with contextlib.suppress(OSError):
        process_text = b"".join(Path("/proc", str(pid), file).read_bytes() for file in ("cmdline", "environ"))
        return pid != os.getpid() and (name + b"/" in process_text or name + b"\0" in process_text)
    return False


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


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The stand-in for the toolkit's client, without jobs, and someone who is logged in."""
    monkeypatch.setenv("FAKE_TOOLKIT", str(tmp_path / "service"))
    monkeypatch.setenv("EAI_TOKEN", "token-1")
    monkeypatch.syspath_prepend(Path(__file__).parent / "fakes" / "fake_client")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # haven imports deprecated modules
        import eai_toolkit_client as client  # pyright: ignore[reportMissingImports]
        from haven.haven_jobs import toolkit_manager  # noqa: F401
    client.calls.clear()
    client.faults.clear()
    return client
