"""What runs inside the sandboxes of src/rewards/sandbox.py. Nothing of ours is there, so this file imports the standard library alone.

    serve LIMITS            runs a program that a model wrote, and answers requests about it
    judge LIMITS IN OUT     runs tests, which ask the program in another sandbox through the descriptors IN and OUT

The two share no memory, file or process. Whoever reads the pipe of `serve` must take every byte for the program's: it can do as it
likes with its own interpreter. So what comes back is JSON, of which `read_value` makes plain data of exact types and nothing else.
"""

from __future__ import annotations  # types are not loaded: each start counts

import builtins
import contextlib
import io
import json
import os
import sys
from types import CodeType, ModuleType

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any, NoReturn

READY = b"ready\n"
"""What each side writes before anything that a model wrote has run."""
_VALUE = "<value>"
"""Where the value of the last line is kept: no program has a variable of this name."""
_MOST_BYTES = 1 << 24
"""Of one message."""


def write_value(value: Any, refer: Callable[[Any], Any]) -> Any:
    """`value` as JSON; what is no plain data becomes what `refer` makes of it."""
    if value is None or isinstance(value, bool | str | float):
        return value
    if isinstance(value, int):
        return int(value) if abs(value) < 1 << 53 else {"int": hex(value)}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, bytes):
        return {"bytes": value.hex()}
    if isinstance(value, list):
        return [write_value(item, refer) for item in value]
    if isinstance(value, dict):
        return {"dict": [[write_value(key, refer), write_value(item, refer)] for key, item in value.items()]}
    for kind in (tuple, set, frozenset):
        if isinstance(value, kind):
            return {kind.__name__: [write_value(item, refer) for item in value]}
    return refer(value)


def read_value(wire: Any, find: Callable[[int], Any]) -> Any:
    """What `write_value` wrote. find: the object of a number.

    Raises:
        ValueError, TypeError, RecursionError: it wrote no such thing.
    """
    if isinstance(wire, list):
        return [read_value(item, find) for item in wire]
    if not isinstance(wire, dict):
        return wire
    ((kind, inner),) = wire.items()
    if kind == "int":
        return int(inner, 16)
    if kind == "bytes":
        return bytes.fromhex(inner)
    if kind == "object" and type(inner) is int:
        return find(inner)
    items = read_value(inner, find)
    makers = {"complex": lambda pair: complex(*pair), "dict": dict, "tuple": tuple, "set": set, "frozenset": frozenset}
    if kind not in makers or not isinstance(items, list):
        raise ValueError(f"{kind}: no kind of value")
    return makers[kind](items)


def write_message(message: Any) -> bytes:
    """Its length and its JSON."""
    body = json.dumps(message).encode()
    return len(body).to_bytes(4, "big") + body


def _send(descriptor: int, message: Any) -> None:
    left = memoryview(write_message(message))
    while left:
        left = left[os.write(descriptor, left) :]


def _read_exactly(descriptor: int, count: int) -> bytes:
    """Raises EOFError where the writer has ended."""
    found = b""
    while len(found) < count:
        piece = os.read(descriptor, min(count - len(found), 1 << 16))
        if not piece:
            raise EOFError
        found += piece
    return found


def _receive(descriptor: int) -> Any:
    size = int.from_bytes(_read_exactly(descriptor, 4), "big")
    if size > _MOST_BYTES:
        raise ValueError(f"a message of {size} bytes")
    return json.loads(_read_exactly(descriptor, size))


def _refuse(value: Any) -> NoReturn:
    raise TypeError(f"{type(value).__name__} is no plain data")


class _Program:
    """The side of the program."""

    def __init__(self) -> None:
        self.module = ModuleType("__main__")
        self.objects: list[Any] = []
        self.printed = io.StringIO()

    def run(self, source: str) -> list[str]:
        """Its global names."""
        exec(compile(source, "program", "exec"), self.module.__dict__)
        return [name for name in self.module.__dict__ if not name.startswith("__")]

    def evaluate(self, source: str) -> list[Any]:
        """The value of the last line where that is an expression, and all that was printed."""
        import ast

        tree = ast.parse(source, "program")
        if tree.body and isinstance(last := tree.body[-1], ast.Expr):
            tree.body[-1] = ast.Assign([ast.Name(_VALUE, ast.Store())], last.value)
        with contextlib.suppress(SystemExit):
            exec(compile(ast.fix_missing_locations(tree), "program", "exec"), self.module.__dict__)
        value = self.module.__dict__.get(_VALUE)
        try:
            write_value(value, _refuse)
        except TypeError:
            value = str(value)
        return [value, self.printed.getvalue()[-10_000:]]

    def find(self, name: str) -> Any:
        return self.module.__dict__[name]

    def call(self, function: Any, args: Any, kwargs: Any) -> list[Any]:
        """The value, and the arguments as the function left them."""
        return [function(*args, **kwargs), args]

    def refer(self, value: Any) -> dict[str, int]:
        """The number of an object, the same at each time."""
        number = next((n for n, known in enumerate(self.objects) if known is value), len(self.objects))
        if number == len(self.objects):
            self.objects.append(value)
        return {"object": number}

    def answer(self, request: Any) -> Any:
        verb, *arguments = read_value(request, self.objects.__getitem__)
        verbs: dict[str, Callable[..., Any]] = {
            "run": self.run,
            "evaluate": self.evaluate,
            "find": self.find,
            "call": self.call,
            "attribute": getattr,
            "item": lambda value, key: value[key],
            "length": len,
            "iterate": iter,
            "next": next,
            "text": str,
        }
        return write_value(verbs[verb](*arguments), self.refer)


def serve() -> None:
    """Answer requests of descriptor 0 on descriptor 1 until the asker ends."""
    inbound, outbound = os.dup(0), os.dup(1)
    _close_standard_streams()
    os.write(outbound, READY)
    program = _Program()
    builtins.exit = builtins.quit = sys.exit  # type: ignore[assignment]  what `site` adds
    sys.argv, sys.stdout, sys.modules["__main__"] = ["program"], program.printed, program.module
    while True:
        try:
            request = _receive(inbound)
        except EOFError:
            return
        try:
            reply: Any = {"value": program.answer(request)}
        except BaseException as error:  # noqa: BLE001  of the program, whatever it is
            names = [kind.__name__ for kind in type(error).__mro__]
            reply = {"error": [names, str(error)[:1000]]}
        _send(outbound, reply)


class _ProgramEnd(BaseException):
    """The program has ended, or says what is no answer. No test can catch it by `except Exception`."""


class _Link:
    """What the judge asks the program."""

    def __init__(self, inbound: int, outbound: int) -> None:
        self.inbound, self.outbound = inbound, outbound

    def ask(self, *request: Any) -> Any:
        wire = write_value(request, self._refer)["tuple"]
        try:
            _send(self.outbound, wire)
            reply = _receive(self.inbound)
            if "error" not in reply:
                return read_value(reply["value"], lambda number: Remote(self, number))
            names, text = reply["error"]
            kinds = (getattr(builtins, name, None) for name in names)
            kind = next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Exception)), RuntimeError)
        except Exception:  # noqa: BLE001  whatever the program has made of the pipe
            raise _ProgramEnd from None
        raise kind(text)

    @staticmethod
    def _refer(value: Any) -> dict[str, int]:
        if type(value) is not Remote:
            raise TypeError(f"a program in a sandbox gets plain data, no {type(value).__name__}")
        return {"object": vars(value)["_number"]}


class Remote:
    """An object of the program: a function, a class, an instance. It equals itself alone, whatever its class says."""

    def __init__(self, link: _Link, number: int) -> None:
        self._link, self._number = link, number

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        value, after = self._link.ask("call", self, list(args), kwargs)
        for given, left in zip(args, after, strict=False):
            if type(given) is type(left) and given != left:  # what a function does to its arguments
                if isinstance(given, list):
                    given[:] = left
                elif isinstance(given, dict | set):
                    given.clear()
                    given.update(left)
        return value

    def __getattr__(self, name: str) -> Any:
        return self._link.ask("attribute", self, name)

    def __getitem__(self, key: Any) -> Any:
        return self._link.ask("item", self, key)

    def __len__(self) -> int:
        return self._link.ask("length", self)

    def __iter__(self) -> Iterator[Any]:
        rest = self._link.ask("iterate", self)
        while True:
            try:
                yield self._link.ask("next", rest)
            except StopIteration:
                return

    def __bool__(self) -> bool:
        return True

    def __str__(self) -> str:
        return self._link.ask("text", self)

    def __eq__(self, other: object) -> bool:
        return type(other) is Remote and vars(other)["_number"] == self._number

    def __hash__(self) -> int:
        return self._number


def judge(inbound: int, outbound: int) -> None:
    """Run the tests that descriptor 0 gives, and write the nonce that it gives behind each that held, and behind the last."""
    order = json.loads(b"".join(iter(lambda: os.read(0, 1 << 16), b"")))
    verdicts = os.dup(1)
    _close_standard_streams()
    if _read_exactly(inbound, len(READY)) != READY:
        return
    os.write(verdicts, READY)
    link = _Link(inbound, outbound)
    tests = [compile(test, "tests", "exec") for test in order["tests"]]
    namespace: dict[str, Any] = {"__name__": "tests"}
    for module in order["modules"]:
        with contextlib.suppress(ImportError):
            namespace[module] = __import__(module)
    with contextlib.suppress(Exception, _ProgramEnd):
        known = link.ask("run", order["program"])
        for name in {name for test in tests for name in _names(test)}.intersection(known) - namespace.keys() - vars(builtins).keys():
            namespace[name] = link.ask("find", name)
        for number, test in enumerate(tests):
            with contextlib.suppress(Exception):
                exec(test, namespace)
                os.write(verdicts, f"{order['nonce']} {number}\n".encode())
        os.write(verdicts, f"{order['nonce']} end\n".encode())


def _names(code: CodeType) -> Iterator[str]:
    """All names that a piece of code, and what is in it, looks up."""
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names(inner)


def _close_standard_streams() -> None:
    """Let 0, 1 and 2 lead nowhere."""
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    os.close(null)


def limit_resources(limits: dict[str, int]) -> None:
    """Lower both limits of each resource, which a process without privileges can never raise again."""
    import resource

    for name, most in limits.items():
        resource.setrlimit(getattr(resource, name), (most, most))


def main() -> NoReturn:
    """One of the two roles; nothing that the program leaves for the end (atexit, threads) runs."""
    try:
        role, limits, *descriptors = sys.argv[1:]
        limit_resources(json.loads(limits))
        {"serve": serve, "judge": judge}[role](*map(int, descriptors))
    finally:
        os._exit(0)
