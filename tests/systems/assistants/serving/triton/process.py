"""A Triton server of a test, as a process that can be killed."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import urllib3

from src.errors import UserError
from src.systems.assistants.rewards.kserve import Address, HttpConnection, NotLoadedError, UnavailableError
from src.systems.assistants.serving.triton import repository, server
from tests.conftest import ROOT

SECONDS = 300


class Server:
    """The command, on free ports. start: until every model answers."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.ports = folder, dict(zip(server.PORTS, free_ports(len(server.PORTS)), strict=True))
        self.start()

    def start(self) -> None:
        words = [word for name, port in self.ports.items() for word in (f"--{name}_port", str(port))]
        command = [sys.executable, "-m", "src.systems.assistants.serving.triton.server", str(self.folder), *words]
        with open(self.folder.parent / "server.log", "ab") as log:
            self.process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, start_new_session=True)
        end = time.monotonic() + SECONDS
        while not all(self.answers(name) for name in repository.list_models(self.folder)):
            assert self.process.poll() is None, (self.folder.parent / "server.log").read_text()[-4000:]
            assert time.monotonic() < end, "it is not ready"
            time.sleep(0.1)

    def address(self, protocol: str) -> str:
        """Without a model."""
        return f"{protocol}://127.0.0.1:{self.ports[protocol]}"

    def answers(self, name: str) -> bool:
        """Whether a model answers a request, with the weights of the repository."""
        facts = repository.list_models(self.folder)[name]
        with contextlib.closing(HttpConnection(Address("http", "127.0.0.1", self.ports["http"], name))) as connection:
            try:
                connection.infer([[0, 0]], [[1, 1]], facts["output"], 60.0)
                return connection.fingerprint() == facts["fingerprint"]
            except (UnavailableError, NotLoadedError, UserError):
                return False

    def reload(self, name: str) -> None:
        """As docs/policies.md says."""
        for action in ("unload", "load"):
            until_unloaded = time.monotonic() + SECONDS
            self._post(f"models/{name}/{action}")
            while action == "unload" and any(
                one["name"] == name and one.get("state") == "READY" for one in self._post("index")
            ):
                assert time.monotonic() < until_unloaded
                time.sleep(0.1)

    def _post(self, path: str) -> Any:
        url = f"{self.address('http')}/v2/repository/{path}"
        answer = urllib3.request("POST", url, json={}, retries=False, timeout=SECONDS)
        assert answer.status == 200, answer.data
        return json.loads(answer.data or b"{}")

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(SECONDS)

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(SECONDS)


def free_ports(number: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(number)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
