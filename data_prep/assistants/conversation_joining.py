"""Join conversations up to a maximum length, or prepend an earlier one as an example."""

import json
from collections import deque
from collections.abc import Iterator
from typing import Any

from src.systems.assistants.conversations.choices import draws

Row = dict[str, Any]
_NEAR = 5


class Joiner:
    """Lengthens the conversations of one split, in order. Text rows and rows with ranked replies are unchanged."""

    def __init__(self, characters: int | None, shots: float) -> None:
        """characters: join conversations with the same system message up to this length.
        shots: share of the conversations that get an example."""
        self._characters, self._shots = characters, shots
        self._open = dict[str, tuple[list[Row], list[Row]]]()
        self._recent = deque[list[Row]](maxlen=_NEAR)

    def add(self, row: Row) -> Iterator[Row]:
        """Add a row; yields the finished rows."""
        if "text" in row or "replies" in row or (self._characters is not None and row.keys() > {"messages"}):
            yield row  # joining would drop keys such as tools
        elif self._characters is not None:
            yield from self._join(row["messages"], self._characters)
        else:
            yield {**row, "messages": self._with_example(row["messages"])}

    def flush(self) -> Iterator[Row]:
        """Yield the rows that are still being joined."""
        yield from ({"messages": [*system, *talk]} for system, talk in self._open.values())
        self._open.clear()

    def _join(self, messages: list[Row], characters: int) -> Iterator[Row]:
        count = int(messages[0]["role"] == "system")
        key = messages[0]["content"] if count else ""
        system, talk = self._open.setdefault(key, (messages[:count], []))
        talk += messages[count:]
        if sum(len(message["content"]) for message in (*system, *talk)) >= characters:
            yield {"messages": [*system, *self._open.pop(key)[1]]}

    def _with_example(self, messages: list[Row]) -> list[Row]:
        """Prepend one of the previous rows to a share of the conversations. The choice depends only on these rows."""
        if not self._shots:
            return messages
        draw, near = draws("shots", json.dumps(messages, sort_keys=True)), [*self._recent]
        self._recent.append(messages)
        return [*draw.choice(near), *messages] if near and draw.random() < self._shots else messages
