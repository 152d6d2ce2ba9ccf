"""Stands in for Ray's head: speaks the part of the Jobs API that the launcher uses, runs jobs as processes here, and
fails on demand.

tests/ray holds the real one to the same tests. As there, a job that still waits for resources goes on waiting when it
is stopped.
"""

import contextlib
import json
import re
import signal
import subprocess
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import psutil

Answer = tuple[int, dict[str, str], bytes]
"""Status, headers, content."""


class FakeRay:
    """The cluster. `faults` are answers to give to the next requests in place of the true ones; None: the request is
    served."""

    def __init__(self) -> None:
        self.jobs: dict[str, dict[str, Any]] = {}
        self.is_held = True
        self.requests: list[tuple[str, str, dict[str, str]]] = []
        self.faults: list[Answer | Callable[[Answer], Answer] | None] = []
        """A function gets the true answer: the request was carried out."""
        self._processes: dict[str, subprocess.Popen] = {}
        self._stopping: set[str] = set()
        self._lock = threading.Lock()
        self._watchers: dict[str, threading.Thread] = {}
        self._finishers: list[threading.Thread] = []
        cluster = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                cluster._serve(self)

            do_POST = do_GET  # noqa: N815  its name in http.server

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002  its name in http.server
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.address = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()

    def release(self) -> None:
        """There are resources from now on."""
        with self._lock:
            self.is_held = False
            for name, job in self.jobs.items():
                if job["status"] == "PENDING":
                    self._run(name)

    def start(self, name: str) -> None:
        """There are resources for this job alone."""
        with self._lock:
            self._run(name)

    def wait_for(self, name: str) -> None:
        """Until the job has ended."""
        self._watchers[name].join()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        for process in self._processes.values():
            _signal(_family(process), signal.SIGKILL)
        for thread in (*self._watchers.values(), *self._finishers):
            thread.join()

    def _serve(self, handler: BaseHTTPRequestHandler) -> None:
        content = json.loads(handler.rfile.read(int(handler.headers.get("Content-Length") or 0)) or b"null")
        self.requests.append((handler.command, handler.path, dict(handler.headers)))
        fault = self.faults.pop(0) if self.faults else None
        if isinstance(fault, tuple):
            answer = fault
        else:
            with self._lock:
                answer = self._answer(handler.command, handler.path, content)
            answer = fault(answer) if fault else answer
        status, headers, data = answer
        with contextlib.suppress(OSError):
            handler.send_response(status)
            for name, value in {
                "Content-Type": "application/json",
                "Content-Length": str(len(data)),
                **headers,
            }.items():
                handler.send_header(name, value)
            handler.end_headers()
            handler.wfile.write(data)

    def _answer(self, method: str, path: str, content: Any) -> Answer:
        if (method, path) == ("GET", "/api/jobs/"):
            return _json([*self.jobs.values(), {"type": "DRIVER", "submission_id": None, "status": "RUNNING"}])
        if (method, path) == ("POST", "/api/jobs/"):
            return self._submit(content)
        match = re.fullmatch(r"/api/jobs/([^/]+)(/stop)?", path)
        if match is None:
            return 404, {}, b"404: Not Found"
        if match[1] not in self.jobs:
            return 404, {"Content-Type": "text/plain"}, f"Job {match[1]} does not exist".encode()
        if match[2]:
            self._stopping.add(match[1])
            self._stop(match[1])
            return _json({"stopped": True})
        return _json(self.jobs[match[1]])

    def _submit(self, content: dict[str, Any]) -> Answer:
        name = content["submission_id"]
        if name in self.jobs:
            message = (
                f"ValueError: Job with submission_id {name} already exists. Please use a different submission_id.\n.\n"
            )
            return (
                500,
                {"Content-Type": "text/plain"},
                f"RuntimeError: Request failed with status code 400: Traceback\n{message}".encode(),
            )
        wait = " It may be waiting for resources (CPUs, GPUs, memory, custom resources) to become available."
        self.jobs[name] = {
            **content,
            "type": "SUBMISSION",
            "status": "PENDING",
            "message": f"Job has not started yet.{wait}",
        }
        if not self.is_held:
            self._run(name)
        return _json({"job_id": name, "submission_id": name})

    def _run(self, name: str) -> None:
        job = self.jobs[name]
        job |= {
            "status": "RUNNING",
            "message": "Job is currently running.",
            "driver_agent_http_address": "http://10.0.0.7:52365",
        }
        self._processes[name] = subprocess.Popen(
            ["sh", "-c", job["entrypoint"]],
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._watchers[name] = threading.Thread(target=self._watch, args=(name,))
        self._watchers[name].start()
        if name in self._stopping:
            self._stop(name)

    def _watch(self, name: str) -> None:
        process = self._processes[name]
        output = process.communicate()[0]
        with self._lock:
            code = process.returncode
            if name in self._stopping:
                self.jobs[name] |= {"status": "STOPPED", "message": "Job was intentionally stopped."}
            elif code == 0:
                self.jobs[name] |= {
                    "status": "SUCCEEDED",
                    "message": "Job finished successfully.",
                    "driver_exit_code": 0,
                }
            else:
                message = (
                    f"Job entrypoint command failed with exit code {code}, last available logs (truncated to "
                    f"20,000 chars):\n{output}"
                )
                kind = "JOB_ENTRYPOINT_COMMAND_ERROR"
                self.jobs[name] |= {
                    "status": "FAILED",
                    "message": message,
                    "error_type": kind,
                    "driver_exit_code": code,
                }

    def _stop(self, name: str) -> None:
        """Tell all processes of a running job, and kill those that are left after the grace."""
        if name not in self._processes:
            return
        family = _family(self._processes[name])
        _signal(family, signal.SIGTERM)

        def finish() -> None:
            self._watchers[name].join(int(self.jobs[name]["runtime_env"]["env_vars"]["RAY_JOB_STOP_WAIT_TIME_S"]))
            _signal(family, signal.SIGKILL)

        self._finishers.append(threading.Thread(target=finish))
        self._finishers[-1].start()


def _family(process: subprocess.Popen[str]) -> list[psutil.Process]:
    with contextlib.suppress(psutil.NoSuchProcess):
        first = psutil.Process(process.pid)
        return [first, *first.children(recursive=True)]
    return []


def _signal(family: list[psutil.Process], number: signal.Signals) -> None:
    for member in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.send_signal(number)


def _json(content: Any) -> Answer:
    return 200, {}, json.dumps(content).encode()
