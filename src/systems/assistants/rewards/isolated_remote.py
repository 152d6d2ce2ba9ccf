"""Proxies of objects in the other sandbox of src/systems/assistants/rewards/isolated.py.
Runs inside the sandboxes, so it imports only the standard library.

A `Remote` is a proxy that forwards every operation, with exceptions. A program must neither learn the value that it is
compared with nor decide a comparison with plain data:
- A `Remote` never equals plain data and has no order with it, unless its class is a subclass of a plain type: then its
  plain value is compared here.
- Arithmetic and `in` with plain data are forwarded only for objects that a test constructed, as in `Vector(1, 2) * 3`.
- Comparisons of two objects of the program are forwarded.
"""

from __future__ import annotations  # do not load types, to start faster

import builtins
import collections
import contextlib
import operator
import sys

from src.systems.assistants.rewards.isolated_values import PLAIN_BASES, plain_base

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from src.systems.assistants.rewards.isolated_peer import Peer

BINARY = (
    "add",
    "sub",
    "mul",
    "matmul",
    "truediv",
    "floordiv",
    "mod",
    "pow",
    "lshift",
    "rshift",
    "and",
    "or",
    "xor",
    "divmod",
)
ORDER = ("lt", "le", "gt", "ge")
UNARY = ("neg", "pos", "abs", "invert", "index")
_MUTABLE = (list, dict, set, bytearray)
_CONVERSIONS = {
    "int": int,
    "float": float,
    "complex": complex,
    "str": str,
    "repr": repr,
    "hash": hash,
    "len": len,
    "bool": bool,
}
_ERROR_ATTRIBUTES = (
    "args",
    "with_traceback",
    "__traceback__",
    "__context__",
    "__cause__",
    "__suppress_context__",
    "__notes__",
    "add_note",
)

STATES: dict[int, tuple[Peer, int]] = {}
"""Peer and number of each proxy, by its `id`. `Peer._proxies` holds a reference to each proxy."""


def load_module(name: str) -> Any:
    """Import a module of the standard library by its full name."""
    __import__(name)
    return sys.modules[name]


def is_container(value: Any) -> bool:
    """Whether a value is sent by value and mutable, so that both peers can change it."""
    return type(value) in (
        *_MUTABLE,
        collections.deque,
        collections.defaultdict,
        collections.OrderedDict,
        collections.Counter,
    )


def make_class(name: Any, bases: Any) -> Any:
    """A proxy of a class of the program, with the same bases."""
    remote = [base for base in bases if isinstance(base, RemoteType)] or [Remote]
    plain = [
        base for base in bases if not isinstance(base, RemoteType) and issubclass(base, (*PLAIN_BASES, BaseException))
    ]
    members = {"__slots__": ()}
    with contextlib.suppress(TypeError):
        return type.__new__(RemoteType, str(name), (*remote, *plain), members)
    return type.__new__(RemoteType, str(name), (Remote,), members)


def make_instance(kind: Any, plain: Any) -> Any:
    """A proxy of an object. kind: from `make_class`. plain: its plain value, or the arguments of an exception."""
    if not isinstance(kind, RemoteType):
        raise ValueError(f"{kind}: not a class of the program")
    if issubclass(kind, BaseException):
        with contextlib.suppress(TypeError):
            return kind.__new__(kind, *plain)
    base: Any = next((base for base in PLAIN_BASES if issubclass(kind, base)), object)
    return base.__new__(kind, plain) if plain is not None and base is not object else base.__new__(kind)


def _ask(value: Any, verb: str, *arguments: Any) -> Any:
    if id(value) not in STATES:
        raise AttributeError(f"{type(value).__name__}: not an object of a program")
    return STATES[id(value)][0].request(verb, value, *arguments)


def _is_trusted(value: Any) -> bool:
    state = STATES.get(id(value))
    return state is not None and id(value) in state[0].trusted_ids


def _is_remote(value: Any) -> bool:
    return id(value) in STATES


def _call(value: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
    result, after, same = _ask(value, "call", list(arguments), options)
    for argument, changed in zip(arguments, after, strict=False):
        update(argument, changed)
    if type(same) is int and 0 <= same < len(arguments):  # `f(x) is x`
        result = arguments[same]
    if _is_trusted(value) and _is_remote(result):
        STATES[id(result)][0].trusted_ids.add(id(result))
    return result


def update(value: Any, changed: Any) -> None:
    """Copy the contents of `changed`, the other peer's copy, into the container `value`."""
    if type(value) is not type(changed) or value is changed:
        return
    if isinstance(value, list) and len(value) == len(changed):
        for place, item in enumerate(changed):
            if type(value[place]) is type(item) and isinstance(item, list | dict | set):
                update(value[place], item)
            else:
                value[place] = item
    elif isinstance(value, list | bytearray):
        value[:] = changed
    elif isinstance(value, dict | set):
        if value != changed:
            value.clear()
            value.update(changed)
    elif type(value).__name__ == "deque":
        value.clear()
        value.extend(changed)


class RemoteType(type):
    """The metaclass of proxies of a program's classes."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return _call(cls, args, kwargs)

    def __getattr__(cls, name: str) -> Any:
        return _ask(cls, "attribute", name)

    def __setattr__(cls, name: str, value: Any) -> None:
        _ask(cls, "assign", name, value)

    def __getitem__(cls, key: Any) -> Any:
        return _ask(cls, "item", key)

    def __iter__(cls) -> Any:
        return _ask(cls, "iterate")

    def __len__(cls) -> int:
        return _ask(cls, "convert", "len")

    def __contains__(cls, item: Any) -> bool:
        return _contains(cls, item)

    def __bool__(cls) -> bool:
        return True

    def __hash__(cls) -> int:
        return id(cls)


class Remote(metaclass=RemoteType):
    """A proxy of an object in the other sandbox."""

    __slots__ = ()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _call(self, args, kwargs)

    def __getattribute__(self, name: str) -> Any:  # not __getattr__: a class can override a method of its plain base
        if name in ("__class__", "__deepcopy__") or (name in _ERROR_ATTRIBUTES and isinstance(self, BaseException)):
            return object.__getattribute__(self, name)
        return _ask(self, "attribute", name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _ERROR_ATTRIBUTES and isinstance(self, BaseException):
            BaseException.__setattr__(self, name, value)
        else:
            _ask(self, "assign", name, value)

    def __delattr__(self, name: str) -> None:
        _ask(self, "delete", name)

    def __getitem__(self, key: Any) -> Any:
        return _ask(self, "item", key)

    def __setitem__(self, key: Any, value: Any) -> None:
        _ask(self, "set item", key, value)

    def __delitem__(self, key: Any) -> None:
        _ask(self, "delete item", key)

    def __iter__(self) -> Any:
        return _ask(self, "iterate")

    def __next__(self) -> Any:
        return _ask(self, "next")

    def __reversed__(self) -> Any:
        return _ask(self, "reversed")

    def __contains__(self, item: Any) -> bool:
        return _contains(self, item)

    def __copy__(self) -> Any:
        return _copy(self, "copy")

    def __deepcopy__(self, _: Any) -> Any:
        return _copy(self, "deepcopy")

    def __enter__(self) -> Any:
        return _ask(self, "enter")

    def __exit__(self, kind: Any, error: Any, trace: Any) -> Any:
        return _ask(self, "exit", kind, error)

    def __format__(self, form: str) -> str:
        return _ask(self, "format", form)

    def __round__(self, digits: int | None = None) -> Any:
        return _ask(self, "round", digits)

    def __hash__(self) -> int:
        return _ask(self, "convert", "hash")

    def __eq__(self, other: object) -> Any:
        if self is other:
            return True
        if _is_remote(other):
            return _ask(self, "operate", "eq", self, other)
        plain = _plain(self)
        return NotImplemented if plain is None else plain == other

    def __ne__(self, other: object) -> Any:
        if _is_remote(other):
            return _ask(self, "operate", "ne", self, other)
        plain = _plain(self)
        return NotImplemented if plain is None else plain != other


def _copy(value: Any, name: str) -> Any:
    return _mark(value, _ask(value, "library", "copy", name))


def forward(module: Any, name: str) -> None:
    """Patch a library function to run in the program's process if its first argument is a proxy."""
    function = getattr(module, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        if args and _is_remote(args[0]):
            return _mark(args[0], _ask(args[0], "library", module.__name__, name, args[1:], kwargs))
        return function(*args, **kwargs)

    setattr(module, name, call)


def _contains(value: Any, item: Any) -> bool:
    if _is_remote(item) or (_is_trusted(value) and not isinstance(value, type)):
        return _ask(value, "contains", item)
    if not isinstance(value, type) and (plain := _plain(value)) is not None:
        return item in plain
    items: Any = value
    return any(each is item or each == item for each in items)


def _plain(value: Any) -> Any:
    """The current plain value of an instance of a subclass of a plain type, or None."""
    if isinstance(value, _MUTABLE):
        return _ask(value, "plain")
    return plain_base(value)  # from the local copy: a program could answer each comparison differently


def _operate(name: str, one: Any, other: Any) -> Any:
    """A binary operation with at least one proxy as operand."""
    remote = [each for each in (one, other) if _is_remote(each)]
    is_trusted = any(map(_is_trusted, remote))
    if len(remote) == 2 or (is_trusted and name not in ORDER):
        result = _ask(remote[0], "operate", name, one, other)
        if is_trusted and _is_remote(result):
            STATES[id(result)][0].trusted_ids.add(id(result))
        return result
    if isinstance(remote[0], _MUTABLE) and name in ORDER:
        return NotImplemented
    plain = _plain(remote[0])
    if plain is None:
        return NotImplemented
    return _OPERATIONS[name](plain, other) if remote[0] is one else _OPERATIONS[name](one, plain)


_OPERATIONS: dict[str, Callable[[Any, Any], Any]] = {"divmod": divmod, "and": operator.and_, "or": operator.or_}
for _name in (*BINARY, *ORDER, "eq", "ne"):
    _OPERATIONS.setdefault(_name, getattr(operator, _name, None))  # type: ignore[arg-type]
    if _name in BINARY and _name != "divmod":
        _OPERATIONS[f"i{_name}"] = getattr(operator, f"i{_name}")


def _add_methods() -> None:
    """Add the methods of operators and conversions to `Remote`."""

    def add(name: str, method: Any) -> None:
        type.__setattr__(Remote, f"__{name}__", method)

    for name in (*BINARY, *ORDER):
        add(name, lambda self, other, name=name: _operate(name, self, other))
    for name in BINARY:
        add(f"r{name}", lambda self, other, name=name: _operate(name, other, self))
        if f"i{name}" in _OPERATIONS:
            add(f"i{name}", lambda self, other, name=name: _operate(f"i{name}", self, other))
    for name in UNARY:
        add(name, lambda self, name=name: _mark(self, _ask(self, "unary", name)))
    for name in _CONVERSIONS:
        add(name, lambda self, name=name: _ask(self, "convert", name))


def _mark(value: Any, result: Any) -> Any:
    if _is_trusted(value) and _is_remote(result):
        STATES[id(result)][0].trusted_ids.add(id(result))
    return result


_add_methods()


def _enter(value: Any) -> Any:
    return type(value).__enter__(value)


def _exit(value: Any, kind: Any, error: Any) -> Any:
    return type(value).__exit__(value, kind, error, None)


def _call_here(function: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """[result, arguments after the call, index of the argument that is the result or None]."""
    result = function(*args, **kwargs)
    same = [place for place, each in enumerate(args) if each is result and isinstance(each, _MUTABLE)]
    return [result, args, same[0] if same else None]


def _call_library(value: Any, module: str, name: str, args: Any = (), kwargs: Any = None) -> Any:
    return getattr(load_module(module), name)(value, *args, **(kwargs or {}))


VERBS: dict[str, Callable[..., Any]] = {
    "call": _call_here,
    "library": _call_library,
    "attribute": getattr,
    "assign": setattr,
    "delete": delattr,
    "item": operator.getitem,
    "set item": operator.setitem,
    "delete item": operator.delitem,
    "iterate": iter,
    "next": next,
    "reversed": reversed,
    "contains": operator.contains,
    "enter": _enter,
    "exit": _exit,
    "format": format,
    "round": lambda value, digits: round(value) if digits is None else round(value, digits),
    "operate": lambda _, name, one, other: _OPERATIONS[name](one, other),
    "unary": lambda value, name: getattr(operator, name, abs)(value),
    "convert": lambda value, name: getattr(builtins, name)(value) if name in _CONVERSIONS else None,
    "plain": plain_base,
}
"""Operations on an object, by name."""
