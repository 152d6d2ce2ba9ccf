"""Values as JSON, for messages between the two sandboxes of src/systems/assistants/rewards/isolated.py.
Runs inside them, so it imports only the standard library.

Messages are not trusted: their reader only makes values of exact plain types and of the types in `STANDARD`.
"""

from __future__ import annotations  # do not load types, to start faster

import builtins
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

PLAIN_BASES = (int, float, complex, str, bytes, tuple, frozenset, list, dict, set, bytearray)
"""Types of plain values. A program can subclass them."""
TYPES: dict[str, type] = {kind.__name__: kind for kind in (object, type(None), bool, range, slice, *PLAIN_BASES)} | {
    name: kind for name, kind in vars(builtins).items() if isinstance(kind, type) and issubclass(kind, BaseException)
}
"""Classes that are sent by name."""

STANDARD: dict[str, tuple[str, Callable[[Any], tuple[Any, ...]]]] = {
    "Fraction": ("fractions", lambda value: (value.numerator, value.denominator)),
    "Decimal": ("decimal", lambda value: (str(value),)),
    "date": ("datetime", lambda value: (value.year, value.month, value.day)),
    "datetime": (
        "datetime",
        lambda value: (
            value.year, value.month, value.day, value.hour, value.minute, value.second, value.microsecond, value.tzinfo
        ),
    ),
    "time": ("datetime", lambda value: (value.hour, value.minute, value.second, value.microsecond, value.tzinfo)),
    "timedelta": ("datetime", lambda value: (value.days, value.seconds, value.microseconds)),
    "timezone": ("datetime", lambda value: (value.utcoffset(None),)),
    "deque": ("collections", lambda value: (list(value), value.maxlen)),
    "Counter": ("collections", lambda value: (dict(value),)),
    "OrderedDict": ("collections", lambda value: (list(value.items()),)),
    "defaultdict": ("collections", lambda value: (value.default_factory, dict(value))),
    "PosixPath": ("pathlib", lambda value: (str(value),)),
    "PurePosixPath": ("pathlib", lambda value: (str(value),)),
    "array": ("array", lambda value: (value.typecode, list(value))),
    "UUID": ("uuid", lambda value: (str(value),)),
}  # fmt: skip
"""Types of the standard library that are sent by value: module, and constructor arguments of an equal value."""


def write_value(value: Any, refer: Callable[[Any], Any]) -> Any:
    """`value` as JSON. refer: writes values that are not of an exact plain type."""
    kind = type(value)
    if value is None or kind in (bool, str, float):
        return value
    if kind is int:
        return value if abs(value) < 1 << 53 else {"int": hex(value)}
    if kind is complex:
        return {"complex": [value.real, value.imag]}
    if kind is bytes:
        return {"bytes": value.hex()}
    if kind is list:
        return [write_value(item, refer) for item in value]
    if kind is dict:
        return {"dict": [[write_value(key, refer), write_value(item, refer)] for key, item in value.items()]}
    if kind in (tuple, set, frozenset):
        return {kind.__name__: [write_value(item, refer) for item in value]}
    if kind is range:
        return {"range": [write_value(item, refer) for item in (value.start, value.stop, value.step)]}
    if kind is slice:
        return {"slice": [write_value(item, refer) for item in (value.start, value.stop, value.step)]}
    if kind is bytearray:
        return {"bytearray": [value.hex()]}
    return refer(value)


def write_plain(value: Any) -> Any:
    """`value` as JSON, with instances of subclasses converted to their plain base.

    Raises:
        TypeError: a value has no plain base.
    """

    def refer(value: Any) -> Any:
        base = plain_base(value)
        if base is None:
            raise TypeError(f"{type(value).__name__}: not plain data")
        return write_value(base, refer)

    return write_value(value, refer)


def plain_base(value: Any) -> Any:
    """Convert an instance of a subclass of a plain type to the plain type; None for other values."""
    bases: list[Any] = [each for each in PLAIN_BASES if isinstance(value, each)]
    base = bases[0] if bases else None
    if base is None:
        return None
    if base in (int, float, complex, str, bytes, tuple):  # not base(value), which calls methods of the subclass
        arguments = getattr(base, "__getnewargs__")(value)  # noqa: B009  not in the types of the library
        return complex(*arguments) if base is complex else arguments[0]
    return dict(getattr(base, "items")(value)) if base is dict else base(base.__iter__(value))  # noqa: B009  as above


def write_standard(value: Any, refer: Callable[[Any], Any]) -> Any:
    """JSON of a value or class of `STANDARD`, a class of `TYPES` or an exception; None for other values."""
    kind = type(value)
    module, arguments = STANDARD.get(kind.__name__, ("", tuple))
    if module and kind is getattr(sys.modules.get(module), kind.__name__, None):
        return {"standard": [kind.__name__, *(write_value(item, refer) for item in arguments(value))]}
    if isinstance(value, type):
        if TYPES.get(value.__name__) is value:
            return {"type": value.__name__}
        module = STANDARD.get(value.__name__, ("",))[0]
        if module and value is getattr(sys.modules.get(module), value.__name__, None):
            return {"type": value.__name__}
        if issubclass(value, Exception) and _is_standard(value.__module__):
            return {"stdlib": [value.__module__, value.__qualname__]}
    elif isinstance(value, BaseException) and _is_standard(kind.__module__):
        return {"exception": [write_standard(kind, refer), *(write_value(item, refer) for item in value.args)]}
    return None


def read_value(wire: Any, find: Callable[[str, Any], Any]) -> Any:
    """Read the JSON of `write_value`. find: reads other kinds.

    Raises:
        Exception: the JSON is not from `write_value`.
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
    if kind == "bytearray":
        return bytearray.fromhex(inner[0])
    makers: dict[str, Callable[[Any], Any]] = {
        "complex": lambda pair: complex(*pair),
        "dict": dict,
        "tuple": tuple,
        "set": set,
        "frozenset": frozenset,
        "range": lambda ends: range(*ends),
        "slice": lambda ends: slice(*ends),
    }
    if kind not in makers:
        return find(kind, inner)
    if not isinstance(inner, list):
        raise ValueError(f"{kind}: unknown kind of value")
    return makers[kind]([read_value(item, find) for item in inner])


def read_standard(kind: str, inner: Any, find: Callable[[str, Any], Any]) -> Any:
    """Read the JSON of `write_standard`.

    Raises:
        Exception: the JSON is not from `write_standard`.
    """
    if kind == "type":
        return TYPES[inner] if inner in TYPES else _standard_class(inner)
    if kind == "stdlib":  # only from loaded modules: a message must not import anything
        module, name = inner
        error_class = getattr(sys.modules.get(module), name, None) if _is_standard(module) else None
        return error_class if isinstance(error_class, type) and issubclass(error_class, Exception) else RuntimeError
    values = [read_value(item, find) for item in inner]
    if kind == "standard":
        return _standard_class(values[0])(*values[1:])
    if kind == "exception" and isinstance(values[0], type) and issubclass(values[0], BaseException):
        try:
            return values[0](*values[1:])
        except TypeError:  # `args` differ from the constructor's arguments
            return values[0].__new__(values[0], *values[1:])
    raise ValueError(f"{kind}: unknown kind of value")


def _is_standard(module: Any) -> bool:
    return isinstance(module, str) and module.partition(".")[0] in sys.stdlib_module_names


def _standard_class(name: str) -> Any:
    return getattr(__import__(STANDARD[name][0]), name)
