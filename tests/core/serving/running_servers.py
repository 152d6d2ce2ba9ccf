"""Servers in this process, and many connections to one."""

import argparse
import json
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import urllib3

from src.support.served_page import add_address


def options(*words: str) -> argparse.Namespace:
    """The options of a server on a free port, without a token unless one is in `words`."""
    parser = argparse.ArgumentParser()
    add_address(parser, 0, "")
    return parser.parse_args(["--token", "", *words])


@contextmanager
def running(server: Any) -> Iterator[str]:
    """Run a server of src.serving.http in a thread; yields its root URL."""
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        yield server.root
    finally:
        server.stop()
        thread.join()


def request(
    url: str, method: str = "POST", body: bytes | None = None, headers: dict[str, str] | None = None
) -> tuple[int, Any]:
    """Status and JSON of a response."""
    response = urllib3.request(method, url, body=body, headers=headers, retries=False)
    assert response.headers["content-type"] == "application/json"
    return response.status, json.loads(response.data) if method != "HEAD" else None


def request_at_once(port: int, path: str, bodies: Sequence[bytes]) -> list[tuple[int, bytes]]:
    """Open a connection per body, send all requests when all are open, and return status and body of each response."""
    with ExitStack() as stack:
        connections = [stack.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in bodies]
        for connection, body in zip(connections, bodies, strict=True):
            head = (
                f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
            )
            connection.sendall(head.encode() + body)
        return [_read_response(connection) for connection in connections]


def _read_response(connection: socket.socket) -> tuple[int, bytes]:
    data = b"".join(iter(lambda: connection.recv(1 << 16), b""))
    head, _, body = data.partition(b"\r\n\r\n")
    return int(head.split()[1]), body
