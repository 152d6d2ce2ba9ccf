"""The connection between the two sandboxes of src/systems/assistants/rewards/isolated.py.
Runs inside them, so it imports only the standard library.

Each peer can send requests about the other's objects, even while it answers a request. For example, a program calls a
function that a test passed to it.
"""

from __future__ import annotations  # do not load types, to start faster

import contextlib
import io
import json
import os
import sys

from src.systems.assistants.rewards.isolated_remote import (
    STATES,
    VERBS,
    Remote,
    is_container,
    load_module,
    make_class,
    make_instance,
    update,
)
from src.systems.assistants.rewards.isolated_values import (
    plain_base,
    read_standard,
    read_value,
    write_standard,
    write_value,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

MAX_BYTES = 1 << 24
"""Maximum size of one message."""
_SHARED, _SHARED_BYTES = 32, 1 << 14
"""Maximum number of shared containers, and maximum size of each as JSON."""
_MAX_PRINTED_CHARACTERS = 1 << 20
"""Maximum length of the printed text in one message."""


def write_message(message: Any) -> bytes:
    """Encode a message as its length and its JSON."""
    body = json.dumps(message).encode()
    return len(body).to_bytes(4, "big") + body


def read_exactly(descriptor: int, count: int) -> bytes:
    """Read `count` bytes. Raises EOFError if the writer has closed the pipe."""
    data = b""
    while len(data) < count:
        piece = os.read(descriptor, min(count - len(data), 1 << 16))
        if not piece:
            raise EOFError
        data += piece
    return data


class ProgramEnd(BaseException):
    """The program has exited or violates the protocol. Tests cannot catch it with `except Exception`."""


class Peer:
    """One end of the connection."""

    def __init__(self, inbound: int, outbound: int, is_judge: bool) -> None:
        self._inbound, self._outbound, self._is_judge = inbound, outbound, is_judge
        self._caught_errors = (
            Exception if is_judge else BaseException
        )  # an exit of the program is an error of its answer
        self._objects: list[Any] = []
        self._numbers: dict[int, int] = {}
        self._proxies: dict[int, Any] = {}
        self._shared: dict[int, tuple[Any, Any]] = {}
        """Containers that both peers can change, by number: each with its JSON at the last exchange."""
        self.stdout = io.StringIO()
        self.trusted_ids: set[int] = set()
        """`id` of objects that a test constructed, and of their classes."""

    def request(self, verb: str, *arguments: Any) -> Any:
        """Send a request and return the answer. Raises the exception that the other peer answers with."""
        request = [verb, *map(self.write, arguments)]
        try:
            if self._is_judge and (changes := self._changes()):
                self._send(["renew", changes])
                self._receive()
            self._send(request)
            while isinstance(message := self._receive(), list):
                self._send(self.reply(message, self.serve))
            if self._is_judge:
                self._renew(message["changes"])
                sys.stdout.write(message["printed"])
            if "error" not in message:
                value = self.read(message["value"])
                return self._share(message["shared"], value) if "shared" in message else value
            error = self.read(message["error"])
            if not isinstance(error, Exception):
                error = RuntimeError(str(error))
        except Exception as problem:
            if not self._is_judge:
                raise
            raise ProgramEnd from problem  # a program can write anything into the pipe
        raise error

    def reply(self, request: Any, serve: Callable[..., Any]) -> Any:
        """The answer to a request from the other peer."""
        try:
            verb, *arguments = request
            if verb == "renew" and not self._is_judge:
                return {"value": self._renew(*arguments)}
            value = serve(verb, *map(self.read, arguments))
            message = {"value": self.write(value)}
            if verb in ("attribute", "find", "item") and is_container(value) and len(self._shared) < _SHARED:
                number = self._number(value)
                if len(json.dumps(message)) <= _SHARED_BYTES:
                    self._share(number, value)
                    message["shared"] = number
        except self._caught_errors as error:
            message = {"error": self._write_error(error)}
        if not self._is_judge:
            message |= {"changes": self._changes(), "printed": self.take_stdout()[-_MAX_PRINTED_CHARACTERS:]}
        return message

    def take_stdout(self) -> str:
        """The text that the program printed since the last call."""
        text = self.stdout.getvalue()
        self.stdout.seek(0)
        self.stdout.truncate()
        return text

    def _share(self, number: int, value: Any) -> Any:
        """The shared container with this number; `value` if the number is new."""
        value, _ = self._shared.setdefault(number, (value, self.write(value)))
        return value

    def _changes(self) -> list[Any]:
        """[number, JSON] of each shared container that this peer changed."""
        changes = []
        for number, (value, old) in self._shared.items():
            with contextlib.suppress(TypeError):  # it now contains an object that cannot be sent
                if (wire := self.write(value)) != old:
                    changes.append([number, wire])
        self._shared |= {number: (self._shared[number][0], wire) for number, wire in changes}
        return changes

    def _renew(self, changes: Any) -> None:
        """Apply changes that the other peer made."""
        for number, wire in changes:
            value, _ = self._shared[number]
            update(value, self.read(wire))
            self._shared[number] = (value, self.write(value))

    def _number(self, value: Any) -> int:
        if id(value) not in self._numbers:
            self._numbers[id(value)] = len(self._objects)
            self._objects.append(value)
        return self._numbers[id(value)]

    def _write_error(self, error: BaseException) -> Any:
        try:
            return self.write(error)
        except Exception:  # noqa: BLE001  its arguments are objects of a program, which can raise anything
            return type(error).__name__

    def serve_forever(self, serve: Callable[..., Any]) -> None:
        """Answer requests until the other peer closes the connection."""
        self.serve = serve
        while True:
            try:
                message = self._receive()
            except EOFError:
                return
            self._send(self.reply(message, serve))

    def serve(self, verb: str, target: Any, *arguments: Any) -> Any:
        """Answer a program's request: it can call the tests' functions and use public attributes of their instances."""
        if verb == "attribute" and arguments[0] in ("__name__", "__qualname__", "__doc__", "__module__"):
            return str(getattr(target, arguments[0]))
        operands = arguments[1:] if verb == "operate" else ()
        is_open = any(
            type(each).__module__ == "tests" or type(each).__name__ == "KeyWrapper" for each in (target, *operands)
        )
        if verb in ("attribute", "assign", "delete") and (
            not is_open or type(arguments[0]) is not str or _is_private(arguments[0])
        ):
            raise AttributeError(str(arguments[0]))
        if verb not in ("call", "iterate", "next") and not is_open:
            raise TypeError(f"{type(target).__name__}: a program can only call it")
        return VERBS[verb](target, *arguments)

    def write(self, value: Any) -> Any:
        """`value` as JSON, with references to objects."""
        return write_value(value, self._refer)

    def read(self, wire: Any) -> Any:
        """The value of JSON that the other peer wrote."""
        return read_value(wire, self._find)

    def _refer(self, value: Any) -> Any:
        state = STATES.get(id(value))
        if state is not None:
            return {"yours": state[1]}
        if (standard := write_standard(value, self._refer)) is not None:
            return standard
        if self._is_judge:
            if (place := _global_place(value)) is not None:
                return {"global": place}
            if not callable(value) and type(value).__module__ != "tests" and not hasattr(value, "__next__"):
                raise TypeError(
                    f"cannot pass {type(value).__name__} to a program: only plain data, functions and tests' objects"
                )
        return {"mine": self._number(value)}

    def _find(self, kind: str, inner: Any) -> Any:
        place: Any = inner
        if kind == "yours" and type(inner) is int and inner >= 0:
            return self._objects[inner]
        if kind == "global" and not self._is_judge:
            module, names = place
            value = load_module(module)
            for name in names.split("."):
                value = getattr(value, name)
            return value
        if kind == "mine" and type(inner) is int:
            if inner not in self._proxies:
                self._proxies[inner] = self._make_proxy(inner)
            return self._proxies[inner]
        return read_standard(kind, inner, self._find)

    def _make_proxy(self, number: int) -> Any:
        if not self._is_judge:  # a program gets a test's objects without their classes
            proxy: Any = object.__new__(Remote)
            self.trusted_ids.add(id(proxy))
        else:
            self._send(["describe", {"yours": number}])
            is_class, name, bases, plain = self.read(self._receive()["value"])
            proxy = make_class(name, bases) if is_class else make_instance(bases, plain)
        STATES[id(proxy)] = (self, number)
        return proxy

    def _send(self, message: Any) -> None:
        data = memoryview(write_message(message))
        while data:
            data = data[os.write(self._outbound, data) :]

    def _receive(self) -> Any:
        size = int.from_bytes(read_exactly(self._inbound, 4), "big")
        if size > MAX_BYTES:
            raise ValueError(f"a message of {size} bytes")
        return json.loads(read_exactly(self._inbound, size))


def _is_private(name: str) -> bool:
    return name.startswith("_") and name not in ("_asdict", "_fields", "_replace")  # of a namedtuple


def describe(value: Any) -> tuple[bool, str, Any, Any]:
    """(whether `value` is a class, its name, its bases or class, its plain value or exception arguments)."""
    if isinstance(value, type):
        return True, value.__name__, list(value.__bases__), None
    plain = (
        list(value.args)
        if isinstance(value, BaseException)
        else None
        if isinstance(value, list | dict | set)
        else plain_base(value)
    )
    return False, "", type(value), plain


def _global_place(value: Any) -> list[str] | None:
    """[module, qualified name] of a function or class of the standard library, else None."""
    owner = getattr(value, "__objclass__", value)
    module, names = getattr(owner, "__module__", None), getattr(value, "__qualname__", None)
    if (
        not isinstance(module, str)
        or not isinstance(names, str)
        or module.partition(".")[0] not in sys.stdlib_module_names
    ):
        return None
    resolved: Any = sys.modules.get(module)
    for name in names.split("."):
        resolved = getattr(resolved, name, None)
    return [module, names] if resolved is value else None
