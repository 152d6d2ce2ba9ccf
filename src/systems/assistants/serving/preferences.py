"""A conversation with one or two models, and a person's preferences as rows for the recipes `reward` and `dpo`.

For the rows see src/systems/assistants/conversations/entries.py. Each reply also has the name of its model, "by".
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

from src.data import jsonl
from src.errors import ConfigError, DataError
from src.files import reading, writing
from src.runs import jsonl_records
from src.serving.writer import RESET, ConversationTooLong, is_reset
from src.systems.assistants.conversations.entries import Message, read_entry
from src.systems.assistants.serving.conversation import Talk


class Side(NamedTuple):
    """A model that answers."""

    name: str
    talk: Talk


def check_output(path: Path) -> None:
    """Create the file that rows are appended to, or check its rows if it exists.

    Raises:
        DataError: a line is not a valid row; reports FILE:LINE.
        RunError: the file cannot be written.
    """
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    with jsonl_records.open_locked(path, mend=False), reading(path, DataError), open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            where = f"{path}:{number}"
            read_entry(jsonl.parse(line, where), where)


class Conversation:
    """A person's messages and the answers of each side.

    The conversation continues with the preferred reply, or with the first reply if there is no preference.
    """

    def __init__(self, sides: Sequence[Side], output: Path, lock: Lock, options: dict[str, Any]) -> None:
        """output: file to append rows to. lock: held while a side answers. options: for transformers' `generate`."""
        self.sides, self.output = sides, output
        self.messages: list[Message] = []
        self.remarks: list[str] = []
        """`Writer.remark` of each of the last replies."""
        self._lock, self._options = lock, options
        self._replies: Sequence[Message] = ()
        """Replies to the last message, until one is preferred."""

    def ask(self, text: str, shows: Sequence[Callable[[str], object]]) -> list[str]:
        """The reply of each side; empty for a message that restarts the conversation.
        shows: for each side, a function that gets the reply piece by piece.

        Raises:
            ConfigError: the conversation is too long for a model. The conversation is unchanged.
            DataError: the text has half a surrogate pair.
        """
        if is_reset(text):
            self.reset()
            return []
        jsonl.check_text(text, "the message")
        before, texts, replies = self.messages, list[str](), list[Message]()
        self.remarks = []
        previous, self._replies = self._replies, ()  # no preferences while the next replies are generated
        try:
            with self._lock:
                for side, show in zip(self.sides, shows, strict=True):
                    side.talk.messages = [*before]
                    texts.append(side.talk.answer(text, side.talk.streamer(show), **self._options))
                    replies.append(side.talk.messages[-1])
                    self.remarks.append(side.talk.remark)
        except BaseException as error:
            self._replies = previous
            if isinstance(error, ConversationTooLong):
                raise ConfigError(f"{error} {RESET} restarts it.") from None
            raise
        self.messages = [*before, Message("user", text), replies[0]]
        self._replies = replies
        return texts

    def reset(self) -> None:
        """Restart the conversation."""
        self.messages, self._replies = [], ()

    def prefer(self, number: int) -> None:
        """Save that reply `number` to the last message is the best, and continue with it.
        The row is on disk when this returns.

        Raises:
            ConfigError: there already is a preference, or all replies are equal.
            RunError: the row cannot be written. The conversation is unchanged.
        """
        if len({(reply.content, reply.reasoning) for reply in self._replies}) < 2:
            raise ConfigError("no replies to compare. Send another message.")
        replies = [
            {**reply.raw, "rank": int(place != number), "by": side.name}
            for place, (reply, side) in enumerate(zip(self._replies, self.sides, strict=True))
        ]
        for reply in replies:
            del reply["role"]
        prompt = [message.raw for message in self.messages[:-1]]
        with jsonl_records.open_locked(self.output, mend=False) as records:
            records.append({"messages": prompt, "replies": replies}, ensure_ascii=False)
        self.messages = [*self.messages[:-1], self._replies[number]]
        self._replies = ()
