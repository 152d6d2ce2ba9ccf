"""The HTTP server of the serving commands: many connections, malformed requests, access, and batches."""

import json
import socket
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import pytest
from pydantic import BaseModel, Field

from src.errors import DataError
from src.serving.http import BACKLOG, Batcher, Endpoint, Server
from tests.core.serving.running_servers import options, request, request_at_once, running

MAX_BYTES = 1 << 16


class Numbers(BaseModel):
    values: list[Annotated[int, Field(ge=0, lt=100)]]
    text: str = ""


async def total(body: Numbers) -> dict[str, int]:
    if body.text == "refuse":
        raise DataError("text: refused")
    if body.text == "crash":
        raise ZeroDivisionError("crashed")
    return {"total": sum(body.values)}


async def by_name(name: str) -> dict[str, str]:
    return {"name": name}


ENDPOINTS = [Endpoint("POST", "/total", total, Numbers), Endpoint("GET", "/named/{name}", by_name)]


@pytest.fixture
def root() -> Iterator[str]:
    with running(Server(ENDPOINTS, MAX_BYTES, options())) as root:
        yield root


@pytest.mark.slow
@pytest.mark.parametrize("count", [200, 500])
def test_simultaneous_connections_are_all_answered(count: int):
    def answer(batch: Sequence[int]) -> list[int]:
        sizes.append(len(batch))
        return [value + 1 for value in batch]

    async def add(body: Numbers) -> dict[str, int]:
        return {"sum": await batcher.submit(body.values[0])}

    sizes = list[int]()
    batcher = Batcher[int, int](answer, max_batch=32)
    server = Server([Endpoint("POST", "/", add, Numbers)], MAX_BYTES, options())
    values = [number % 100 for number in range(count)]
    with running(server):
        responses = request_at_once(server.port, "/", [json.dumps({"values": [value]}).encode() for value in values])
    assert responses == [(200, json.dumps({"sum": value + 1}, separators=(",", ":")).encode()) for value in values]
    assert sum(sizes) == count
    assert max(sizes) <= 32


def test_connections_are_accepted_before_the_first_answer():
    """The listen backlog holds a burst that arrives while the server is busy or not running yet."""
    server = Server(ENDPOINTS, MAX_BYTES, options())
    num_connections = min(BACKLOG, int(Path("/proc/sys/net/core/somaxconn").read_text()), 300)
    connections = [socket.create_connection(("127.0.0.1", server.port), timeout=60) for _ in range(num_connections)]
    with running(server):
        for connection in connections:
            connection.sendall(b"GET /named/x HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert {connection.recv(12) for connection in connections} == {b"HTTP/1.1 200"}
    for connection in connections:
        connection.close()


def test_waiting_requests_form_batches_and_a_failure_affects_one_request():
    has_started, release = threading.Event(), threading.Event()
    batches = list[list[int]]()

    def answer(batch: Sequence[int]) -> list[float]:
        batches.append(list(batch))
        if len(batches) == 1:
            has_started.set()
            assert release.wait(60)
        return [1 / value for value in batch]

    async def invert(body: Numbers) -> dict[str, float]:
        return {"value": await batcher.submit(body.values[0])}

    batcher = Batcher[int, float](answer, max_batch=4)
    server = Server([Endpoint("POST", "/", invert, Numbers)], MAX_BYTES, options())
    replies = dict[int, tuple[int, Any]]()

    def ask(value: int) -> None:
        replies[value] = request(f"{server.root}/", body=json.dumps({"values": [value]}).encode())

    with running(server):
        threads = [threading.Thread(target=ask, args=[value]) for value in (1, 0, 2, 4)]
        threads[0].start()
        assert has_started.wait(60)
        for thread in threads[1:]:
            thread.start()
        while batcher._waiting.qsize() < 3:
            pass
        release.set()
        for thread in threads:
            thread.join()
    assert [len(batch) for batch in batches] == [1, 3, 1, 1, 1]
    assert {value: status for value, (status, _) in replies.items()} == {0: 500, 1: 200, 2: 200, 4: 200}
    assert replies[0][1]["error"].startswith("ZeroDivisionError")
    assert replies[4][1] == {"value": 0.25}


MALFORMED_BODIES = {
    "empty": b"",
    "truncated": b'{"values": [1',
    "not JSON": b"values=1",
    "huge integer": b'{"values": [' + b"1" + b"0" * 30 + b"]}",
    "5000 digits": b'{"values": [' + b"1" * 5000 + b"]}",
    "exponent": b'{"values": [1e30]}',
    "infinity": b'{"values": [1e999]}',
    "NaN": b'{"values": [NaN]}',
    "Infinity": b'{"values": [-Infinity]}',
    "boolean": b'{"values": [true]}',
    "text for a number": b'{"values": ["1"]}',
    "fraction": b'{"values": [1.5]}',
    "null": b'{"values": null}',
    "object for a list": b'{"values": {}}',
    "missing field": b"{}",
    "list": b"[]",
    "number": b"1",
    "number for a text": b'{"values": [], "text": 1}',
    "deep list": b"[" * 30_000,
    "deep value": b'{"values": ' + b"[" * 20_000 + b"]" * 20_000 + b"}",
    "deep objects": b'{"a":' * 10_000 + b"1" + b"}" * 10_000,
    "Latin-1": '{"values": [], "text": "é"}'.encode("latin-1"),
    "UTF-16": '{"values": []}'.encode("utf-16"),
    "byte order mark": b'\xef\xbb\xbf{"values": []}',
    "NUL bytes": b"\0" * 100,
    "half of a surrogate pair": b'{"values": [], "text": "\\ud800"}',
}


@pytest.mark.parametrize("name", MALFORMED_BODIES)
def test_malformed_bodies_get_422(root: str, name: str):
    status, reply = request(f"{root}/total", body=MALFORMED_BODIES[name])
    assert status == 422
    assert list(reply) == ["error"]
    assert "\n" not in reply["error"]
    assert len(reply["error"]) < 400
    assert request(f"{root}/total", body=b'{"values": [1, 2]}') == (200, {"total": 3})


def test_error_names_the_place_and_the_value(root: str):
    _, reply = request(f"{root}/total", body=b'{"values": [1, 2, 1000]}')
    assert "values.2" in reply["error"]
    assert "1000" in reply["error"]


def test_refused_and_crashed_requests_are_json(root: str):
    assert request(f"{root}/total", body=b'{"values": [], "text": "refuse"}') == (422, {"error": "text: refused"})
    assert request(f"{root}/total", body=b'{"values": [], "text": "crash"}') == (
        500,
        {"error": "ZeroDivisionError: crashed"},
    )


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS", "TRACE", "PROPFIND"])
def test_every_method_and_path_gets_json_errors(root: str, method: str):
    assert request(f"{root}/total", method)[0] == 405
    for path in ("/", "/other", "/total/", "/named", "/docs", "/openapi.json", "/%00", "/..%2f"):
        status, reply = request(f"{root}{path}", method, b"x" * 100)
        assert status == 404
        assert reply is None or list(reply) == ["error"]


@pytest.mark.parametrize("size", [MAX_BYTES + 1, 20 << 20])
@pytest.mark.parametrize("path", ["/total", "/other"])
def test_large_bodies_get_413(root: str, size: int, path: str):
    status, reply = request(f"{root}{path}", body=b" " * size)
    assert status == 413
    assert str(MAX_BYTES) in reply["error"]


def test_large_chunked_bodies_get_413(root: str):
    host = root.removeprefix("http://")
    with socket.create_connection(("127.0.0.1", int(host.rpartition(":")[2]))) as connection:
        connection.sendall(
            f"POST /total HTTP/1.1\r\nHost: {host}\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n".encode()
        )
        for _ in range(100):
            connection.sendall(b"1000\r\n" + b" " * 0x1000 + b"\r\n")
        connection.sendall(b"0\r\n\r\n")
        assert b"".join(iter(lambda: connection.recv(4096), b"")).startswith(b"HTTP/1.1 413 ")


@pytest.mark.parametrize("path", ["/named/x", "/other"])
def test_token_is_required(path: str):
    with running(Server(ENDPOINTS, MAX_BYTES, options("--token", "secret"))) as root:
        right = 200 if path == "/named/x" else 404
        assert request(f"{root}{path}?token=secret", "GET")[0] == right
        assert request(f"{root}{path}", "GET", headers={"Authorization": "Bearer secret"})[0] == right
        assert request(f"{root}{path}", "GET")[0] == 403
        assert request(f"{root}{path}?token=Secret", "GET")[0] == 403
        assert request(f"{root}{path}?token=%C3%A9", "GET")[0] == 403
        assert request(f"{root}{path}", "GET", headers={"Authorization": "Basic secret"})[0] == 403
        assert request(f"{root}{path}", "POST", b" " * (5 << 20))[0] == 403


def test_token_is_new_by_default():
    words = options()
    words.token = None
    first, second = Server(ENDPOINTS, MAX_BYTES, words), Server(ENDPOINTS, MAX_BYTES, words)
    assert first.token != second.token
    assert len(first.token) >= 32
    assert first.address("/x") == f"{first.root}/x?token={first.token}"
    first.close()
    second.close()


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "localhost:1"}, 200),
        ({"Host": "[::1]"}, 200),
        ({"Host": "LOCALHOST"}, 200),
        ({"Host": "tunnel.example:80"}, 200),
        ({"Host": "tunnel.example:81"}, 403),
        ({"Host": "evil.example"}, 403),
        ({"Host": "localhost.evil.example"}, 403),
        ({"Host": ""}, 403),
        ({"Host": "[::1"}, 403),
        ({"Host": "localhost:80", "Origin": "http://localhost:80"}, 200),
        ({"Host": "localhost:80", "Origin": "http://tunnel.example:80"}, 200),
        ({"Host": "localhost:80", "Origin": "http://evil.example"}, 403),
        ({"Host": "localhost:80", "Origin": "null"}, 403),
        ({"Host": "localhost:80", "Origin": "http://[::1"}, 403),
        ({"Host": "localhost:80", "Origin": ""}, 403),
    ],
)
def test_host_and_origin_are_checked(headers: dict[str, str], status: int):
    with running(Server(ENDPOINTS, MAX_BYTES, options("--origin", "tunnel.example:80"))) as root:
        assert request(f"{root}/named/x", "GET", headers=headers)[0] == status


def test_client_that_leaves_does_not_stop_the_server(root: str):
    port = int(root.rpartition(":")[2])
    for data in (b"", b"POST /total HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{", b"\0garbage\r\n\r\n"):
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(data)
    assert request(f"{root}/named/x", "GET") == (200, {"name": "x"})
