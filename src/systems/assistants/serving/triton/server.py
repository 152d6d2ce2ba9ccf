"""Starts and stops a Triton server on a model repository, loads new weights, and shows health and throughput.

make triton                                              once: the server, in .triton
python -m src.systems.assistants.serving.triton.server start FOLDER         until every model has answered a request;
prints the addresses python -m src.systems.assistants.serving.triton.server status FOLDER        health by a real
request, throughput; code 1: one is ill python -m src.systems.assistants.serving.triton.server reload FOLDER
loads every model again, as after a crash or for new weights python -m src.systems.assistants.serving.triton.server stop
FOLDER

FOLDER is made by src.systems.assistants.serving.triton.repository. FOLDER/server.json has the address of its server,
FOLDER/server.log its output.
"""

import argparse
import contextlib
import hashlib
import logging
import os
import signal
import socket
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from src.errors import ConfigError, RunError, UserError
from src.files import ROOT, read_json, write_json, writing
from src.runs.lease import directory_lock
from src.support.command_line import aligned_lines, make_parser, parse_arguments, run_command
from src.support.parsing import parse_json
from src.systems.assistants.rewards.kserve import Address, Away, HttpConnection, NotLoaded
from src.systems.assistants.serving.triton.repository import list_models

log = logging.getLogger(__name__)

STATE, LOG = "server.json", "server.log"
ENVIRONMENT = ROOT / ".triton"
START_SECONDS, STOP_SECONDS, ANSWER_SECONDS = 600.0, 30.0, 60.0
_started: list["subprocess.Popen[bytes]"] = []
"""Servers that this process has started and that have not ended yet: Python complains of one that is forgotten."""
_PORTS = ("http_port", "grpc_port", "metrics_port")


def start(folder: Path, address: str = "127.0.0.1", ports: Sequence[int] = (0, 0, 0)) -> dict[str, Any]:
    """Start a server that outlives this process, and wait until every model answers; returns its entry in server.json.

    ports: for HTTP, gRPC and metrics; 0 takes a free one.

    Raises:
        ConfigError: a port is taken, or the server is not installed.
        RunError: the folder is no repository of ours, has a server already, or the server ends; its log says why.
    """
    models = list_models(folder)
    if not models:
        raise RunError(
            f"{folder}: has no models yet. "
            f"Write one with python -m src.systems.assistants.serving.triton.repository RUN {folder} --mode rm"
        )
    program = _find_program()
    for name, facts in models.items():
        if not (ENVIRONMENT / "backends" / facts["backend"]).is_dir():
            raise ConfigError(
                f"{folder / name}: is for the backend {facts['backend']!r}, which is missing from the server "
                f"in {ENVIRONMENT}. Run NVIDIA's own Triton on this folder, or write the model with --backend python."
            )
    with directory_lock(folder):
        if (state := read_state(folder)) is not None:
            raise RunError(
                f"{folder}: its server runs already, as process {state['pid']} at {_describe(state)}. "
                "Stop it first, or reload it."
            )
        chosen = _choose_ports(address, ports)
        _free_shared_memory(folder)
        options = [f"--{name}-address={address}" for name in ("http", "grpc", "metrics")]
        options += [f"--{name.replace('_', '-')}={port}" for name, port in zip(_PORTS, chosen, strict=True)]
        options += [f"--load-model={name}" for name in models]
        options.append(f"--backend-config=python,shm-region-prefix-name={_name_shared_memory(folder)}")
        backends = f"--backend-directory={ENVIRONMENT / 'backends'}"
        command = [
            str(program),
            f"--model-repository={folder.resolve()}",
            backends,
            "--model-control-mode=explicit",
            "--exit-timeout-secs=10",
        ]
        with writing(folder), open(folder / LOG, "wb") as written:
            process = subprocess.Popen(
                [*command, "--disable-auto-complete-config", *options],
                stdin=subprocess.DEVNULL,
                stdout=written,
                stderr=subprocess.STDOUT,
                env=_make_environment(),
                start_new_session=True,
            )
        _started.append(process)
        state = {
            "pid": process.pid,
            "began": _read_beginning(process.pid),
            "address": address,
            **dict(zip(_PORTS, chosen, strict=True)),
        }
        try:
            write_json(folder / STATE, state)
            _poll(
                lambda: process.poll() is not None or not probe_all(folder, state),
                START_SECONDS,
                f"{folder}: its server is not ready",
            )
            if process.poll() is not None:
                raise RunError(
                    f"{folder}: its server ended with exit code {process.returncode}: "
                    f"{_read_reason(folder)} See {folder / LOG}."
                )
        except BaseException:
            _end(state, folder)
            (folder / STATE).unlink(missing_ok=True)
            raise
    return state


def _find_program() -> Path:
    """The server's program.

    Raises:
        ConfigError: it is not installed.
    """
    binaries = sorted(ENVIRONMENT.glob("venv/lib/python3*/site-packages/pytriton/tritonserver/bin/tritonserver"))
    if not (ENVIRONMENT / "installed").is_file() or not binaries:
        raise ConfigError(f"{ENVIRONMENT}: the Triton server is not installed. Run: make triton")
    return binaries[0]


def _make_environment() -> dict[str, str]:
    """The Python backend takes the first python3 on PATH, and the libpython that the linker finds."""
    libraries = [sysconfig.get_config_var("LIBDIR"), str(_find_program().parents[3] / "nvidia_pytriton.libs")]
    before = os.environ.get("LD_LIBRARY_PATH")
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith("PYTHON")},
        "PATH": f"{ENVIRONMENT / 'venv' / 'bin'}:{os.environ.get('PATH', '')}",
        "LD_LIBRARY_PATH": ":".join([*libraries, *([before] if before else [])]),
        "HF_HUB_OFFLINE": "1",
    }


def _choose_ports(address: str, ports: Sequence[int]) -> list[int]:
    """Three ports that are free now."""
    sockets: list[socket.socket] = []
    try:
        for name, port in zip(_PORTS, ports, strict=True):
            sockets.append(socket.socket())
            sockets[-1].setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                sockets[-1].bind((address, port))
            except (OSError, OverflowError) as error:
                reason = getattr(error, "strerror", None) or error
                raise ConfigError(
                    f"--{name} {port}: cannot listen on {address}: {reason}. Choose another port, or 0 for a free one."
                ) from None
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


def read_state(folder: Path) -> dict[str, Any] | None:
    """What server.json says of the server of a repository; None where none runs.

    Raises:
        RunError: the file is damaged.
    """
    if not (folder / STATE).is_file():
        return None
    state = read_json(folder / STATE, RunError)
    if not isinstance(state, dict) or not {"pid", "began", "address", *_PORTS} <= state.keys():
        raise RunError(f"{folder / STATE}: expected a process and its ports. Delete it, after the server has ended.")
    return state if _is_alive(state) else None


def require_state(folder: Path) -> dict[str, Any]:
    """What server.json says of a server that runs.

    Raises:
        RunError: none runs, or the folder is no repository of ours.
    """
    list_models(folder)
    state = read_state(folder)
    if state is None:
        raise RunError(
            f"{folder}: no server runs on it. Start one with python -m src.systems.assistants.serving.triton.server "
            f"start {folder}"
        )
    return state


def _read_beginning(pid: int) -> str | None:
    """The start time of a process in the kernel's ticks, to recognize a reused number. None if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]


def _is_alive(state: dict[str, Any]) -> bool:
    _started[:] = [each for each in _started if each.poll() is None]
    return state["began"] is not None and _read_beginning(state["pid"]) == state["began"]


def stop(folder: Path) -> None:
    """End the server of a repository, and wait until it has ended.

    Raises:
        RunError: none runs.
    """
    state = require_state(folder)
    _end(state, folder)
    (folder / STATE).unlink(missing_ok=True)


def _end(state: dict[str, Any], folder: Path) -> None:
    """SIGTERM first, then SIGKILL to its process group, as children of a backend can remain.
    Frees their shared memory."""
    with contextlib.suppress(ProcessLookupError, RunError):
        os.kill(state["pid"], signal.SIGTERM)
        _poll(lambda: not _is_alive(state), STOP_SECONDS, "its server does not end")
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(state["pid"], signal.SIGKILL)
    _free_shared_memory(folder)


def _name_shared_memory(folder: Path) -> str:
    """The prefix of the names of shared memory of a repository's server."""
    return f"trainval_triton_{hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:16]}_"


def _free_shared_memory(folder: Path) -> None:
    """Delete shared memory of killed processes."""
    for path in Path("/dev/shm").glob(f"{_name_shared_memory(folder)}*"):
        path.unlink(missing_ok=True)


def reload(folder: Path) -> None:
    """Unload every model and load it: new weights, models that were added, or a process of the backend that has died.

    Raises:
        RunError: no server runs, or a model cannot be loaded.
    """
    state = require_state(folder)
    for name in list_models(folder):
        _post(state, f"/v2/repository/models/{name}/unload")
        _poll(
            lambda each=name: not _is_ready(state, each), STOP_SECONDS, f"{folder}: {name} is not unloaded"
        )  # a dead one stays UNLOADING
        status, answer = _post(state, f"/v2/repository/models/{name}/load")
        if status != 200:
            raise RunError(
                f"{folder}: {name} cannot be loaded: {' '.join(str(answer).split())[:300]} See {folder / LOG}."
            )
    _poll(lambda: not probe_all(folder, state), START_SECONDS, f"{folder}: its server is not ready")


def probe_all(folder: Path, state: dict[str, Any]) -> dict[str, str]:
    """The error of each model that does not answer a request.
    Readiness is not enough: a server reports it for a dead process too."""
    errors = {}
    for name, facts in list_models(folder).items():
        connection = HttpConnection(Address("http", state["address"], state["http_port"], name))
        try:
            connection.infer([[0, 0]], [[1, 1]], facts["output"], ANSWER_SECONDS)
            if connection.fingerprint() != facts["fingerprint"]:
                errors[name] = "serves older weights than the repository has. Reload it."
        except (Away, NotLoaded, UserError) as error:
            errors[name] = str(error)
        finally:
            connection.close()
    return errors


def show(folder: Path) -> int:
    """Print a line for each model; the exit code, 0 where all answer."""
    state = require_state(folder)
    ill, models = probe_all(folder, state), list_models(folder)
    _, answer = _post(state, "/v2/models/stats", method="GET")
    statistics = {each["name"]: each for each in answer.get("model_stats", [])} if isinstance(answer, dict) else {}
    rows = [["model", "mode", "fingerprint", "requests", "sequences", "sequences/s", "ms/request", "failed", "state"]]
    for name, facts in models.items():
        counts = statistics.get(name, {})
        times = {part: counts.get("inference_stats", {}).get(part, {}) for part in ("success", "fail", "compute_infer")}
        requests, seconds = times["success"].get("count", 0), times["compute_infer"].get("ns", 0) / 1e9
        sequences = counts.get("inference_count", 0)
        rate = [f"{sequences / seconds:.1f}", f"{seconds / requests * 1e3:.2f}"] if requests and seconds else ["", ""]
        numbers = [str(requests), str(sequences), *rate, str(times["fail"].get("count", 0))]
        rows.append([name, facts["mode"], facts["fingerprint"][:12], *numbers, ill.get(name, "answers")])
    sys.stdout.write(
        f"{_describe(state)}, process {state['pid']}\n" + "".join(f"{line}\n" for line in aligned_lines(rows))
    )
    return 1 if ill else 0


def _describe(state: dict[str, Any]) -> str:
    return f"http://{state['address']}:{state['http_port']}, gRPC {state['address']}:{state['grpc_port']}"


def _is_ready(state: dict[str, Any], name: str) -> bool:
    _, listed = _post(state, "/v2/repository/index")
    return any(each.get("name") == name and each.get("state") == "READY" for each in listed)


def _post(state: dict[str, Any], path: str, method: str = "POST") -> tuple[int, Any]:
    """Status and content of one request to the server itself."""
    import urllib3

    try:
        url = f"http://{state['address']}:{state['http_port']}{path}"
        answer = urllib3.request(
            method, url, json={} if method == "POST" else None, retries=False, timeout=START_SECONDS
        )
        return answer.status, parse_json(answer.data or b"{}", url, RunError)
    except urllib3.exceptions.HTTPError as error:
        raise RunError(f"{_describe(state)}: does not answer ({error}).") from None


def _poll(is_done: Callable[[], bool], seconds: float, what: str) -> None:
    """Wait until `is_done`.

    Raises:
        RunError: `what`, for too long.
    """
    until = time.monotonic() + seconds
    while not is_done():
        if time.monotonic() > until:
            raise RunError(f"{what} after {seconds:.0f} s. Look at its log.")
        time.sleep(0.1)


def _read_reason(folder: Path) -> str:
    """The line of the log that says why the server ended."""
    lines = (folder / LOG).read_text(encoding="utf-8", errors="replace").splitlines()
    line = next(
        (entry for words in ("failed to load", "rror") for entry in lines if words in entry), "it said nothing."
    )
    return " ".join(line.partition('] "')[2].rstrip('"').split() or line.split())[:400]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = make_parser("src.systems.assistants.serving.triton.server", __doc__)
    parser.add_argument("action", choices=("start", "status", "reload", "stop"))
    parser.add_argument("folder", type=Path, help="the model repository")
    parser.add_argument(
        "--address",
        default="127.0.0.1",
        help="address to listen on; anyone with access to it can unload models (default: %(default)s)",
    )
    for name in _PORTS:
        parser.add_argument(f"--{name}", type=int, default=0, help="default: a free one")
    args = parse_arguments(parser, argv)
    return run_command(lambda: _act(args))


def _act(args: argparse.Namespace) -> int:
    if args.action == "status":
        return show(args.folder)
    if args.action == "start":
        state = start(args.folder, args.address, [getattr(args, name) for name in _PORTS])
        for name in list_models(args.folder):
            sys.stdout.write(f"{state['address']}:{state['grpc_port']}/{name}\n")
            sys.stdout.write(f"http://{state['address']}:{state['http_port']}/{name}\n")
        return 0
    {"reload": reload, "stop": stop}[args.action](args.folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
