"""Scores of models on servers: what is asked, what is waited for, and what ends the run with one line."""

import socket
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from importlib.util import find_spec
from typing import Any

import pytest

from src.errors import ConfigError, RunError, UserError
from src.systems.assistants.rewards import kserve, remote
from src.systems.assistants.rewards.remote import RemoteModel
from tests.systems.assistants.rewards.kserve_servers import FINGERPRINT, Script, serve_grpc, serve_http

IDS = [[1, 2, 3], [4], [5, 6]]
LOGPS = [[-0.5, -0.25], [], [-2.5]]
SERVE: dict[str, Callable[..., AbstractContextManager[int]]] = {"http": serve_http, "grpc": serve_grpc}
PROTOCOLS = [
    "http",
    pytest.param(
        "grpc",
        marks=pytest.mark.skipif(not find_spec("grpc"), reason="grpcio is not installed; requirements/serving.txt"),
    ),
]


class StopWaiting(Exception):
    """What the run's own `wait` raises."""


def never(text: str, since: float) -> None:
    pytest.fail(f"waited: {text}")


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SHORT_PAUSE", "FIRST_REST", "LONGEST_REST"):
        monkeypatch.setattr(remote, name, 0.01)


@pytest.fixture(params=PROTOCOLS)
def protocol(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def make_client(
    stack: ExitStack, addresses: str, wait: Callable[[str, float], Any] = never, seconds: float = 60
) -> RemoteModel:
    model = RemoteModel(addresses, FINGERPRINT, wait, seconds)
    stack.callback(model.close)
    return model


def free_port() -> int:
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        return reserved.getsockname()[1]


def test_batch_is_sent_unchanged(protocol: str, stack: ExitStack):
    seen_batches = []

    def score(shape: list[int], ids: list[int], mask: list[int]) -> tuple[list[int], list[float]]:
        seen_batches.append((shape, ids, mask))
        return ([3], [1.5, -2.0, 0.1]) if len(seen_batches) == 1 else ([3, 3], [9, -0.5, -0.25, 9, 9, 9, 9, -2.5, 9])

    client = make_client(
        stack, f"{protocol}://127.0.0.1:{stack.enter_context(SERVE[protocol](Script(scores=score)))}/judge"
    )
    assert client.rewards(IDS) == pytest.approx([1.5, -2.0, 0.1], abs=1e-7)
    assert client.logps(IDS, [2, 0, 1]) == LOGPS
    assert seen_batches == [([3, 3], [1, 2, 3, 4, 0, 0, 5, 6, 0], [1, 1, 1, 1, 0, 0, 1, 1, 0])] * 2
    assert client.rewards([]) == []
    assert len(seen_batches) == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"fingerprint": "e" * 64},
            r"/judge: expected the model with fingerprint ffffffffffff, .* got eeeeeeeeeeee\.",
        ),
        ({"fingerprint": None}, r"/judge: the model has no fingerprint"),
        (
            {"scores": lambda *_: ([2], [1.0, 2.0])},
            r"/judge: expected one reward for each of 3 sequences, got 2 numbers of shape \[2\]",
        ),
        (
            {"scores": lambda *_: ([3], [1.0, 2.0])},
            r"/judge: expected one reward for each of 3 sequences, got 2 numbers of shape \[3\]",
        ),
        (
            {"scores": lambda *_: ([3], [1.0, float("nan"), 2.0])},
            r"/judge: expected a number as the reward of sequence 2 of 3, got nan",
        ),
        ({"models": ["reward", "base"]}, r"/judge: no such model\. The server has: base, reward\."),
    ],
)
def test_invalid_server_answers_are_one_error_line(
    changes: dict[str, Any], message: str, protocol: str, stack: ExitStack
):
    port = stack.enter_context(SERVE[protocol](Script(**changes)))
    with pytest.raises(UserError, match=message) as addresses:
        make_client(stack, f"{protocol}://127.0.0.1:{port}/judge").rewards(IDS)
    assert "\n" not in str(addresses.value)


@pytest.mark.parametrize(
    ("status", "body", "message"),
    [
        (200, "<html>\nWelcome</html>", "got no JSON: '<html> Welcome</html>'"),
        (404, "<html>not here</html>", "got no JSON"),
        (302, "{}", "got status 302"),
        (200, "[1]", "got no config of a model"),
        (400, '{"error": "too long"}', "rejects the batch: too long"),
    ],
)
def test_an_answer_of_another_kind_is_one_line(status: int, body: str, message: str, stack: ExitStack):
    port = stack.enter_context(serve_http(Script(trouble=(status, body))))
    with pytest.raises(RunError, match=message):
        make_client(stack, f"http://127.0.0.1:{port}/judge").rewards(IDS)


@pytest.mark.parametrize(
    "values", [([3, 2], [0.0] * 6), ([3, 3], [0.0] * 8), ([3, 3], [0.0, float("-inf"), *[0.0] * 7])]
)
def test_log_probabilities_are_of_every_token(values: tuple[list[int], list[float]], protocol: str, stack: ExitStack):
    port = stack.enter_context(SERVE[protocol](Script(scores=lambda *_: values)))
    with pytest.raises(RunError, match=r"of 3 sequences of up to 3 tokens|sequence 1 of 3 is not finite"):
        make_client(stack, f"{protocol}://127.0.0.1:{port}/judge").logps(IDS, [2, 0, 1])


@pytest.mark.slow
def test_a_server_that_is_away_is_waited_for(protocol: str, stack: ExitStack):
    """From the first request on, and when it goes later; what it is meanwhile is named."""
    port, messages, server = free_port(), [], ExitStack()
    stack.push(server)

    def wait(text: str, since: float) -> None:
        messages.append(text)
        if len(messages) == 2:
            server.enter_context(SERVE[protocol](Script(), port))

    client = make_client(stack, f"{protocol}://127.0.0.1:{port}/judge", wait)
    assert client.rewards(IDS) == [6, 4, 11]
    assert len(messages) >= 2
    assert messages[0].startswith(f"{protocol}://127.0.0.1:{port}/judge: ")
    server.close()
    messages.clear()
    assert client.rewards(IDS) == [6, 4, 11]
    assert len(messages) >= 2


def test_run_can_stop_while_it_waits(protocol: str, stack: ExitStack):
    def stop(text: str, since: float) -> None:
        raise StopWaiting(text)

    with pytest.raises(StopWaiting, match="/judge: "):
        make_client(stack, f"{protocol}://127.0.0.1:{free_port()}/judge", stop).rewards(IDS)


def test_a_server_that_does_not_answer_is_waited_for_with_a_beat(
    monkeypatch: pytest.MonkeyPatch, protocol: str, stack: ExitStack
):
    """The run may stop, and so it need not wait until the request has run out of time."""
    monkeypatch.setattr(remote, "BEAT_SECONDS", 0.01)
    import threading

    go_on, messages = threading.Event(), []
    stack.callback(go_on.set)
    port = stack.enter_context(SERVE[protocol](Script(after=go_on.wait)))

    def wait(text: str, since: float) -> None:
        messages.append(text)
        if len(messages) == 3:
            raise StopWaiting(text)

    with pytest.raises(StopWaiting, match=r"/judge: no answer for \d+ s"):
        make_client(stack, f"{protocol}://127.0.0.1:{port}/judge", wait).rewards(IDS)
    go_on.set()


def test_each_batch_is_waited_for_by_itself(monkeypatch: pytest.MonkeyPatch, protocol: str, stack: ExitStack):
    """Many answers that each take a while are no long wait."""
    monkeypatch.setattr(remote, "BEAT_SECONDS", 0.01)
    import threading

    start_times, beats, script = list[float](), list[threading.Semaphore](), Script()
    port = stack.enter_context(SERVE[protocol](script))

    def answer_late() -> None:
        for _ in range(2):
            beats[-1].acquire()

    def wait(text: str, since: float) -> None:
        start_times.append(since)
        beats[-1].release()

    script.after = answer_late
    client = make_client(stack, f"{protocol}://127.0.0.1:{port}/judge", wait)
    for _ in range(2):
        beats.append(threading.Semaphore(0))
        assert client.rewards(IDS) == [6, 4, 11]
    assert len(set(start_times)) == 2
    assert start_times == sorted(start_times)


def test_a_request_runs_out_of_time(protocol: str, stack: ExitStack):
    """And is asked again."""
    import threading

    go_on, script = threading.Event(), Script()
    stack.callback(go_on.set)
    script.after = lambda: script.num_requests > 1 or go_on.wait()
    port = stack.enter_context(SERVE[protocol](script))
    messages: list[str] = []
    client = make_client(stack, f"{protocol}://127.0.0.1:{port}/judge", lambda text, since: messages.append(text), 0.2)
    assert client.rewards(IDS) == [6, 4, 11]
    assert script.num_requests == 2
    assert messages
    go_on.set()


@pytest.mark.parametrize(
    "trouble", [(500, '{"error": "Stub process \'judge_0_0\' is not healthy."}'), (502, "<html>Bad Gateway</html>")]
)
def test_run_waits_for_a_dead_model_of_a_live_server(trouble: tuple[int, str], protocol: str, stack: ExitStack):
    script, messages = Script(trouble=trouble), []
    port = stack.enter_context(SERVE[protocol](script))

    def wait(text: str, since: float) -> None:
        messages.append(text)
        script.trouble = None if len(messages) == 3 else trouble

    assert make_client(stack, f"{protocol}://127.0.0.1:{port}/judge", wait).rewards(IDS) == [6, 4, 11]
    assert "Stub process 'judge_0_0' is not healthy" in messages[0] or "Bad Gateway" in messages[0]


def test_a_model_that_is_being_loaded_is_waited_for(protocol: str, stack: ExitStack):
    script, messages = Script(loaded=False), []
    port = stack.enter_context(SERVE[protocol](script))

    def wait(text: str, since: float) -> None:
        messages.append(text)
        script.loaded = len(messages) == 2

    assert make_client(stack, f"{protocol}://127.0.0.1:{port}/judge", wait).rewards(IDS) == [6, 4, 11]
    assert "not loaded" in messages[0]


def test_a_model_that_is_exchanged_gives_no_score(protocol: str, stack: ExitStack):
    """Also in the moment between a request and its answer, with the connection open all the time."""
    script = Script()
    client = make_client(stack, f"{protocol}://127.0.0.1:{stack.enter_context(SERVE[protocol](script))}/judge")
    assert client.rewards(IDS) == [6, 4, 11]
    script.after = lambda: setattr(script, "fingerprint", "e" * 64)
    with pytest.raises(ConfigError, match="expected the model with fingerprint"):
        client.rewards(IDS)


def test_another_model_after_a_restart_is_refused(protocol: str, stack: ExitStack):
    port, server = free_port(), ExitStack()
    stack.push(server)
    server.enter_context(SERVE[protocol](Script(), port))

    messages = []

    def restart(text: str, since: float) -> None:
        messages.append(text)
        if len(messages) == 1:
            server.enter_context(SERVE[protocol](Script(fingerprint="e" * 64), port))

    client = make_client(stack, f"{protocol}://127.0.0.1:{port}/judge", restart)
    assert client.rewards(IDS) == [6, 4, 11]
    server.close()
    with pytest.raises(ConfigError, match="expected the model with fingerprint"):
        client.rewards(IDS)


@pytest.mark.slow
def test_instances_take_turns_and_a_failing_one_is_skipped(
    monkeypatch: pytest.MonkeyPatch, protocol: str, stack: ExitStack
):
    scripts = [Script(), Script()]
    ports = [stack.enter_context(SERVE[protocol](script)) for script in scripts]
    client = make_client(stack, ",".join(f"{protocol}://127.0.0.1:{port}/judge" for port in ports))
    for _ in range(4):
        assert client.rewards(IDS) == [6, 4, 11]
    assert [script.num_requests for script in scripts] == [2, 2]
    for name in ("FIRST_REST", "LONGEST_REST"):
        monkeypatch.setattr(remote, name, 3600.0)
    monkeypatch.setattr(remote, "SHORT_PAUSE", 0.0)
    attempts, down = [], client._instances[0]

    def fail(*_: Any) -> None:
        attempts.append(1)
        raise kserve.UnavailableError("gone")

    monkeypatch.setattr(down, "infer", fail)
    for _ in range(20):
        assert client.rewards(IDS) == [6, 4, 11]
    assert [script.num_requests for script in scripts] == [2, 22]
    assert len(attempts) == remote.FAILURES
    monkeypatch.undo()
    down.ready_at = 0.0
    for _ in range(2):
        assert client.rewards(IDS) == [6, 4, 11]
    assert [script.num_requests for script in scripts] == [3, 23]


@pytest.mark.skipif(not find_spec("grpc"), reason="grpcio is not installed; requirements/serving.txt")
@pytest.mark.parametrize(
    ("server_protocol", "pattern"), [("http", "does not speak gRPC"), ("grpc", "does not speak HTTP")]
)
def test_port_of_the_other_protocol_is_reported(server_protocol: str, pattern: str, stack: ExitStack):
    port = stack.enter_context(SERVE[server_protocol](Script()))
    other = {"http": "", "grpc": "http://"}[server_protocol]
    with pytest.raises(ConfigError, match=pattern):
        make_client(stack, f"{other}127.0.0.1:{port}/judge", lambda *_: None).rewards(IDS)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "host",
        "host:80",
        "host:80/",
        "https://host:80/m",
        "host:0/m",
        "host:65536/m",
        "host:80/../m",
        "host:80/m,",
        "a b:1/m",
    ],
)
def test_an_address_is_host_port_and_model(text: str):
    with pytest.raises(ConfigError, match=r"expected HOST:PORT/MODEL"):
        kserve.parse_addresses(text)


def test_addresses_are_read():
    addresses = kserve.parse_addresses("host:8001/a-b, http://[::1]:80/c.d/")
    assert [str(address) for address in addresses] == ["grpc://host:8001/a-b", "http://[::1]:80/c.d"]
    for twice in ("host:8001/m,grpc://host:8001/m", "http://host:80/m?token=secret,http://host:80/m"):
        with pytest.raises(ConfigError, match="duplicate") as error:
            kserve.parse_addresses(twice)
        assert "secret" not in str(error.value)


def test_address_can_have_a_token_which_is_never_shown():
    (address,) = kserve.parse_addresses("http://host:80/m?token=se-cr_et")
    assert address.token == "se-cr_et"
    assert "se-cr" not in f"{address} {address!r}"
    for text in (
        "host:80/m?token=secret",
        "grpc://host:80/m?token=secret",
        "http://host:80/m?token=",
        "http://host:80?token=secret",
        "http://host:80/m?token=a,secret",
        "http://me:secret@host:80/m",
        "http://secret@host:80/m",
        "me:sec/ret@host:80/m/secret@x",
    ):
        with pytest.raises(ConfigError) as error:
            kserve.parse_addresses(text)
        assert "secret" not in str(error.value)


def test_without_the_package_grpc_is_refused(monkeypatch: pytest.MonkeyPatch):
    import sys

    monkeypatch.setitem(sys.modules, "grpc", None)
    with pytest.raises(ConfigError, match=r"pip install -r requirements/serving\.txt\. Or use the HTTP port"):
        RemoteModel("host:8001/m", FINGERPRINT, never)
