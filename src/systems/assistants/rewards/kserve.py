"""A client for the KServe v2 inference protocol, over HTTP with JSON and over gRPC, limited to scores of token ids.

Triton supports both; src.systems.assistants.serving.reward_server supports HTTP. Shapes: B sequences, T tokens of the
longest.
"""

import json
import math
import re
import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from typing import Any, NoReturn, Protocol, TypeGuard

from src.errors import ConfigError, RunError
from src.support.parsing import parse_json
from src.support.redaction import hide_password

GRPC_PACKAGE = "requirements/serving.txt"
INPUTS = ("input_ids", "attention_mask")
FINGERPRINT = "fingerprint"
"""The parameter of a model's config that identifies its weights."""
CONNECT_SECONDS = 5.0
_TRANSIENT = {408, 425, 429}
_ADDRESS = re.compile(
    r"(?:(grpc|http)://)?(\[[0-9a-fA-F:.]+\]|[^\s/:,@\[\]]+):(\d{1,5})/([A-Za-z0-9][\w.-]*)/?(?:\?token=([^\s,&]+))?"
)


class UnavailableError(Exception):
    """The server does not answer at the moment."""


class NotLoadedError(Exception):
    """The server is still loading the model, or has no model of this name."""


@dataclass(frozen=True)
class Address:
    """Address of one instance of a model."""

    protocol: str
    """ "grpc" or "http"."""
    host: str
    port: int
    model: str
    token: str = field(default="", repr=False)
    """Sent as `Authorization: Bearer`, over HTTP only."""

    def __str__(self) -> str:
        return f"{self.protocol}://{self.host}:{self.port}/{self.model}"


@dataclass(frozen=True)
class Tensor:
    """Numbers from a server, in row-major order."""

    shape: tuple[int, ...]
    values: Sequence[float]


class Connection(Protocol):
    """A connection to one server.
    Calls raise UnavailableError or NotLoadedError for temporary problems and a UserError for permanent ones."""

    def infer(
        self, rows: Sequence[Sequence[int]], masks: Sequence[Sequence[int]], output: str, seconds: float
    ) -> Tensor:
        """The named output for (B, T) ids and their attention masks. seconds: timeout."""
        ...

    def fingerprint(self) -> str | None:
        """Fingerprint of the loaded model; None if its config has no fingerprint."""
        ...

    def models(self) -> list[str]:
        """Names of all models on the server, loaded or not."""
        ...

    def close(self) -> None:
        """Close the connection."""
        ...


def parse_addresses(text: str) -> list[Address]:
    """Parse addresses `[grpc://|http://]HOST:PORT/MODEL,…`. The default protocol is gRPC.

    Raises:
        ConfigError: an address is malformed or duplicate.
    """
    addresses = []
    for part in text.split(","):
        match = _ADDRESS.fullmatch(part.strip())
        if match is None or not 0 < int(match[3]) < 65536 or (match[5] and match[1] != "http"):
            expected = (
                "HOST:PORT/MODEL (gRPC), "
                "http://HOST:PORT/MODEL or http://HOST:PORT/MODEL?token=TOKEN, separated by commas"
            )
            visible_part = hide_password(part.partition("?")[0].strip())
            if "/" not in visible_part and "?" in text:
                visible_part = "***"  # the rest of a token with a comma
            raise ConfigError(f"{visible_part!r}: expected {expected}.")
        addresses.append(Address(match[1] or "grpc", match[2], int(match[3]), match[4], match[5] or ""))
    if len({str(address) for address in addresses}) < len(addresses):
        raise ConfigError(f"{', '.join(map(str, addresses))}: duplicate address. List each instance once.")
    return addresses


def connect(address: Address) -> Connection:
    """A connection, opened at its first use.

    Raises:
        ConfigError: the protocol's package is not installed.
    """
    return HttpConnection(address) if address.protocol == "http" else GrpcConnection(address)


class HttpConnection:
    """A persistent HTTP/1.1 connection, with tensors as JSON."""

    def __init__(self, address: Address) -> None:
        import urllib3

        self._address, self._errors = address, urllib3.exceptions
        timeout = urllib3.Timeout(connect=CONNECT_SECONDS, read=CONNECT_SECONDS)
        self._pool = urllib3.HTTPConnectionPool(
            address.host.strip("[]"), address.port, timeout=timeout, retries=False, maxsize=4
        )
        self._headers = {"Content-Type": "application/json"} | (
            {"Authorization": f"Bearer {address.token}"} if address.token else {}
        )

    def infer(
        self, rows: Sequence[Sequence[int]], masks: Sequence[Sequence[int]], output: str, seconds: float
    ) -> Tensor:
        shape = [len(rows), len(rows[0])]
        inputs = [
            {"name": name, "shape": shape, "datatype": "INT32", "data": [value for row in values for value in row]}
            for name, values in zip(INPUTS, (rows, masks), strict=True)
        ]
        content = self._ask(
            "POST",
            f"/v2/models/{self._address.model}/infer",
            {"inputs": inputs, "outputs": [{"name": output}]},
            seconds,
        )
        tensors = content.get("outputs") if isinstance(content, dict) else None
        tensor = (
            next((t for t in tensors if isinstance(t, dict) and t.get("name") == output), None)
            if isinstance(tensors, list)
            else None
        )
        if tensor is None:
            refuse_nonsense(self._address, f"no output {output!r}", content)
        sizes, values = tensor.get("shape"), tensor.get("data")
        if not _are_numbers(sizes) or not _are_numbers(values) or not all(map(math.isfinite, sizes)):
            refuse_nonsense(self._address, f"no numbers in {output!r}", tensor)
        return Tensor(tuple(int(size) for size in sizes), values)

    def fingerprint(self) -> str | None:
        content = self._ask("GET", f"/v2/models/{self._address.model}/config")
        parameters = content.get("parameters", {}) if isinstance(content, dict) else None
        if not isinstance(parameters, dict):
            refuse_nonsense(self._address, "no config of a model", content)
        message = parameters.get(FINGERPRINT)
        return message.get("string_value") if isinstance(message, dict) else None

    def models(self) -> list[str]:
        content = self._ask("POST", "/v2/repository/index", {})
        if not isinstance(content, list) or not all(isinstance(each, dict) for each in content):
            refuse_nonsense(self._address, "no list of models", content)
        return sorted({str(each.get("name")) for each in content})

    def close(self) -> None:
        self._pool.close()

    def _ask(self, method: str, path: str, content: Any = None, seconds: float = CONNECT_SECONDS) -> Any:
        import urllib3

        body = None if content is None else json.dumps(content).encode()
        try:
            answer = self._pool.request(
                method,
                path,
                body=body,
                headers=self._headers,
                timeout=urllib3.Timeout(connect=min(CONNECT_SECONDS, seconds), read=seconds),
                redirect=False,
            )
            data = answer.data
        except self._errors.ProtocolError as error:
            if "BadStatusLine" in repr(error):
                raise ConfigError(
                    f"{self._address}: does not speak HTTP. If it is a gRPC port, remove http://."
                ) from None
            raise UnavailableError(_reason(error)) from None
        except self._errors.HTTPError as error:
            raise UnavailableError(_reason(error)) from None
        if answer.status >= 500 or answer.status in _TRANSIENT:
            raise UnavailableError(f"status {answer.status}: {_beginning(_error_text(data))}")
        try:
            content = parse_json(data, str(self._address), RunError)
        except RunError:
            refuse_nonsense(self._address, "no JSON", data.decode("utf-8", "replace"))
        if answer.status == 200:
            return content
        message = content.get("error") if isinstance(content, dict) else None
        if not isinstance(message, str):
            refuse_nonsense(self._address, f"status {answer.status}", content)
        if (
            answer.status == 404
            or "unknown model" in message
            or "not ready" in message
            or "no available versions" in message
        ):
            raise NotLoadedError(message)
        if answer.status in (401, 403):
            raise ConfigError(
                f"{self._address}: access denied: {_beginning(message).rstrip('.')}. Check ?token=TOKEN in the address."
            )
        raise _batch_error(self._address, message)


class GrpcConnection:
    """A gRPC connection, with tensors as raw bytes."""

    def __init__(self, address: Address) -> None:
        try:
            self._grpc: Any = import_module("grpc")
        except ModuleNotFoundError:
            raise ConfigError(
                f"{address}: gRPC is not installed. Run: pip install -r {GRPC_PACKAGE}. Or use the HTTP port, with "
                "http://."
            ) from None
        self._address = address
        options = [
            ("grpc.max_receive_message_length", -1),
            ("grpc.max_send_message_length", -1),
            ("grpc.enable_http_proxy", 0),
            ("grpc.use_local_subchannel_pool", 1),  # do not share another channel's reconnect delay
            ("grpc.max_reconnect_backoff_ms", 1000),
        ]
        self._channel: Any = self._grpc.insecure_channel(f"{address.host}:{address.port}", options)

    def infer(
        self, rows: Sequence[Sequence[int]], masks: Sequence[Sequence[int]], output: str, seconds: float
    ) -> Tensor:
        request = _messages()["ModelInferRequest"](model_name=self._address.model)
        for name, values in zip(INPUTS, (rows, masks), strict=True):
            request.inputs.add(name=name, datatype="INT32", shape=[len(values), len(values[0])])
            request.raw_input_contents.append(
                _little_endian(array("i", (value for row in values for value in row))).tobytes()
            )
        request.outputs.add(name=output)
        answer = self._call("ModelInfer", request, "ModelInferResponse", seconds)
        place = next((i for i, tensor in enumerate(answer.outputs) if tensor.name == output), None)
        if place is None or place >= len(answer.raw_output_contents) or answer.outputs[place].datatype != "FP32":
            refuse_nonsense(self._address, f"no output {output!r} of type FP32", str(answer))
        raw = answer.raw_output_contents[place]
        if len(raw) % 4:
            refuse_nonsense(self._address, f"{len(raw)} bytes in {output!r}", raw[:20].hex())
        values = array("f")
        values.frombytes(raw)
        return Tensor(tuple(answer.outputs[place].shape), _little_endian(values))

    def fingerprint(self) -> str | None:
        request = _messages()["ModelConfigRequest"](name=self._address.model)
        parameters = self._call("ModelConfig", request, "ModelConfigResponse").config.parameters
        return parameters[FINGERPRINT].string_value if FINGERPRINT in parameters else None

    def models(self) -> list[str]:
        answer = self._call("RepositoryIndex", _messages()["RepositoryIndexRequest"](), "RepositoryIndexResponse")
        return sorted({each.name for each in answer.models})

    def close(self) -> None:
        self._channel.close()

    def _call(self, method: str, request: Any, answer: str, seconds: float = CONNECT_SECONDS) -> Any:
        codes = self._grpc.StatusCode
        ask = self._channel.unary_unary(
            f"/inference.GRPCInferenceService/{method}",
            request_serializer=type(request).SerializeToString,
            response_deserializer=_messages()[answer].FromString,
        )
        try:
            return ask(request, timeout=seconds)
        except self._grpc.RpcError as error:
            code, message = error.code(), _beginning(error.details() or "")
            if code == codes.UNIMPLEMENTED:
                refuse_nonsense(self._address, f"no method {method}", message)
            if "http1" in message or "parsing HTTP/2" in message:
                raise ConfigError(
                    f"{self._address}: does not speak gRPC. If it is an HTTP port, add http:// before it."
                ) from None
            unknown = "unknown model" in message or "no available versions" in message
            if code == codes.NOT_FOUND or (code == codes.UNAVAILABLE and unknown):
                raise NotLoadedError(message) from None
            if code in (codes.INVALID_ARGUMENT, codes.OUT_OF_RANGE):
                raise _batch_error(self._address, message) from None
            raise UnavailableError(f"{code.name}: {message}") from None


def refuse_nonsense(address: Address, problem: str, content: Any) -> NoReturn:
    """Raise a RunError for an answer that violates the protocol."""
    text = content if isinstance(content, str) else json.dumps(content, default=str)
    raise RunError(f"{address}: expected scores (KServe v2), got {problem}: {_beginning(text)!r}. Check the address.")


def _batch_error(address: Address, message: str) -> RunError:
    """The error for a batch that the server rejects with `message`."""
    text = _beginning(message).rstrip(".")
    return RunError(
        f"{address}: rejects the batch: {text}. Check the server's log, and that it serves the right model."
    )


def _are_numbers(values: Any) -> TypeGuard[list[float]]:
    """Whether `values` is a list of numbers. Integers must fit into 64 bits."""
    kinds = isinstance(values, list) and all(
        isinstance(value, int | float) and not isinstance(value, bool) for value in values
    )
    return kinds and all(isinstance(value, float) or abs(value) < 2**63 for value in values)


def _error_text(data: bytes) -> str:
    text = data.decode("utf-8", "replace")
    try:
        content = parse_json(text, "", RunError)
    except RunError:
        return text
    return str(content.get("error", text)) if isinstance(content, dict) else text


def _beginning(text: str) -> str:
    return " ".join(text.split())[:200]


def _reason(error: Exception) -> str:
    """The reason of a urllib3 error, without the repr of the connection before it."""
    return _beginning(str(error).rpartition(": ")[2] or type(error).__name__)


def _little_endian(values: "array[Any]") -> "array[Any]":
    if sys.byteorder == "big":
        values.byteswap()
    return values


@cache
def _messages() -> dict[str, Any]:
    """Message classes with the fields that we use, numbered as in KServe's and Triton's grpc_service.proto."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    tensor = "name:1:s datatype:2:s shape:3:*i"
    layout = {
        "InputTensor": tensor,
        "OutputTensor": tensor,
        "RequestedOutput": "name:1:s",
        "ModelInferRequest": "model_name:1:s inputs:5:*InputTensor outputs:6:*RequestedOutput raw_input_contents:7:*b",
        "ModelInferResponse": "model_name:1:s outputs:5:*OutputTensor raw_output_contents:6:*b",
        "ModelParameter": "string_value:1:s",
        "ModelConfig": "name:1:s parameters:14:%ModelParameter",
        "ModelConfigRequest": "name:1:s",
        "ModelConfigResponse": "config:1:ModelConfig",
        "RepositoryIndexRequest": "repository_name:1:s",
        "ModelIndex": "name:1:s",
        "RepositoryIndexResponse": "models:1:*ModelIndex",
    }
    package = "trainval.kserve"
    file: Any = descriptor_pb2.FileDescriptorProto(name=f"{package}.proto", package=package, syntax="proto3")
    for name, fields in layout.items():
        message = file.message_type.add(name=name)
        for entry in fields.split():
            _add_field(message, package, *entry.split(":"))
    pool: Any = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{package}.{name}")) for name in layout}


def _add_field(message: Any, package: str, name: str, number: str, kind: str) -> None:
    """Add a field. kind: s (string), b (bytes), i (int64) or a message; prefix *: repeated, %: a map by string."""
    scalar = {"s": 9, "b": 12, "i": 3}
    is_repeated, inner = kind[0] in "*%", kind.lstrip("*%")
    if kind[0] == "%":
        entry = message.nested_type.add(name=f"{name.title()}Entry")
        entry.options.map_entry = True
        _add_field(entry, package, "key", "1", "s")
        _add_field(entry, package, "value", "2", inner)
        inner = f"{message.name}.{entry.name}"
    field = message.field.add(name=name, number=int(number), label=3 if is_repeated else 1, type=scalar.get(inner, 11))
    if inner not in scalar:
        field.type_name = f".{package}.{inner}"
