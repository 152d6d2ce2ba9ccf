"""The HTTP API of Ray Jobs. Responses are validated: they can come from a proxy or a login page, or be incomplete."""

import http.client
import json
import os
import re
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any

from src.errors import LaunchError
from src.launch.job import NoAnswer, retry_until_answered
from src.support.parsing import parse_json
from src.support.redaction import hide_password

DEFAULT_ADDRESS = "http://127.0.0.1:8265"
ADDRESS = re.compile(r"https?://[^\s/@?#]+(/[^\s?#]*)?")
HEADERS = "RAY_JOB_HEADERS"
_TRANSIENT = {408, 425, 429}


class Refusal(LaunchError):
    """Ray, or a server in its place, refused the request."""

    def __init__(self, address: str, status: int, output: str) -> None:
        hint = (
            f" Put the required header into {HEADERS}, as for `ray job submit`."
            if status in (401, 403) or status < 400
            else ""
        )
        super().__init__(f"{address}: refused with status {status}: {brief(output)}.{hint}")
        self.missing = status == 404 and "does not exist" in output
        """Whether Ray reports that there is no such job."""


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Do not follow redirects: they lead to a login page, which must not get the headers."""

    def redirect_request(self, req: Any, fp: Any, code: Any, msg: Any, headers: Any, newurl: Any) -> None:
        return None


def find_address(setting: str) -> str:
    """The address in `setting` or in Ray's variables, without a final slash.
    GCS addresses such as host:6379 are skipped.

    Raises:
        LaunchError: a variable has an address of HTTP with a user, a password or more than a path.
    """
    for name in () if setting else ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS"):
        address = os.environ.get(name, "").strip()
        if ADDRESS.fullmatch(address):
            return address.rstrip("/")
        if re.match(r"https?:|.*@", address, re.IGNORECASE):
            raise LaunchError(
                f"{name}: expected http://HOST:PORT of Ray's dashboard, without a user or a password, "
                f"got {hide_password(address)!r}."
            )
    return (setting or DEFAULT_ADDRESS).rstrip("/")


def call_api(
    address: str, method: str, path: str, content: Mapping[str, Any] | None = None, patience_seconds: float = 60.0
) -> Any:
    """Send an idempotent request to Ray, with retries while there is no answer; return the parsed response.

    Raises:
        NoAnswer: no answer within `patience_seconds`.
        Refusal: the request is wrong, or not allowed.
        LaunchError: the response is not from Ray.
    """
    body = None if content is None else json.dumps(content).encode()
    request = urllib.request.Request(
        f"{address}{path}", body, {"Content-Type": "application/json", **_headers()}, method=method
    )
    return retry_until_answered(lambda seconds: _call_once(address, request, seconds), patience_seconds)


def _headers() -> dict[str, str]:
    """The headers in the environment. Their values are secrets, so they appear in no message."""
    try:
        headers = {
            name: str(value)
            for name, value in parse_json(os.environ.get(HEADERS) or "{}", HEADERS, LaunchError).items()
        }
    except (LaunchError, AttributeError):
        headers = {"": ""}
    if not all(re.fullmatch(r"[\w-]+\0[ -~]*", f"{name}\0{value}", re.ASCII) for name, value in headers.items()):
        raise LaunchError(f'{HEADERS}: expected JSON such as {{"Authorization": "Bearer …"}}, in printable ASCII.')
    return headers


def _call_once(address: str, request: urllib.request.Request, seconds: float) -> Any:
    try:
        try:
            answer = urllib.request.build_opener(_NoRedirect).open(request, timeout=seconds)
        except urllib.error.HTTPError as error:
            answer = error
        with answer:
            text, status = answer.read().decode("utf-8", "replace"), answer.status or 0
    except (OSError, http.client.HTTPException) as error:
        reason = brief(str(getattr(error, "reason", None) or error)) or type(error).__name__
        raise NoAnswer(f"{address}: Ray does not answer: {reason}. Does its dashboard run there?") from None
    # Ray's head forwards a request to its agent, and answers 500 if the agent refuses with 400.
    if status in _TRANSIENT or (status >= 500 and not re.search(r"failed with status code 4\d\d", text)):
        raise NoAnswer(f"{address}: Ray fails with status {status}: {brief(text)}. Check the log of its dashboard.")
    if status != 200:
        raise Refusal(
            address, status, f"a redirection to {answer.headers.get('Location')}" if 300 <= status < 400 else text
        )
    try:
        return parse_json(text, address, LaunchError)
    except LaunchError:
        raise LaunchError(
            f"{address}: expected JSON of Ray, got {brief(text)!r}. "
            "Is it the address of the dashboard, and are you logged in?"
        ) from None


def brief(output: object) -> str:
    """The last line with words, which is the error of a traceback, in at most 300 printable characters.
    "" if `output` is not a string."""
    lines = [line for line in output.splitlines() if re.search(r"\w", line)] if isinstance(output, str) else []
    words = " ".join("".join(letter if letter.isprintable() else " " for letter in lines[-1]).split()) if lines else ""
    return (words if len(words) <= 300 else f"{words[:300]}…").rstrip(".")
