"""A private Ray on loopback, of the environment .ray: a head, and nodes that can be added and lost."""

import contextlib
import json
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from src.errors import LaunchError
from src.launch.ray.api import call_api
from tests.conftest import ROOT

PYTHON = ROOT / ".ray" / "bin" / "python"
# Ray takes 127.0.0.1 for "find out my address", and so would listen on all addresses of the machine, but where it
# supports no clusters.
_NO_CLUSTERS = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
_LOOPBACK = """
import ctypes
ctypes.CDLL(None).prctl(1, 15)  # PR_SET_PDEATHSIG: it ends, with all of Ray, should the tests be killed
from ray._private import ray_constants, services
ray_constants.ENABLE_RAY_CLUSTER = True
services.get_node_ip_address = lambda address=None: "127.0.0.1"
from ray.scripts.scripts import main
main()
"""
_SOON_LOST = {"health_check_initial_delay_ms": 1000, "health_check_period_ms": 500, "health_check_failure_threshold": 4}
"""When a node that says nothing is taken for lost: 2 s, not 25."""


def wait_until(condition: Callable[[], object], what: str, seconds: float = 300) -> None:
    """Poll until `condition` holds; fail with `what` after `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds:.0f} seconds for {what}"
        time.sleep(0.1)


def free_ports(count: int) -> list[str]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [str(one.getsockname()[1]) for one in sockets]


class Cluster:
    """A running Ray. Its processes are known by what started them, so that no other Ray on this machine is touched."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="ray-"))  # short, as sockets lie below
        self.gcs = self.address = ""
        self.nodes: dict[str, psutil.Popen] = {}
        self.ports: dict[str, str] = {}
        """Of each node's agent, by which a job says where it runs."""

    def start(self) -> None:
        """Start the head, unless it runs."""
        if "head" in self.nodes:
            return
        self.gcs, dashboard, client = free_ports(3)
        self.address = f"http://127.0.0.1:{dashboard}"
        words = [
            "--head",
            "--port",
            self.gcs,
            "--dashboard-host",
            "127.0.0.1",
            "--dashboard-port",
            dashboard,
            "--include-dashboard",
            "true",
        ]
        words += [
            "--ray-client-server-port",
            client,
            "--temp-dir",
            str(self.folder),
            "--system-config",
            json.dumps(_SOON_LOST),
        ]
        self._start("head", words, {"slot": 2})

        def answers() -> bool:
            assert self.nodes["head"].poll() is None, (self.folder / "head.log").read_text()
            try:
                return bool(call_api(self.address, "GET", "/api/version", patience_seconds=1.0))
            except LaunchError:
                return False

        wait_until(answers, "Ray's dashboard")

    def add(self, name: str, resources: dict[str, float]) -> None:
        """Start another node, and wait until it has run a job. Ray gives one up that needs more than 30 s, as on a busy
        machine."""
        probe = {"submission_id": f"probe.{name}", "entrypoint": "true", "entrypoint_resources": {name: 1}}
        call_api(self.address, "POST", "/api/jobs/", probe)

        def serves() -> bool:
            if name not in self.nodes or self.nodes[name].poll() is not None:
                self._start(name, ["--address", f"127.0.0.1:{self.gcs}"], {**resources, name: 1})
            return call_api(self.address, "GET", f"/api/jobs/probe.{name}")["status"] == "SUCCEEDED"

        wait_until(serves, f"the node {name}")

    def _start(self, name: str, words: list[str], resources: dict[str, float]) -> None:
        listen, grpc, export = free_ports(3)
        self.ports[name] = listen
        words += [
            "--dashboard-agent-listen-port",
            listen,
            "--dashboard-agent-grpc-port",
            grpc,
            "--metrics-export-port",
            export,
        ]
        words += [
            "--num-cpus",
            "2",
            "--num-gpus",
            "0",
            "--resources",
            json.dumps(resources),
            "--object-store-memory",
            str(80 << 20),
        ]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        environment |= _NO_CLUSTERS | {"RAY_USAGE_STATS_ENABLED": "0", "RAY_memory_monitor_refresh_ms": "0"}
        with open(self.folder / f"{name}.log", "wb") as log:
            command = [str(PYTHON), "-c", _LOOPBACK, "start", "--block", "--disable-usage-stats", *words]
            self.nodes[name] = psutil.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    def lose(self, name: str) -> None:
        """Let a node die with all that runs there, as by a power cut."""
        kill_family(self.nodes.pop(name))

    def jobs(self) -> list[dict[str, Any]]:
        return call_api(self.address, "GET", "/api/jobs/")

    def alive(self) -> list[str]:
        return [job["submission_id"] for job in self.jobs() if job["status"] in ("PENDING", "RUNNING")]

    def clear(self) -> None:
        """End all jobs and lose all nodes but the head, if that is there."""
        for name in set(self.nodes) - {"head"}:
            self.lose(name)
        if "head" in self.nodes:
            for name in self.alive():
                call_api(self.address, "POST", f"/api/jobs/{name}/stop", {})
            wait_until(lambda: not self.alive(), "the jobs of a test to end")

    def close(self) -> None:
        """Leave no process and no file behind."""
        for name in list(self.nodes):
            self.lose(name)
        shutil.rmtree(self.folder)


def kill_family(process: psutil.Process) -> None:
    """Kill a process and all that it has started, until none is left."""
    family = [process]
    while family:
        for member in list(family):
            with contextlib.suppress(psutil.NoSuchProcess):
                family += [child for child in member.children(recursive=True) if child not in family]
        for member in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()
        family = psutil.wait_procs(family, timeout=5)[1]
