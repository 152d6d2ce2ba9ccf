"""Conversations and ranked replies as rows of JSON, and what makes a row a good one.

{"messages": [{"role": "user", "content": "What is 2 + 3?"}, {"role": "assistant", "content": "5"}]}
{"messages": [...], "replies": [{"content": "5", "rank": 0}, {"content": "six", "rank": 1}]}
{"prompt": [{"role": "user", "content": "What is 2 + 3?"}]}
{"text": "Plain text."}

Roles: system (first, at most once), user, assistant, and tool, whose messages follow an assistant's. A message may tell "lang", "quality",
"humor", "creativity" (0 to 1) and "context" about itself. Ranks: smaller is better, and equal ranks are a tie.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from src.data.jsonl import check_text
from src.errors import DataError

ROLES = ("system", "user", "assistant", "tool")
SHARES = ("quality", "humor", "creativity")
TAGS = ("lang", *SHARES, "context")
_AFTER = {"": ("system", "user"), "system": ("user",), "user": ("assistant",), "assistant": ("user", "tool"), "tool": ("assistant", "tool")}


@dataclass(frozen=True)
class Message:
    """What one side says."""

    role: str
    content: str
    tags: Mapping[str, str | float] = field(default_factory=dict)
    """What the row tells of it, by the names in `TAGS`."""


@dataclass(frozen=True)
class Reply:
    """One of several answers to a conversation."""

    content: str
    rank: int
    tags: Mapping[str, str | float] = field(default_factory=dict)

    @property
    def message(self) -> Message:
        return Message("assistant", self.content, self.tags)


@dataclass(frozen=True)
class Entry:
    """A row."""

    messages: Sequence[Message] = ()
    replies: Sequence[Reply] = ()
    """To the last of the messages, which is not an assistant's."""
    text: str | None = None
    is_prompt: bool = False
    """Whether the messages have no answer, and are there to be answered by a policy."""

    @property
    def conversation(self) -> Sequence[Message]:
        """The messages; with the best of the replies, the first of several, if there are some."""
        return [*self.messages, min(self.replies, key=lambda reply: reply.rank).message] if self.replies else self.messages


def check_row(row: dict[str, Any], where: str) -> None:
    """Raises DataError, which names `where`, for a row that is no entry."""
    read_entry(row, where)


def read_entry(row: Mapping[str, Any], where: str) -> Entry:
    """The entry of a row.

    Raises:
        DataError: it is none; says what is wrong, after `where`.
    """
    if "text" in row:
        if row.keys() & {"messages", "replies"}:
            raise DataError(f"{where}: expected either text or messages, got both.")
        if not row["text"]:
            raise DataError(f"{where}: text: empty, so there is nothing to learn.")
        return Entry(text=_text(row["text"], f"{where}: text"))
    name = "prompt" if "prompt" in row else "messages"
    if not isinstance(row.get(name), list):
        raise DataError(f"{where}: expected a list of messages, or a text; the row has {', '.join(row) or 'nothing'}.")
    messages = [_message(raw, f"{where}: {name}[{i}]") for i, raw in enumerate(row[name])]
    replies = row.get("replies")
    if name == "prompt" and row.keys() & {"messages", "replies"}:
        raise DataError(f"{where}: expected either a prompt, or messages, got both.")
    _check_roles(
        [message.role for message in messages], where, "an answer" if name == "prompt" else "replies" if replies is not None else ""
    )
    if replies is None:
        return Entry(messages, is_prompt=name == "prompt")
    if not isinstance(replies, list) or not replies:
        raise DataError(f"{where}: replies: expected a list of at least one reply.")
    found = [_reply(raw, f"{where}: replies[{i}]") for i, raw in enumerate(replies)]
    ranks: dict[str, tuple[int, int]] = {}
    for place, reply in enumerate(found):
        other, rank = ranks.setdefault(reply.content, (place, reply.rank))
        if rank != reply.rank:
            raise DataError(
                f"{where}: replies[{other}] and replies[{place}] say the same, with ranks {rank} and {reply.rank}. Leave one out."
            )
    return Entry(messages, found)


def _check_roles(roles: Sequence[str], where: str, missing: str) -> None:
    """missing: what comes behind the messages, "" where they are all."""
    before = ""
    for place, role in enumerate(roles):
        if role not in _AFTER[before]:
            wanted, after = " or ".join(_AFTER[before]), f"after {before}" if before else "first"
            raise DataError(f"{where}: messages[{place}]: roles do not alternate: expected {wanted} {after}, got {role}.")
        before = role
    if (missing and before in ("assistant", "system")) or (missing == "an answer" and not roles):
        raise DataError(f"{where}: the messages before {missing} end with {before or 'nothing'}. Expected what is answered: user or tool.")
    if not missing and "assistant" not in roles:
        raise DataError(f"{where}: no message is the assistant's, so there is nothing to learn.")


def _message(raw: Any, where: str) -> Message:
    if not isinstance(raw, dict):
        raise DataError(f"{where}: expected an object with role and content, got {type(raw).__name__}.")
    if raw.get("role") not in ROLES:
        raise DataError(f"{where}: role: expected one of {', '.join(ROLES)}, got {raw.get('role')!r}.")
    return Message(raw["role"], _text(raw.get("content"), f"{where}: content"), _tags(raw, where))


def _reply(raw: Any, where: str) -> Reply:
    if not isinstance(raw, dict):
        raise DataError(f"{where}: expected an object with content and rank, got {type(raw).__name__}.")
    rank = raw.get("rank")
    if type(rank) is not int:
        raise DataError(f"{where}: rank: expected a whole number, smaller for what is better, got {rank!r}.")
    return Reply(_text(raw.get("content"), f"{where}: content"), rank, _tags(raw, where))


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise DataError(f"{where}: expected text, got {value!r:.60} ({type(value).__name__}).")
    check_text(value, where)
    return value


def _tags(raw: Mapping[str, Any], where: str) -> dict[str, str | float]:
    found = dict[str, str | float]()
    for name in TAGS:
        value = raw.get(name)
        if value is None:
            continue
        if name not in SHARES:
            found[name] = _text(value, f"{where}: {name}")
        elif isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
            raise DataError(f"{where}: {name}: expected a number between 0 and 1, got {value!r}.")
        else:
            found[name] = float(value)
    return found
