"""A conversation that one model or two answer, and what a person prefers as rows that reward models and preferences are trained on.

A row is as src/data/conversations/entries.py has it; each reply also tells who wrote it ("by").
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

from src.data import jsonl
from src.data.conversations.entries import Message, read_entry
from src.errors import ConfigError, DataError
from src.files import reading, writing
from src.runs import jsonl_records
from src.serving.conversation import RESET, Talk


class Side(NamedTuple):
    """One that answers."""

    name: str
    talk: Talk


def check_output(path: Path) -> None:
    """Make the file that rows are appended to, where there is none.

    Raises:
        DataError: a line of it is no row; names it.
        RunError: it cannot be written.
    """
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    with jsonl_records.open_locked(path, mend=False), reading(path, DataError), open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            where = f"{path}:{number}"
            read_entry(jsonl.parse(line, where), where)


class Conversation:
    """What one person says, and what each side answers.

    It goes on with the reply that is preferred; with the first one until then.
    """

    def __init__(self, sides: Sequence[Side], output: Path, lock: Lock, options: dict[str, Any]) -> None:
        """output: what rows are appended to. lock: held while a side answers. options: of transformers' `generate`."""
        self.sides, self.output = sides, output
        self.messages: list[Message] = []
        self._lock, self._options = lock, options
        self._replies: Sequence[str] = ()
        """To what was asked last, as long as none is preferred."""

    def ask(self, text: str, shows: Sequence[Callable[[str], object]]) -> list[str]:
        """The reply of each side; none to the line `RESET`, which begins anew. shows: of each side, given the reply piece by piece.

        Raises:
            ConfigError: the conversation has become longer than a model can read. Nothing is changed.
            DataError: the text has half a surrogate pair.
        """
        if text.strip() == RESET:
            self.reset()
            return []
        jsonl.check_text(text, "the message")
        before, given = self.messages, list[str]()
        known, self._replies = self._replies, ()  # what is preferred while the next replies come would be too late
        try:
            with self._lock:
                for side, show in zip(self.sides, shows, strict=True):
                    side.talk.messages = [*before]
                    given.append(side.talk.answer(text, side.talk.streamer(show), **self._options))
        except BaseException:
            self._replies = known
            raise
        self.messages = [*before, Message("user", text), Message("assistant", given[0])]
        self._replies = given
        return given

    def reset(self) -> None:
        """Begin anew."""
        self.messages, self._replies = [], ()

    def prefer(self, number: int) -> None:
        """Write that reply `number` to what was asked last is the best, and go on with it. The row is on the disk when this returns.

        Raises:
            ConfigError: one is preferred already, or all say the same.
            RunError: the row cannot be written. Nothing is changed.
        """
        if len(set(self._replies)) < 2:
            raise ConfigError("nothing to prefer: say something new.")
        replies = [
            {"content": text, "rank": int(place != number), "by": side.name}
            for place, (text, side) in enumerate(zip(self._replies, self.sides, strict=True))
        ]
        asked = [{"role": message.role, "content": message.content} for message in self.messages[:-1]]
        with jsonl_records.open_locked(self.output, mend=False) as records:
            records.append({"messages": asked, "replies": replies}, ensure_ascii=False)
        self.messages = [*self.messages[:-1], Message("assistant", self._replies[number])]
        self._replies = ()
