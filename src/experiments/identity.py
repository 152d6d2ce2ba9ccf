"""The id of an experiment: haven's hash of its dict.
Only dicts that haven can hash faithfully and JSON can store have an id."""

import hashlib
import math
from typing import Any

from src.errors import ConfigError
from src.experiments.config import join

DEEPEST = 50
"""Maximum depth of nested dicts and lists. Experiments need five; Python fails at several hundred."""
_LARGEST = 10**300  # beyond the range of floats; Python cannot print ints of 4300 digits


def exp_id(exp: dict[str, Any]) -> str:
    """32 hex characters, equal to `haven.haven_utils.hash_dict(exp)` for every dict that `check_values` accepts.

    Two dicts that differ only in types, such as 1 and "1", share an id: `RunDir.open` compares the dicts themselves.
    """
    return hashlib.md5(
        "".join(f"{key}/{_text(exp[key])}" for key in sorted(exp)).encode(), usedforsecurity=False
    ).hexdigest()


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return exp_id(value)
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return "".join(exp_id(item) for item in value)
    return str(value)


def check_values(exp: Any, where: str) -> None:
    """Refuse values that haven cannot hash faithfully or JSON cannot store.

    Raises:
        ConfigError: names the first such value by its path below `where`.
    """
    _check_depth(exp, where)
    if type(exp) is not dict:
        raise ConfigError(f"{where}: expected a dict, got {_describe_value(exp)}.")
    _check_dict(exp, where)


def _check_depth(value: Any, where: str) -> None:
    level = [value]
    for _ in range(DEEPEST + 1):
        # Deduplicated, as a cycle would grow the level exponentially.
        holders = {id(holder): holder for holder in level if isinstance(holder, (dict, list, tuple))}
        level = [
            item for holder in holders.values() for item in (holder.values() if isinstance(holder, dict) else holder)
        ]
        if not level:
            return
    raise ConfigError(
        f"{where}: expected dicts and lists at most {DEEPEST} deep, got deeper ones, or one that contains itself."
    )


def _check_dict(value: dict[Any, Any], where: str) -> None:
    for key, item in value.items():
        if type(key) is not str:
            raise ConfigError(f"{where}: expected keys of type str, got {_describe_value(key)}.")
        if not key or "." in key:
            raise ConfigError(
                f"{where}: a key must not be empty or contain a dot, got {key!r}. Nest the dicts instead."
            )
        _check_text(key, where)
        _check(item, join(where, key))


def _check(value: Any, where: str) -> None:
    if type(value) is dict:
        _check_dict(value, where)
    elif type(value) is list:
        _check_list(value, where)
    elif type(value) is str:
        _check_text(value, where)
    elif type(value) is float and not math.isfinite(value):
        raise ConfigError(f"{where}: expected a finite number, got {value}.")
    elif type(value) is int and abs(value) >= _LARGEST:
        raise ConfigError(f"{where}: expected a number of at most 300 digits, got a longer one.")
    elif value is not None and type(value) not in (bool, int, float):
        hint = " Write a list instead." if isinstance(value, (tuple, set, frozenset)) else ""
        raise ConfigError(
            f"{where}: expected a JSON value (dict, list, str, int, float, bool or None), got "
            f"{_describe_value(value)}.{hint}"
        )


def _check_list(value: list[Any], where: str) -> None:
    dicts = sum(type(item) is dict for item in value)
    if 0 < dicts < len(value):
        raise ConfigError(
            f"{where}: expected a list with only dicts or no dict, got {dicts} dicts among {len(value)} values."
        )
    for place, item in enumerate(value):
        below = f"{where}[{place}]"
        if type(item) is list and _holds_dict(item):
            raise ConfigError(
                f"{below}: a list inside a list contains dicts, and their key order would change the id. "
                "Put the dicts into one flat list."
            )
        _check(item, below)


def _holds_dict(value: list[Any]) -> bool:
    return any(isinstance(item, dict) or (isinstance(item, list) and _holds_dict(item)) for item in value)


def _check_text(value: str, where: str) -> None:
    if not value.isascii() and any("\ud800" <= character <= "\udfff" for character in value):
        raise ConfigError(f"{where}: expected text that UTF-8 can encode, got {_describe_value(value)}.")


def _describe_value(value: Any) -> str:
    text = ascii(value)
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({type(value).__name__})"
