"""The JSON parser for files, lines, requests and responses. Invalid input raises a UserError."""

import json
from pathlib import Path
from typing import Any

from src.errors import UserError

MAX_DEPTH = 200
"""Maximum nesting of JSON: low enough that code that walks the value stays below Python's recursion limit."""


def parse_json(text: bytes | str, where: Path | str, error: type[UserError]) -> Any:
    """Parse the JSON value in `text`.

    where: a path, or a place such as "FILE:LINE" or "POST /reward", for messages.

    Raises:
        error: not UTF-8, not JSON, nested deeper than `MAX_DEPTH`, or a number with thousands of digits; names `where`.
    """
    try:
        value = json.loads(text.decode("utf-8-sig") if isinstance(text, bytes | bytearray) else text)
    except json.JSONDecodeError as bad:
        message = bad.msg.removesuffix(" at")
        if isinstance(where, Path):
            raise error(f"{where}:{bad.lineno}: not valid JSON: {message}.") from None
        raise error(f"{where}: not valid JSON: {message} at column {bad.colno}.") from None
    except UnicodeDecodeError as bad:
        raise error(f"{where}: not UTF-8 text: {bad.reason} at byte {bad.start}.") from None
    except RecursionError:
        raise error(f"{where}: JSON nested deeper than {MAX_DEPTH} levels.") from None
    except ValueError as bad:
        raise error(f"{where}: cannot read a number: {str(bad).split(';')[0]}.") from None
    if _count_brackets(text) > MAX_DEPTH and _is_too_deep(value):
        raise error(f"{where}: JSON nested deeper than {MAX_DEPTH} levels.")
    return value


def _count_brackets(text: bytes | str) -> int:
    """A cheap upper bound of the depth."""
    if isinstance(text, str):
        return text.count("[") + text.count("{")
    return text.count(b"[") + text.count(b"{")


def _is_too_deep(value: Any) -> bool:
    level = [value]
    for _ in range(MAX_DEPTH):
        items = (each.values() if isinstance(each, dict) else each for each in level)
        level = [item for container in items for item in container if isinstance(item, dict | list)]
        if not level:
            return False
    return True
