"""The real Triton server: its scores are those in this process, and whatever dies is noticed, waited for and started
again."""

import os
import signal
import socket
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
def folder(places: Places, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A repository that is served."""
    folder = tmp_path_factory.mktemp("served") / "models"
    write(folder, places, "judge", "judge")
    write(folder, places, "talker", "talker")
    server.start(folder)
    yield folder
    if server.read_state(folder):
        server.stop(folder)


@pytest.fixture(params=["grpc", "http"])
def root(request: pytest.FixtureRequest, folder: Path) -> str:
    """An address without a model."""
    if request.param == "grpc":
        pytest.importorskip("grpc", reason="grpcio is not installed; requirements/serving.txt")
    return address_of(folder, request.param)


def address_of(folder: Path, protocol: str) -> str:
    return f"{protocol}://127.0.0.1:{server.require_state(folder)[f'{protocol}_port']}"


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
        ("judge", judge, [[10**6]], "refuses the batch: a token id is 1000000"),
        ("judge", judge, [[1]] * 65, r"refuses the batch: .*batch-size must be <= 64"),
    ):
        with pytest.raises((ConfigError, RunError), match=message):
            RemoteModel(f"{root}/{name}", fingerprint, never).rewards(ids)


def test_throughput_is_shown(folder: Path, capsys: pytest.CaptureFixture[str]):
    assert server.main(["status", str(folder)]) == 0
    _, head, *rows = capsys.readouterr().out.splitlines()
    assert head.split()[:5] == ["model", "mode", "fingerprint", "requests", "sequences"]
    assert [row.split()[:2] for row in rows] == [["judge", "rm"], ["talker", "ref"]]
    assert all(row.endswith("answers") for row in rows)


def test_one_server_and_free_ports(folder: Path, places: Places, tmp_path: Path):
    with pytest.raises(RunError, match=r"its server runs already, as process \d+"):
        server.start(folder)
    write(tmp_path / "models", places, "judge", "judge")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(
            ConfigError, match=rf"--grpc_port {port}: cannot listen on 127\.0\.0\.1: Address already in use"
        ):
            server.start(tmp_path / "models", ports=(0, port, 0))
    assert not (tmp_path / "models" / server.STATE).exists()


def test_a_dead_process_of_the_backend_is_noticed_and_replaced(
    folder: Path, root: str, places: Places, capsys: pytest.CaptureFixture[str]
):
    told: list[str] = []

    def wait(text: str, since: float) -> None:
        told.append(text)
        if sum("not healthy" in each for each in told) == 1 and "not healthy" in text:
            assert server.main(["status", str(folder)]) == 1
            server.reload(folder)

    client = RemoteModel(f"{root}/judge", fingerprint_of(run_of(places, "judge"), places), wait)
    assert client.rewards(IDS) == rewards_of(places)
    children = psutil.Process(server.require_state(folder)["pid"]).children()
    stubs = [each for each in children if each.status() != psutil.STATUS_ZOMBIE and "judge" in " ".join(each.cmdline())]
    assert len(stubs) == 1
    os.kill(stubs[0].pid, signal.SIGKILL)
    assert client.rewards(IDS) == rewards_of(places)
    assert any("not healthy" in text for text in told)
    judge, talker = capsys.readouterr().out.splitlines()[2:4]
    assert "Stub process" in judge
    assert talker.endswith("answers")


def test_new_weights_are_loaded_and_told_apart(folder: Path, places: Places, capsys: pytest.CaptureFixture[str]):
    root = address_of(folder, "http")
    client = RemoteModel(f"{root}/judge", fingerprint_of(run_of(places, "judge"), places), never)
    assert client.rewards(IDS) == rewards_of(places)
    try:
        write(folder, places, "other", "judge")
        assert server.main(["status", str(folder)]) == 1
        assert "serves older weights than the repository has" in capsys.readouterr().out
        assert server.main(["reload", str(folder)]) == 0
        with pytest.raises(ConfigError, match="serves another model"):
            client.rewards(IDS)
        other = RemoteModel(f"{root}/judge", fingerprint_of(run_of(places, "other"), places), never)
        assert other.rewards(IDS) == rewards_of(places, "other")
    finally:
        write(folder, places, "judge", "judge")
        server.reload(folder)


def test_a_server_that_is_killed_is_waited_for(folder: Path, root: str, places: Places):
    state, told = server.require_state(folder), []

    def wait(text: str, since: float) -> None:
        told.append(text)
        if len(told) == 2:
            with pytest.raises(RunError, match="no server runs on it"):
                server.require_state(folder)
            server.start(folder, ports=[state[name] for name in ("http_port", "grpc_port", "metrics_port")])

    client = RemoteModel(f"{root}/judge", fingerprint_of(run_of(places, "judge"), places), wait)
    assert client.rewards(IDS) == rewards_of(places)
    os.killpg(state["pid"], signal.SIGKILL)
    psutil.wait_procs([psutil.Process(state["pid"])])

    assert client.rewards(IDS) == rewards_of(places)
    assert len(told) >= 2


def test_it_ends_with_all_that_it_started(folder: Path):
    """The last test here."""
    process = psutil.Process(server.require_state(folder)["pid"])
    all_of_it = [process, *process.children(recursive=True)]
    memory = f"{server._name_shared_memory(folder)}*"
    assert list(Path("/dev/shm").glob(memory)), "the setting of the test"
    assert server.main(["stop", str(folder)]) == 0
    assert not psutil.wait_procs(all_of_it, timeout=60)[1]
    assert not list(Path("/dev/shm").glob(memory))
    assert server.main(["stop", str(folder)]) == 1
