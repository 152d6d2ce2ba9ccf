"""A real S3 server on loopback, and a proxy before it that cuts, stalls and counts."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import psutil

from tests.conftest import ROOT

SCRIPT = ["bash", str(ROOT / ".ci" / "s3")]


class S3Server:
    """OpenStack Swift, started by .ci/s3 with one bucket, "shards"."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        done = subprocess.run(
            [*SCRIPT, "start", str(folder), str(os.getpid())], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        lines = (folder / "environment").read_text().splitlines()
        self.environment = dict(line.split("=", 1) for line in lines)
        self.port = int(self.environment["AWS_ENDPOINT_URL"].rpartition(":")[2])
        self.s5cmd("mb", "s3://shards")

    def s5cmd(self, *words: str) -> str:
        """Run s5cmd; what it prints."""
        environment = os.environ | self.environment | {"S3_ENDPOINT_URL": self.environment["AWS_ENDPOINT_URL"]}
        return subprocess.run(
            [str(Path(sys.executable).parent / "s5cmd"), *words],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        ).stdout

    def put(self, key: str, content: bytes) -> str:
        """Put an object; its URL."""
        path = self.folder / "object"
        path.write_bytes(content)
        self.s5cmd("cp", str(path), f"s3://shards/{key}")
        return f"s3://shards/{key}"

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the process that clients speak to."""
        os.kill(int((self.folder / "run" / "proxy.pid").read_text()), number)

    def start_again(self) -> None:
        """Start that process again, after it was killed."""
        subprocess.run([*SCRIPT, "proxy", str(self.folder)], check=True)

    def stop(self) -> None:
        """Stop all of it."""
        subprocess.run([*SCRIPT, "stop", str(self.folder)], check=True)
        running = [
            process.pid
            for process in psutil.process_iter(["cmdline"])
            if f"{self.folder}/" in " ".join(process.info["cmdline"] or ())
        ]
        assert not running, "servers that were not stopped"


class Cutter:
    """A proxy before a server on loopback. What it has sent to clients is counted, and `at` says what happens at which
    byte of that."""

    def __init__(self, port: int) -> None:
        self.to, self.bytes_sent, self.events = port, 0, list[tuple[int, Callable[[], bool]]]()
        self.ranges = list[tuple[int, int]]()
        """First and last byte of each request, in order."""
        self.release_event = threading.Event()
        """Set: what was stalled is closed."""
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = self._listening.getsockname()[1]
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, daemon=True).start()

    def at(self, byte: int, event: Callable[[], bool]) -> None:
        """Call `event` when so many bytes were sent; True from it ends that connection."""
        self.events = sorted([*self.events, (byte, event)], key=lambda each: each[0])

    def cut(self, *bytes_sent: int) -> None:
        for byte in bytes_sent:
            self.at(byte, lambda: True)

    def stall(self, byte: int) -> None:
        """From there on send nothing on that connection, until the proxy is closed."""
        self.at(byte, self.release_event.wait)

    def close(self) -> None:
        self.release_event.set()
        self._listening.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listening.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(("127.0.0.1", self.to))
            except OSError:
                client.close()
                continue
            threading.Thread(target=self._ask, args=(client, server), daemon=True).start()
            threading.Thread(target=self._answer, args=(client, server), daemon=True).start()

    def _ask(self, client: socket.socket, server: socket.socket) -> None:
        while data := _receive(client):
            self.ranges += [
                (int(first), int(last)) for first, last in re.findall(rb"(?i)\r\nrange: bytes=(\d+)-(\d+)", data)
            ]
            try:
                server.sendall(data)
            except OSError:
                break
        _end(server)

    def _answer(self, client: socket.socket, server: socket.socket) -> None:
        while data := _receive(server):
            with self._lock:
                due = self.events.pop(0) if self.events and self.bytes_sent + len(data) >= self.events[0][0] else None
                data = data[: due[0] - self.bytes_sent] if due else data
                self.bytes_sent += len(data)
            try:
                client.sendall(data)
            except OSError:
                break
            if due and due[1]():
                break
        _end(client)
        _end(server)


def _receive(end: socket.socket) -> bytes:
    try:
        return end.recv(1 << 14)
    except OSError:
        return b""


def _end(end: socket.socket) -> None:
    with contextlib.suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)
    end.close()
