"""Conversations in the JSON of a document, in the format of Hugging Face's chat templates.

[{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is it?"}]},
 {"role": "assistant", "content": "A cat."}]

An image can have a name as "image", "path" or "url"; images without one are those of the tar, in order. A content that
is a string can have images as <image>.
"""

import json
import re
from collections.abc import Sequence
from typing import Any

from src.errors import DataError

_KIND_OF = {"system": "system", "user": "prompt", "assistant": "text"}
_NAMES = ("image", "path", "url")
_IMAGE = "<image>"


class MessagesError(DataError):
    """The messages of a document are not a conversation that can be learned."""


class ImagesError(MessagesError):
    """The messages of a document have other images than the tar."""


def parts_of(messages: Sequence[Any], where: str) -> list[tuple[str, Any]]:
    """(kind, value) of each part of a conversation; the value of an image is its name, or its number as an int.

    Raises:
        MessagesError: roles do not alternate, no answer ends the conversation, or a content is malformed.
    """
    parts, roles, images = list[tuple[str, Any]](), list[str](), 0
    for number, message in enumerate(messages):
        place = f"{where}: messages[{number}]"
        role = str(message.get("role")) if isinstance(message, dict) else "none"
        expected = ("user", "system")[: 1 + (not roles)] if roles[-1:] != ["user"] else ("assistant",)
        if role not in expected:
            raise MessagesError(f"{place}: role: expected {' or '.join(expected)}, got {role!r}.")
        roles.append(role)
        for item in _items(message.get("content"), place):
            kind, names = item.get("type"), [item[key] for key in _NAMES if item.get(key) not in (None, "")]
            if kind == "text" and isinstance(item.get("text"), str) and _IMAGE not in item["text"]:
                parts.append((_KIND_OF[role], item["text"]))
            elif kind == "image" and role == "user" and all(isinstance(name, str) for name in names):
                parts.append(("image", names[0] if names else images))
                images += not names
            else:
                raise MessagesError(
                    f'{place}: content: expected "type": "text", or "image" of the user, got {json.dumps(item):.60}.'
                )
    if roles[-1:] != ["assistant"]:
        raise MessagesError(f"{where}: expected an answer at the end, got {', '.join(roles) or 'no message'}.")
    return parts


def _items(content: Any, place: str) -> list[dict[str, Any]]:
    """The content of a message as a list of objects."""
    if isinstance(content, str):
        pieces = [piece for piece in re.split(f"({_IMAGE})", content) if piece] or [""]
        return [{"type": "image"} if piece == _IMAGE else {"type": "text", "text": piece} for piece in pieces]
    if not isinstance(content, list) or not content or not all(isinstance(item, dict) for item in content):
        raise MessagesError(f"{place}: content: expected text or a list of objects, got {json.dumps(content):.60}.")
    return content
