"""The processes inside the sandboxes of src/systems/assistants/rewards/sandbox.py, with isolated_*.py: only the
standard library.

    serve LIMITS            runs a program that a model wrote, and answers requests about it
    judge LIMITS IN OUT     runs tests, which ask the program in another sandbox through the descriptors IN and OUT

The two share no memory, file or process. A program can do anything with its own interpreter, so the reader of its pipe
must expect any bytes.
"""

from __future__ import annotations  # types are not loaded: start-up time counts

import builtins
import contextlib
import json
import os
import sys
from types import ModuleType

from src.systems.assistants.rewards.isolated_peer import Peer, ProgramEnd, describe, read_exactly
from src.systems.assistants.rewards.isolated_peer import write_message as write_message  # noqa: PLC0414  for those that write an order
from src.systems.assistants.rewards.isolated_remote import VERBS, RemoteType, forward
from src.systems.assistants.rewards.isolated_values import read_value, write_plain

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn

READY = b"ready\n"
"""Each side writes this before it runs anything that a model wrote."""
_VALUE = "<value>"
"""The variable of the last line's value. No program can have one of this name."""

_FORWARDED_FUNCTIONS = {
    "dataclasses": ("asdict", "astuple", "fields", "replace"),
    "inspect": ("signature",),
    "asyncio": ("run",),
}
"""Functions that look into an object."""


class _Program:
    """The side of the program."""

    def __init__(self, peer: Peer) -> None:
        self.module, self._peer = ModuleType("__main__"), peer

    def run(self, source: str) -> None:
        """Run the program."""
        exec(compile(source, "program", "exec"), self.module.__dict__)

    def evaluate(self, source: str) -> list[Any]:
        """The value of the last line if that is an expression, and the printed text."""
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
        """Answer a request of the judge."""
        return {**VERBS, "run": self.run, "evaluate": self.evaluate, "find": self.find, "describe": describe}[verb](
            *arguments
        )


def serve() -> None:
    """Answer requests of descriptor 0 on descriptor 1 until the other end closes."""
    inbound, outbound = os.dup(0), os.dup(1)
    _close_standard_streams()
    os.write(outbound, READY)
    peer = Peer(inbound, outbound, is_judge=False)
    program = _Program(peer)
    builtins.exit = builtins.quit = sys.exit  # type: ignore[assignment]  as `site` does
    sys.argv, sys.stdout, sys.modules["__main__"] = ["program"], peer.stdout, program.module
    peer.serve_forever(program.serve)


class _Names(dict[str, object]):
    """The namespace of the tests. Other names are looked up in the program, as they are now."""

    def __init__(self, peer: Peer) -> None:
        super().__init__(__name__="tests")
        self._peer = peer

    def __missing__(self, name: str) -> Any:
        if name.startswith("__") or name in vars(builtins):  # from builtins, never from the program
            raise KeyError(name)
        value = self._peer.ask("find", name)
        if isinstance(value, RemoteType) and name.lstrip("_")[:1].isupper():
            self._peer.trusted_ids.add(id(value))
        return value


def judge(inbound: int, outbound: int) -> None:
    """Run the tests of descriptor 0.
    Write its nonce and the number of each test that passes, and "end" after the last test."""
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
        peer.ask("run", order["program"])
        for number, test in enumerate(tests):
            with contextlib.suppress(Exception):
                exec(test, names)
                os.write(verdicts, f"{order['nonce']} {number}\n".encode())
        os.write(verdicts, f"{order['nonce']} end\n".encode())


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
