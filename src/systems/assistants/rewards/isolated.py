"""The processes inside the sandboxes of src/systems/assistants/rewards/sandbox.py. This module and isolated_*.py import
only the standard library.

    serve LIMITS            runs a program that a model wrote, and answers requests about it
    judge LIMITS IN OUT     runs tests, which call the program in another sandbox through the descriptors IN and OUT

The two share no memory, file or process. A program can do anything to its own interpreter, so the reader of its pipe
must expect any bytes.
"""

from __future__ import annotations  # do not load types, to start faster

import builtins
import contextlib
import json
import os
import sys
from types import ModuleType

from src.systems.assistants.rewards.isolated_peer import Peer, ProgramEnd, describe, read_exactly
from src.systems.assistants.rewards.isolated_peer import write_message as write_message  # noqa: PLC0414  re-exported
from src.systems.assistants.rewards.isolated_remote import VERBS, RemoteType, forward
from src.systems.assistants.rewards.isolated_values import read_value, write_plain

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn

READY = b"ready\n"
"""Each process writes this before it runs any code from a model."""
_VALUE = "<value>"
"""Variable for the value of the last line. It is not an identifier, so no program uses it."""

_FORWARDED_FUNCTIONS = {
    "dataclasses": ("asdict", "astuple", "fields", "replace"),
    "inspect": ("signature",),
    "asyncio": ("run",),
}
"""Functions that inspect an object, so they must run in the object's process."""


class _Program:
    """The program's process."""

    def __init__(self, peer: Peer) -> None:
        self.module, self._peer = ModuleType("__main__"), peer

    def run(self, source: str) -> None:
        """Run the program."""
        exec(compile(source, "program", "exec"), self.module.__dict__)

    def evaluate(self, source: str) -> list[Any]:
        """[value of the last line if it is an expression, printed text]."""
        import ast

        tree = ast.parse(source, "program")
        if tree.body and isinstance(last := tree.body[-1], ast.Expr):
            tree.body[-1] = ast.Assign([ast.Name(_VALUE, ast.Store())], last.value)
        with contextlib.suppress(SystemExit):
            exec(compile(ast.fix_missing_locations(tree), "program", "exec"), self.module.__dict__)
        value = self.module.__dict__.get(_VALUE)
        try:
            value = read_value(write_plain(value), lambda *_: None)
        except TypeError:
            value = str(value)
        return [value, self._peer.take_stdout()[-10_000:]]

    def find(self, name: str) -> Any:
        """A global variable. Raises KeyError."""
        return self.module.__dict__[name]

    def serve(self, verb: str, *arguments: Any) -> Any:
        """Answer a request from the judge."""
        return {**VERBS, "run": self.run, "evaluate": self.evaluate, "find": self.find, "describe": describe}[verb](
            *arguments
        )


def serve() -> None:
    """Answer requests from descriptor 0 on descriptor 1 until the peer closes the connection."""
    inbound, outbound = os.dup(0), os.dup(1)
    _close_standard_streams()
    os.write(outbound, READY)
    peer = Peer(inbound, outbound, is_judge=False)
    program = _Program(peer)
    builtins.exit = builtins.quit = sys.exit  # type: ignore[assignment]  as `site` does
    sys.argv, sys.stdout, sys.modules["__main__"] = ["program"], peer.stdout, program.module
    peer.serve_forever(program.serve)


class _Names(dict[str, object]):
    """The namespace of the tests. Unknown names are looked up in the program each time."""

    def __init__(self, peer: Peer) -> None:
        super().__init__(__name__="tests")
        self._peer = peer

    def __missing__(self, name: str) -> Any:
        if name.startswith("__") or name in vars(builtins):  # use builtins, never the program's
            raise KeyError(name)
        value = self._peer.request("find", name)
        if isinstance(value, RemoteType) and name.lstrip("_")[:1].isupper():
            self._peer.trusted_ids.add(id(value))
        return value


def judge(inbound: int, outbound: int) -> None:
    """Run the tests that descriptor 0 describes.
    Writes the nonce and the number of each test that passes, and the nonce and "end" after the last test."""
    order = json.loads(b"".join(iter(lambda: os.read(0, 1 << 16), b"")))
    verdicts = os.dup(1)
    _close_standard_streams()
    if read_exactly(inbound, len(READY)) != READY:
        return
    os.write(verdicts, READY)
    peer = Peer(inbound, outbound, is_judge=True)
    tests = [compile(test, "tests", "exec") for test in order["tests"]]
    names = _Names(peer)
    sys.modules["tests"] = ModuleType("tests")  # for @dataclass
    for module in order["modules"]:
        with contextlib.suppress(ImportError):
            names[module] = __import__(module)
    for module, functions in _FORWARDED_FUNCTIONS.items():
        if any(module in test for test in order["tests"]):
            for name in functions:
                forward(__import__(module), name)
    with contextlib.suppress(Exception, ProgramEnd):
        peer.request("run", order["program"])
        for number, test in enumerate(tests):
            with contextlib.suppress(Exception):
                exec(test, names)
                os.write(verdicts, f"{order['nonce']} {number}\n".encode())
        os.write(verdicts, f"{order['nonce']} end\n".encode())


def _close_standard_streams() -> None:
    """Redirect descriptors 0, 1 and 2 to /dev/null."""
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    os.close(null)


def limit_resources(limits: dict[str, int]) -> None:
    """Lower the soft and hard limits of each resource. An unprivileged process cannot raise them again."""
    import resource

    for name, most in limits.items():
        resource.setrlimit(getattr(resource, name), (most, most))


def main() -> NoReturn:
    """Run one of the two roles and exit at once, without atexit handlers or other threads of the program."""
    try:
        role, limits, *descriptors = sys.argv[1:]
        limit_resources(json.loads(limits))
        {"serve": serve, "judge": judge}[role](*map(int, descriptors))
    finally:
        os._exit(0)
