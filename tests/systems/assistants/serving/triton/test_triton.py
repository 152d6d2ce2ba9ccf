"""The real Triton server: its scores are those in this process, and whatever dies is noticed, waited for and started
again."""

import os
import signal
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from src.errors import ConfigError, RunError
from src.experiments.config import Places
from src.serving.served_model import fingerprint_of, load_served
from src.systems.assistants.rewards.remote import RemoteModel
from src.systems.assistants.serving.triton import repository, server
from tests.core.serving import small_runs
from tests.core.serving.small_runs import IDS, pad, run_of
from tests.systems.assistants.serving.triton.process import Server

psutil = pytest.importorskip("psutil", reason="psutil is not installed")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.triton,
    pytest.mark.skipif(
        not (server.ENVIRONMENT / "installed").is_file(),
        reason="the Triton server is not installed; .ci/triton does that",
    ),
]


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Places:
    return small_runs.train(tmp_path_factory.mktemp("triton"), others=True)


def write(folder: Path, places: Places, which: str, name: str) -> None:
    mode = "ref" if which == "talker" else "rm"
    asked = Namespace(mode=mode, backend="python", name=name, max_batch=64, device="cpu")
    repository.write_model(run_of(places, which), folder, places, asked)


@pytest.fixture(scope="module")
def served(places: Places, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("served") / "models"
    write(folder, places, "judge", "judge")
    write(folder, places, "talker", "talker")
    served = Server(folder)
    yield served
    served.kill()


@pytest.fixture(params=["grpc", "http"])
def root(request: pytest.FixtureRequest, served: Server) -> str:
    """An address without a model."""
    if request.param == "grpc":
        pytest.importorskip("grpc", reason="grpcio is not installed; requirements/serving.txt")
    return served.address(request.param)


def never(text: str, since: float) -> None:
    if "has not answered for" not in text:
        pytest.fail(f"waited: {text}")


def rewards_of(places: Places, which: str = "judge") -> Any:
    return pytest.approx(load_served(run_of(places, which), places, "cpu").score(**pad(IDS)).tolist(), abs=1e-5)


def test_rewards_are_those_in_process(root: str, places: Places):
    client = RemoteModel(f"{root}/judge", fingerprint_of(run_of(places, "judge"), places), never)
    found = client.rewards(IDS)
    assert found == rewards_of(places)
    assert len(set(found)) == len(IDS)


def test_log_probabilities_are_those_in_process(root: str, places: Places):
    run = run_of(places, "talker")
    wanted = load_served(run, places, "cpu").score(**pad(IDS))
    found = RemoteModel(f"{root}/talker", fingerprint_of(run, places), never).logps(IDS, [3, 1, 2])
    assert found == [
        pytest.approx(wanted[i, len(IDS[i]) - n : len(IDS[i])].tolist(), abs=1e-5) for i, n in enumerate([3, 1, 2])
    ]


def test_what_is_wrong_is_one_line(root: str, places: Places):
    judge, other = (fingerprint_of(run_of(places, which), places) for which in ("judge", "other"))
    for name, fingerprint, ids, message in (
        ("judges", judge, IDS, r"no such model there\. It has judge, talker\."),
        ("judge", other, IDS, "serves another model"),
        ("judge", judge, [[10**6]], "refuses the batch: input_ids: token id 1000000"),
        ("judge", judge, [[1]] * 65, r"refuses the batch: .*batch-size must be <= 64"),
    ):
        with pytest.raises((ConfigError, RunError), match=message):
            RemoteModel(f"{root}/{name}", fingerprint, never).rewards(ids)


def test_a_port_that_is_taken(served: Server):
    with pytest.raises(ConfigError, match=r"--grpc_port \d+: cannot listen on 127\.0\.0\.1: Address already in use"):
        server.command(served.folder, "127.0.0.1", {"grpc": served.ports["grpc"]})


def test_a_dead_process_of_the_backend_is_noticed_and_replaced(served: Server, root: str, places: Places):
    told: list[str] = []

    def wait(text: str, since: float) -> None:
        told.append(text)
        if sum("not healthy" in each for each in told) == 1 and "not healthy" in text:
            assert not served.answers("judge")
            served.reload("judge")

    client = RemoteModel(f"{root}/judge", fingerprint_of(run_of(places, "judge"), places), wait)
    assert client.rewards(IDS) == rewards_of(places)
    children = psutil.Process(served.process.pid).children()
    stubs = [each for each in children if each.status() != psutil.STATUS_ZOMBIE and "judge" in " ".join(each.cmdline())]
    assert len(stubs) == 1
    os.kill(stubs[0].pid, signal.SIGKILL)
    assert client.rewards(IDS) == rewards_of(places)
    assert any("not healthy" in text for text in told)
    assert served.answers("talker")


def test_new_weights_are_loaded_and_told_apart(served: Server, places: Places):
    root = served.address("http")
    client = RemoteModel(f"{root}/judge", fingerprint_of(run_of(places, "judge"), places), never)
    assert client.rewards(IDS) == rewards_of(places)
    try:
        write(served.folder, places, "other", "judge")
        assert not served.answers("judge")
        served.reload("judge")
        with pytest.raises(ConfigError, match="serves another model"):
            client.rewards(IDS)
        other = RemoteModel(f"{root}/judge", fingerprint_of(run_of(places, "other"), places), never)
        assert other.rewards(IDS) == rewards_of(places, "other")
    finally:
        write(served.folder, places, "judge", "judge")
        served.reload("judge")


def test_a_server_that_is_killed_is_waited_for(served: Server, root: str, places: Places):
    told = []

    def wait(text: str, since: float) -> None:
        told.append(text)
        if len(told) == 2:
            served.start()

    client = RemoteModel(f"{root}/judge", fingerprint_of(run_of(places, "judge"), places), wait)
    assert client.rewards(IDS) == rewards_of(places)
    served.kill()
    assert client.rewards(IDS) == rewards_of(places)
    assert len(told) >= 2


def test_it_ends_with_all_that_it_started(served: Server):
    """The last test here."""
    process = psutil.Process(served.process.pid)
    processes = [process, *process.children(recursive=True)]
    served.stop()
    assert not psutil.wait_procs(processes, timeout=60)[1]
