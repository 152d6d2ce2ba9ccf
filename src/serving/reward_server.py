"""Scores of a trained model over HTTP, for machines without Triton: rewards of a reward model, log-probabilities of a decoder.

python -m src.serving.reward_server RUN --port 8010
TRITON_HOST_RM=http://localhost:8010/RUN python trainval.py -e …

RUN is the save directory of a finished run, or the beginning of its id. The protocol is KServe v2 with tensors as JSON, which
Triton speaks, too: GET /v2/health/ready, /v2/models/NAME and /v2/models/NAME/config, POST /v2/models/NAME/infer and /v2/repository/index.
Requests are answered one after another, each as the batch that it is.
"""

import argparse
import json
import logging
import sys
import threading
import traceback
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from src.command_line import make_parser, parse_arguments, run_command
from src.config import Places
from src.errors import ConfigError, DataError, UserError
from src.files import parse_json
from src.models.load import add_options
from src.rewards.kserve import FINGERPRINT, INPUTS
from src.serving.served_model import ServedModel, find_run, load_served

log = logging.getLogger(__name__)

LONGEST_REQUEST = 1 << 28


class Server(ThreadingHTTPServer):
    """Reads requests in threads, and answers them one at a time."""

    daemon_threads = True

    def __init__(self, model: ServedModel, name: str, host: str, port: int) -> None:
        super().__init__((host, port), _Handler)
        self._model, self._name, self._turn = model, name, threading.Lock()

    def answer(self, method: str, path: str, content: Any) -> tuple[int, Any]:
        """Status and JSON of the answer to one request.

        Raises:
            UserError: it cannot be answered.
        """
        if (method, path) == ("GET", "/v2/health/ready") or (method, path) == ("GET", "/v2/health/live"):
            return 200, {}
        if (method, path) == ("POST", "/v2/repository/index"):
            return 200, [{"name": self._name, "version": "1", "state": "READY"}]
        place = f"/v2/models/{self._name}"
        if (method, path) in (("GET", place), ("GET", f"{place}/ready")):
            inputs = [{"name": name, "datatype": "INT32", "shape": [-1, -1]} for name in INPUTS]
            return 200, {"name": self._name, "versions": ["1"], "platform": "trainval", "inputs": inputs, "outputs": [self._describe()]}
        if (method, path) == ("GET", f"{place}/config"):
            return 200, {"name": self._name, "parameters": {FINGERPRINT: {"string_value": self._model.fingerprint}}}
        if (method, path) == ("POST", f"{place}/infer"):
            return 200, {"model_name": self._name, "model_version": "1", "outputs": [self._infer(content)]}
        return 404, {"error": f"{method} {path}: not known. The model here is {self._name}."}

    def _describe(self) -> dict[str, Any]:
        shape = [-1] if self._model.output == "rewards" else [-1, -1]
        return {"name": self._model.output, "datatype": "FP32", "shape": shape}

    def _infer(self, content: Any) -> dict[str, Any]:
        import torch

        asked = content.get("outputs", []) if isinstance(content, dict) else None
        if not isinstance(asked, list) or any(each != {"name": self._model.output} for each in asked):
            raise ConfigError(f"outputs: this model tells {self._model.output!r} alone, got {json.dumps(asked)[:100]}.")
        tensors = [_read_tensor(content.get("inputs"), name) for name in INPUTS]
        with self._turn:
            found = self._model.score(*(torch.tensor(data).reshape(shape) for shape, data in tensors))
        return {**self._describe(), "shape": list(found.shape), "data": found.flatten().tolist()}


def _read_tensor(inputs: Any, name: str) -> tuple[list[int], list[int]]:
    """Shape and numbers of one input."""
    tensor = next((t for t in inputs if isinstance(t, dict) and t.get("name") == name), None) if isinstance(inputs, list) else None
    shape, data = (tensor.get("shape"), tensor.get("data")) if tensor else (None, None)
    sizes = shape if isinstance(shape, list) and len(shape) == 2 and all(type(n) is int and n > 0 for n in shape) else None
    if sizes is None or not isinstance(data, list) or len(data) != sizes[0] * sizes[1] or not all(type(n) is int for n in data):
        raise ConfigError(f"inputs: expected {name!r} with a shape [B, T] and so many whole numbers as flat data.")
    return sizes, data


class _Handler(BaseHTTPRequestHandler):
    """One connection, which stays open for more requests."""

    server: Server  # pyright: ignore[reportIncompatibleVariableOverride]
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1

    def do_GET(self) -> None:
        self._answer("GET", None)

    def do_POST(self) -> None:
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or int(length) > LONGEST_REQUEST:
            self.close_connection = True
            self._reply(400, {"error": f"Content-Length: expected a number of bytes up to {LONGEST_REQUEST}, got {length!r}."})
            return
        try:
            content = parse_json(self.rfile.read(int(length)) or b"{}", "request", DataError)
        except DataError as error:
            self._reply(400, {"error": str(error)})
            return
        self._answer("POST", content)

    def _answer(self, method: str, content: Any) -> None:
        try:
            self._reply(*self.server.answer(method, self.path, content))
        except UserError as error:
            self._reply(400, {"error": str(error)})
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True
        except Exception as error:  # noqa: BLE001  the server goes on
            log.error("%s %s: %s", method, self.path, traceback.format_exc())
            self._reply(500, {"error": f"{type(error).__name__}: {error}"})

    def _reply(self, status: int, content: Any) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  the base class's name
        """Nothing: a line for each request would be too many."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = make_parser("src.serving.reward_server", __doc__)
    add = parser.add_argument
    add("run", type=Path, help="a save directory, or the beginning of its id")
    add("--port", type=int, default=8010, help="0 takes a free one (default: %(default)s)")
    add("--address", default="127.0.0.1", help="where to listen; who can reach it can ask for scores (default: %(default)s)")
    add_options(parser)
    args = parse_arguments(parser, argv)
    return run_command(lambda: _act(args))


def _act(args: argparse.Namespace) -> int:
    run, places = find_run(args.run, Places(args.data_path, args.savedir_base))
    model = load_served(run, places, args.device)
    try:
        server = Server(model, run.name, args.address, args.port)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"--port {args.port}: cannot listen on {args.address}: {reason}. Choose another port, or 0 for a free one."
        ) from None
    with server:
        log.info("%s at http://%s:%d/%s until Ctrl-C", model.output, args.address, server.server_port, run.name)
        server.serve_forever()
    return 0


if __name__ == "__main__":
    sys.exit(main())
