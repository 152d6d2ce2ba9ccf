"""Servers of the KServe protocol whose every answer a test chooses."""

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

FINGERPRINT = "f" * 64


@dataclass
class Script:
    """What a server says. A test may change it at any moment."""

    fingerprint: str | None = FINGERPRINT
    scores: Callable[[list[int], list[int], list[int]], tuple[list[int], list[float]]] = lambda shape, ids, mask: (
        [shape[0]],
        [float(sum(ids[i * shape[1] : (i + 1) * shape[1]])) for i in range(shape[0])],
    )
    """(shape, ids, mask) -> shape and values of the answer."""
    trouble: tuple[int, str] | None = None
    """Status and body of every answer, instead."""
    models: list[str] = field(default_factory=lambda: ["judge"])
    loaded: bool = True
    after: Callable[[], object] = lambda: None
    """Called after each inference."""
    num_requests: int = 0
    """Inferences so far."""


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, script: Script, port: int) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.script, self.open = script, set[Any]()

    def process_request(self, request: Any, client_address: Any) -> None:
        self.open.add(request)
        super().process_request(request, client_address)

    def server_close(self) -> None:
        super().server_close()
        for each in self.open:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)


class _Handler(BaseHTTPRequestHandler):
    server: _Server  # pyright: ignore[reportIncompatibleVariableOverride]
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.reply(None)

    def do_POST(self) -> None:
        self.reply(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def reply(self, content: Any) -> None:
        status, body = self.server.script.trouble or answer(self.server.script, self.path, content)
        self.send_response(status)
        self.send_header("Content-Length", str(len(body.encode())))
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  the base class's name
        pass


def answer(script: Script, path: str, content: Any) -> tuple[int, str]:
    if path == "/v2/repository/index":
        return 200, json.dumps([{"name": name} for name in script.models])
    name = path.split("/")[3]
    if name not in script.models or not script.loaded:
        return 400, json.dumps({"error": f"Request for unknown model: '{name}' is not found"})
    if path.endswith("/config"):
        parameters = {} if script.fingerprint is None else {"fingerprint": {"string_value": script.fingerprint}}
        return 200, json.dumps({"parameters": parameters})
    script.num_requests += 1
    ids, mask = content["inputs"]
    shape, values = script.scores(ids["shape"], ids["data"], mask["data"])
    script.after()
    return 200, json.dumps(
        {"outputs": [{"name": content["outputs"][0]["name"], "datatype": "FP32", "shape": shape, "data": values}]}
    )


@contextmanager
def serve_http(script: Script, port: int = 0) -> Iterator[int]:
    """The port of a server, which ends with the block."""
    with _Server(script, port) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def serve_grpc(script: Script, port: int = 0) -> Iterator[int]:
    """The same over gRPC."""
    from array import array
    from concurrent.futures import ThreadPoolExecutor

    import grpc

    from src.systems.assistants.rewards.kserve import _messages

    messages = _messages()

    def infer(request: Any, context: Any) -> Any:
        if script.trouble:
            context.abort(grpc.StatusCode.INTERNAL, script.trouble[1])
        if request.model_name not in script.models or not script.loaded:
            context.abort(
                grpc.StatusCode.UNAVAILABLE,
                f"Request for unknown model: '{request.model_name}' has no available versions",
            )
        script.num_requests += 1
        ids, mask = (list(array("i", raw)) for raw in request.raw_input_contents)
        shape, values = script.scores(list(request.inputs[0].shape), ids, mask)
        script.after()
        response = messages["ModelInferResponse"](model_name=request.model_name)
        response.outputs.add(name=request.outputs[0].name, datatype="FP32", shape=shape)
        response.raw_output_contents.append(array("f", values).tobytes())
        return response

    def config(request: Any, context: Any) -> Any:
        if request.name not in script.models or not script.loaded:
            context.abort(grpc.StatusCode.NOT_FOUND, f"Request for unknown model: '{request.name}' is not found")
        response = messages["ModelConfigResponse"]()
        if script.fingerprint is not None:
            response.config.parameters["fingerprint"].string_value = script.fingerprint
        return response

    def index(request: Any, context: Any) -> Any:
        return messages["RepositoryIndexResponse"](models=[messages["ModelIndex"](name=name) for name in script.models])

    handlers = {
        name: grpc.unary_unary_rpc_method_handler(
            call, messages[f"{name}Request"].FromString, lambda answer: answer.SerializeToString()
        )
        for name, call in {"ModelInfer": infer, "ModelConfig": config, "RepositoryIndex": index}.items()
    }
    server = grpc.server(ThreadPoolExecutor(4), options=[("grpc.so_reuseport", 0)])
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("inference.GRPCInferenceService", handlers),))
    bound_port = server.add_insecure_port(f"127.0.0.1:{port}")
    server.start()
    try:
        yield bound_port
    finally:
        server.stop(None).wait()
