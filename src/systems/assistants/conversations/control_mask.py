"""Mask control tokens spelled out in messages: the template does not see them, and they stay plain text."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from src.data.text.spans import Span
from src.systems.assistants.conversations.entries import Message

CONTROL = r"<\|[^|\s]+\|>"
MASK = "\x7f"
"""Delimiter around the number of a masked text; doubled before "m" and the number of a marked message.
JSON does not escape it."""


class Mask:
    """Replaces control tokens spelled out in messages, so that only the template writes control tokens."""

    def __init__(self, controls: re.Pattern[str]) -> None:
        self._masked_texts = list[str]()
        self._controls = re.compile(f"{controls.pattern}|{CONTROL}|{MASK}")

    def message(self, message: Message) -> dict[str, Any]:
        """The message as templates read it."""
        return {**self.mask(message.raw), "role": message.role}

    def mask(self, value: Any) -> Any:
        """The value with each spelled-out control token masked."""
        if isinstance(value, str):
            return self._controls.sub(self._note, value)
        if isinstance(value, Mapping):
            return {self.mask(key): self.mask(each) for key, each in value.items()}
        return [self.mask(each) for each in value] if isinstance(value, list | tuple) else value

    def _note(self, match: re.Match[str]) -> str:
        self._masked_texts.append(match.group())
        return f"{MASK}{len(self._masked_texts) - 1}{MASK}"

    def restore(self, span: Span) -> Iterator[Span]:
        """Split a span at its masks, which become plain text."""
        for place, piece in enumerate(re.split(f"{MASK}([0-9]+){MASK}", span.text)):
            yield Span(self._masked_texts[int(piece)], span.role) if place % 2 else Span(piece, span.role, True)
