"""The HTTP server of the serving commands: JSON in, JSON out, on FastAPI and uvicorn.

Errors are JSON too, {"error": "..."}: 403 (token, Host or Origin), 404, 405, 413 (body too large), 422 (malformed, or
rejected by the model) and 500. Requests wait in one queue. One thread answers them, in batches if the command supports
it.
"""

import argparse
import asyncio
import contextlib
import hmac
import ipaddress
import queue
import secrets
import socket
import sys
import threading
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Generic, NamedTuple, TypeVar
from urllib.parse import urlsplit

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from src.errors import ConfigError, UserError

BACKLOG = 2048
"""Maximum number of connections that wait to be accepted. The kernel lowers this to net.core.somaxconn."""
DRAINED_BYTES = 1 << 28
"""Maximum number of bytes of a rejected body to read and drop. With unread bytes, TCP resets the connection and the
client never sees the reason."""
IDLE_SECONDS, STOP_SECONDS = 60, 5

Item = TypeVar("Item")
Answer = TypeVar("Answer")


class Batcher(Generic[Item, Answer]):
    """Answers items in one thread; items that wait at the same time form a batch."""

    def __init__(self, answer: Callable[[Sequence[Item]], Sequence[Answer]], max_batch: int) -> None:
        self._answer, self._max_batch = answer, max_batch
        self._waiting: queue.SimpleQueue[tuple[Item, Future[Answer]]] = queue.SimpleQueue()
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="answers", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Finish the current batch, and drop waiting items."""
        self._is_closed.set()
        future: Future[Answer] = Future()
        future.cancel()
        self._waiting.put((None, future))  # type: ignore[arg-type]  wakes the thread
        self._thread.join()

    async def submit(self, item: Item) -> Answer:
        """Answer one item. Raises the exception that the item causes."""
        future: Future[Answer] = Future()
        self._waiting.put((item, future))
        return await asyncio.wrap_future(future)

    def _run(self) -> None:
        while not self._is_closed.is_set():
            batch = [self._waiting.get()]
            with contextlib.suppress(queue.Empty):
                while len(batch) < self._max_batch:
                    batch.append(self._waiting.get_nowait())
            batch = [entry for entry in batch if entry[1].set_running_or_notify_cancel()]
            if batch and not self._is_closed.is_set():
                self._answer_batch(batch)

    def _answer_batch(self, batch: list[tuple[Item, "Future[Answer]"]]) -> None:
        try:
            answers = self._answer([item for item, _ in batch])
        except Exception as error:  # noqa: BLE001  reported to the client that caused it; the remaining items are answered one by one
            if len(batch) == 1:
                batch[0][1].set_exception(error)
            else:
                for entry in batch:
                    self._answer_batch([entry])
            return
        for (_, future), answer in zip(batch, answers, strict=True):
            future.set_result(answer)


class Endpoint(NamedTuple):
    """One method and path."""

    method: str
    path: str
    answer: Callable[..., Awaitable[Any]]
    """Called with the parsed body if any, and the parameters of the path by name. Returns the JSON of the response."""
    body: type[BaseModel] | None = None
    """Type of the request's JSON; None: the body is ignored."""


class Access(NamedTuple):
    """Access control of requests."""

    token: str
    """Required as `?token=...` or as the header `Authorization: Bearer ...`. Empty: not required."""
    hosts: Collection[str]
    """HOST:PORT values accepted in addition to IP addresses, localhost and the name of this machine."""

    def problem(self, request: Request) -> str:
        """The reason to reject a request, or ""."""
        host, origin = request.headers.get("host", ""), request.headers.get("origin")
        if not self._accepts(
            host
        ):  # protects against DNS rebinding, a web page that resolves its own name to this machine
            return (
                f"Host: {host!r} is not an address of this server. Start it with --origin HOST:PORT to accept this one."
            )
        if origin is not None and origin.lower().partition("://")[2] not in (host.lower(), *self.hosts):
            return f"Origin: {origin!r} is another site. Start the server with --origin HOST:PORT to accept its pages."
        scheme, _, credentials = request.headers.get("authorization", "").partition(" ")
        tokens = [request.query_params.get("token", ""), credentials if scheme.lower() == "bearer" else ""]
        if self.token and not any(hmac.compare_digest(token.encode(), self.token.encode()) for token in tokens):
            return (
                "token: missing or wrong. Use the address that the command printed, with ?token=..., or "
                "Authorization: Bearer TOKEN."
            )
        return ""

    def _accepts(self, host: str) -> bool:
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:
            return False
        if host.lower() in self.hosts or name in {"localhost", socket.gethostname().lower(), socket.getfqdn().lower()}:
            return True
        with contextlib.suppress(ValueError):
            ipaddress.ip_address(name)
            return True
        return False


class _Guard:
    """ASGI middleware that checks access and limits the size of the body."""

    def __init__(self, app: Any, access: Access, max_bytes: int) -> None:
        self._app, self._access, self._max_bytes = app, access, max_bytes

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        request = Request(scope, receive)
        problem = self._access.problem(request)
        size, chunks = 0, list[bytes]()
        try:
            async for chunk in request.stream():
                size += len(chunk)
                if not problem and size <= self._max_bytes:
                    chunks.append(chunk)
                elif size > DRAINED_BYTES:
                    break
        except ClientDisconnect:
            return
        if problem:
            await _error(403, problem)(scope, receive, send)
        elif size > self._max_bytes:
            await _error(413, f"body: more than {self._max_bytes} bytes. Send less in one request.")(
                scope, receive, send
            )
        else:
            messages = iter([{"type": "http.request", "body": b"".join(chunks), "more_body": False}])

            async def replay() -> Any:
                return next(messages, None) or await receive()

            await self._app(scope, replay, send)


def _error(status: int, reason: str, headers: Mapping[str, str] | None = None) -> JSONResponse:
    return JSONResponse({"error": reason}, status, dict(headers or {}))


def make_app(endpoints: Sequence[Endpoint], access: Access, max_bytes: int) -> Any:
    """Build the ASGI application. max_bytes: maximum size of a request's body."""
    app = FastAPI(openapi_url=None, redirect_slashes=False)
    for endpoint in endpoints:
        app.add_api_route(endpoint.path, _handler(endpoint), methods=[endpoint.method])
    expected = ", ".join(f"{each.method} {each.path}" for each in endpoints)

    async def report(request: Request, error: Any) -> JSONResponse:
        if error.detail in ("Not Found", "Method Not Allowed"):  # from the router, not from an endpoint
            return _error(
                error.status_code,
                f"{request.method} {request.url.path}: {error.detail}. Use {expected}.",
                error.headers,
            )
        return _error(error.status_code, error.detail, error.headers)

    async def refuse(_: Request, error: Exception) -> JSONResponse:
        return _error(422, str(error))

    async def fail(_: Request, error: Exception) -> JSONResponse:
        return _error(500, f"{type(error).__name__}: {error}")

    app.add_exception_handler(HTTPException, report)
    app.add_exception_handler(UserError, refuse)
    app.add_exception_handler(Exception, fail)
    return _Guard(app, access, max_bytes)


def _handler(endpoint: Endpoint) -> Callable[[Request], Awaitable[JSONResponse]]:
    async def handle(request: Request) -> JSONResponse:
        arguments = (
            [] if endpoint.body is None else [await asyncio.to_thread(_parse, endpoint.body, await request.body())]
        )
        return JSONResponse(await endpoint.answer(*arguments, **request.path_params))

    return handle


def _parse(kind: type[BaseModel], body: bytes) -> BaseModel:
    """Parse the body; HTTPException 422 if it is not JSON of this type."""
    try:
        return kind.model_validate_json(body, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
    place = ".".join(map(str, first["loc"])) or "body"
    value = "" if first["type"] == "json_invalid" else f" Got {repr(first['input'])[:100]}."
    raise HTTPException(422, f"{place}: {first['msg']}.{value}")


class Server:
    """An application at an address. Accepts connections as soon as it is constructed."""

    def __init__(
        self, endpoints: Sequence[Endpoint], max_bytes: int, options: argparse.Namespace, batcher: Any = None
    ) -> None:
        """options: from `src.support.served_page.add_address`. batcher: closed at the end.

        Raises:
            ConfigError: the address or the port is in use.
        """
        self._batcher: Batcher[Any, Any] | None = batcher
        self.token = secrets.token_urlsafe(24) if options.token is None else options.token
        family = socket.AF_INET6 if ":" in options.address else socket.AF_INET
        try:
            if not 0 <= options.port < 1 << 16:
                raise OSError("ports are from 0 to 65535")
            self._socket = socket.create_server((options.address, options.port), family=family, backlog=BACKLOG)
        except OSError as error:
            reason = (error.strerror or str(error)).rstrip(".")
            raise ConfigError(
                f"--port {options.port}: cannot listen on {options.address}: {reason}. "
                "Choose another port, or 0 for a free one."
            ) from None
        host = f"[{options.address}]" if ":" in options.address else options.address
        self.port: int = self._socket.getsockname()[1]
        self.root = f"http://{host}:{self.port}"
        hosts = [origin.lower() for origin in options.origin or ()] + [f"{options.address.lower()}:{self.port}"]
        app = make_app(endpoints, Access(self.token, hosts), max_bytes)
        self._server = uvicorn.Server(
            uvicorn.Config(
                app,
                http="h11",
                backlog=BACKLOG,
                lifespan="off",
                ws="none",
                log_config=None,
                log_level="error",
                access_log=False,
                timeout_keep_alive=IDLE_SECONDS,
                timeout_graceful_shutdown=STOP_SECONDS,
            )
        )

    def address(self, path: str) -> str:
        """The URL of a path, with the token."""
        return f"{self.root}{path}{f'?token={self.token}' if self.token else ''}"

    def run(self, path: str = "/") -> None:
        """Print the address of `path` and answer requests until interrupted or `stop`."""
        sys.stdout.write(f"{self.address(path)}\n")
        sys.stdout.flush()
        try:
            with self._socket:
                self._server.run(sockets=[self._socket])
        finally:  # a thread that is still inside torch would abort the process at exit
            if self._batcher:
                self._batcher.close()

    def close(self) -> None:
        """Release the address without `run`."""
        self._socket.close()

    def stop(self) -> None:
        """Make `run` return after the current requests. Can be called from any thread."""
        self._server.should_exit = True
