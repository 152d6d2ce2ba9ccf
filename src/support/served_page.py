"""Serve Panel pages from a command. As in Jupyter, the printed address contains a token that browsers need."""

import argparse
import asyncio
import contextlib
import hmac
import io
import re
import secrets
from collections.abc import Callable, Mapping
from typing import Any

from src.errors import ConfigError, UserError
from src.support.documents import show

_TOKEN = "token"
_DAYS = 30
_ASKS = "This page needs the token in the address that its command printed: http://.../?token=...\n"


def add_address(parser: argparse.ArgumentParser, port: int, readers: str) -> None:
    """Add the options of a command that serves pages: --port and those of `add_access`."""
    parser.add_argument("--port", type=int, default=port, help=f"port; 0: any free port (default: {port})")
    add_access(parser, readers)


def add_access(parser: argparse.ArgumentParser, readers: str) -> None:
    """Add --address, --origin and --token. readers: help text about the rights of a person with the token."""
    parser.add_argument("--address", default="127.0.0.1", help=f"where to listen; {readers} (default: 127.0.0.1)")
    parser.add_argument(
        "--origin",
        action="append",
        metavar="HOST:PORT",
        help="another address of this server, such as that of a tunnel; repeatable",
    )
    parser.add_argument(
        "--token", help="token that requests need, as in ?token=...; empty: no token (default: a new one, printed)"
    )


def serve_page(
    make_page: Callable[[], Any],
    options: argparse.Namespace,
    title: str,
    documents: Mapping[str, Callable[[str], str]] | None = None,
) -> None:
    """Serve the Panel view that `make_page` creates for each browser, until interrupted.
    Prints the address once it can be opened.

    documents: additional HTML pages by path pattern, such as "run/(\\w+)"; each function gets the matched group.

    Raises:
        ConfigError: the address or the port is not free.
    """
    import panel as pn

    token = secrets.token_urlsafe(24) if options.token is None else options.token
    guard = {"auth_provider": _provider(token)} if token else {}
    try:
        server: Any = pn.serve(
            make_page,
            port=options.port,
            address=options.address,
            websocket_origin=options.origin or None,
            title=title,
            show=False,
            start=False,
            verbose=False,
            extra_patterns=[
                (f"/{path}", _document_handler(make), {"token": token}) for path, make in (documents or {}).items()
            ],
            **guard,
        )
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"--port {options.port}: cannot listen on {options.address}: {reason}. "
            "Choose another port, or 0 for a free one."
        ) from None
    host = f"[{options.address}]" if ":" in options.address else options.address
    url = f"http://{host}:{server.port}/{f'?{_TOKEN}={token}' if token else ''}"
    show("address/1", {"url": url}, lambda: print(url, flush=True))  # noqa: T201  the result of the command
    with contextlib.redirect_stdout(
        io.StringIO()
    ):  # a closed pipe would raise in Bokeh's SIGTERM handler, before it stops
        server.run_until_shutdown()


def _knows(handler: Any, token: str) -> bool:
    """Whether a request has the token in its address or a cookie. Sets the cookie for the former."""
    cookie = "trainval_" + re.sub(r"[^A-Za-z0-9]", "_", handler.request.host)  # "[::1]:5006" is not a valid cookie name
    argument, saved = handler.get_query_argument(_TOKEN, ""), handler.get_cookie(cookie, "")
    if hmac.compare_digest(argument.encode(), token.encode()):
        handler.set_cookie(cookie, token, expires_days=_DAYS, httponly=True, samesite="Strict")
        return True
    return hmac.compare_digest(saved.encode(), token.encode())


def _provider(token: str) -> Any:
    from bokeh.server.auth_provider import AuthProvider
    from tornado.web import RequestHandler

    class Refusal(RequestHandler):
        def get(self) -> None:
            self.set_status(403)
            self.set_header("Content-Type", "text/plain")
            self.finish(_ASKS)

    class Provider(AuthProvider):
        @property
        def get_user(self) -> Callable[[Any], Any]:
            return lambda handler: "reader" if _knows(handler, token) else None

        @property
        def get_user_async(self) -> None:
            return None

        @property
        def login_url(self) -> str:
            return "/refused"

        @property
        def get_login_url(self) -> None:
            return None

        @property
        def login_handler(self) -> type[RequestHandler]:
            return Refusal

        @property
        def logout_url(self) -> None:
            return None

        @property
        def logout_handler(self) -> None:
            return None

    return Provider()


def _document_handler(make: Callable[[str], str]) -> Any:
    from tornado.web import RequestHandler

    class Document(RequestHandler):
        def initialize(self, token: str) -> None:
            self.token = token

        async def get(self, name: str) -> None:
            if self.token and not _knows(self, self.token):
                self.set_status(403)
                self.finish(_ASKS)
                return
            try:
                self.finish(await asyncio.to_thread(make, name))
            except UserError as error:
                self.set_status(404)
                self.set_header("Content-Type", "text/plain")
                self.finish(f"{error}\n")

    return Document
