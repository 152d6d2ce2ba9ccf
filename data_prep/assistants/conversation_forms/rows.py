"""Shared code of all forms: columns of rows, messages, and random choices that depend only on the row."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, TypeVar

from src.errors import DataError
from src.experiments.config import Config, describe_value, nearest_text, unknown_text
from src.systems.assistants.conversations.choices import draws
from src.systems.assistants.conversations.entries import LINKS, REASONING

Row = dict[str, Any]
T = TypeVar("T")
SPLIT_NAME = "split_name"
"""Column added to every row: the name of its split on the hub, or of its file."""
CHANGES = ("joined", "removed", "shortened")
"""Kinds of changes to a conversation.
`add_change` counts them in a message; preparation sums the counts and removes them from the row."""
_ALMOST_EQUAL = 0.85
"""Least ratio of difflib between a column and the name that it probably misspells: "prompts", not "prompt_id"."""
_CHANGE = "\0"
"""Prefix of the keys of these counts; no key of a published message starts with it."""
ROLES: Mapping[str, str] = {
    "human": "user", "user": "user", "prompter": "user",
    "gpt": "assistant", "assistant": "assistant", "chatgpt": "assistant",
    "function_call": "assistant", "system": "system", "observation": "tool", "tool": "tool", "function": "tool",
}  # fmt: skip
"""{role of a message in a release: role in prepared rows}. human, gpt and chatgpt: exports of ShareGPT; function_call
and observation: ShareGPT's layout with tools; prompter: Open-Assistant; function: messages of OpenAI before tools."""


class Form(Config):
    """Layout of published conversations or preferences; its fields are options of entries in resources/conversations.

    src/systems/assistants/conversations/entries.py describes prepared rows.
    """

    def read(self, row: Row, where: str) -> Iterator[Row]:
        """Convert a row of the release to prepared rows. With `group_by` the row is {"rows": the rows of one group}.

        Raises:
            DataError: the row has another layout; names `where`.
        """
        raise NotImplementedError


def pick(choices: Sequence[T], *key: object) -> T:
    """Choose an item that depends only on `key`, so every machine makes the same choice for a row."""
    parts = [
        {name: part[name] for name in part if name != SPLIT_NAME} if isinstance(part, dict) else part for part in key
    ]
    return draws("release", *(json.dumps(part, sort_keys=True, default=str) for part in parts)).choice(choices)


def rows_of(row: Row) -> list[Row]:
    """Rows of a group; [row] if it is not a group."""
    rows = row.get("rows")
    return rows if isinstance(rows, list) and set(row) == {"rows"} else [row]


def column(row: Row, name: str, where: str, *others: str) -> Any:
    """The value of a column, or of the first of `others` if it is missing or null.

    Raises:
        DataError: they are all missing or null.
    """
    existing = [each for each in (name, *others) if each in row]
    value = next((row[each] for each in existing if row[each] is not None), None)
    if value is None and existing:
        raise DataError(f"{where}: column {existing[0]!r}: null. Fill it, or remove the row.")
    if value is None:
        raise missing_column(row, name, where, *others)
    return value


def column_if_any(row: Row, name: str, where: str, *others: str) -> Any:
    """Like `column`; None if a row has none of the columns.

    Raises:
        DataError: another column has almost the same name.
    """
    existing = [each.lower() for each in row]
    if not any(each in row for each in (name, *others)) and any(
        get_close_matches(each, existing, n=1, cutoff=_ALMOST_EQUAL) for each in (name, *others)
    ):
        raise missing_column(row, name, where, *others)
    return next((row[each] for each in (name, *others) if row.get(each) is not None), None)


def missing_column(row: Row, name: str, where: str, *others: str) -> DataError:
    """Error that names the missing columns, the existing ones, and the nearest of these.
    Only a row of a source, which has `SPLIT_NAME`, has columns that --columns can rename; an object in it has keys."""
    existing = [each for each in row if each != SPLIT_NAME]
    names = " or ".join(map(repr, (name, *others)))
    text = f"{names}.{nearest_text((name, *others), existing)} It has: {', '.join(existing) or 'none'}."
    if SPLIT_NAME not in row:
        return DataError(f"{where}: no key {text}")
    return DataError(f"{where}: no column {text} --columns {name}=COLUMN names another.")


def text_of(row: Row, name: str, where: str) -> str:
    """The text in a column."""
    value = column(row, name, where)
    if not isinstance(value, str):
        raise DataError(f"{where}: column {name!r}: expected text, got {type(value).__name__}.")
    return value


def number_of(row: Row, name: str, where: str) -> float:
    """The finite number in a column."""
    value = column(row, name, where)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise DataError(f"{where}: column {name!r}: expected a finite number, got {describe_value(value)}.")
    return float(value)


def texts_of(row: Row, name: str, where: str) -> list[str]:
    """The list of texts in a column."""
    return _list_of(row, name, where, str, "texts")


def objects_of(row: Row, name: str, where: str) -> list[Row]:
    """The list of objects in a column."""
    return _list_of(row, name, where, dict, "objects")


def _list_of(row: Row, name: str, where: str, kind: type[T], noun: str) -> list[T]:
    value = column(row, name, where)
    wrong = value if not isinstance(value, list) else next((each for each in value if not isinstance(each, kind)), None)
    if not isinstance(value, list) or not all(isinstance(each, kind) for each in value):
        raise DataError(
            f"{where}: column {name!r}: expected a list of {noun}, got {str(wrong)[:60]!r} ({type(wrong).__name__})."
        )
    return value


def messages_of(value: Any, where: str, role: str = "user") -> list[Row]:
    """Convert a text, which gets `role`, a message or a list of messages to messages.
    Consecutive messages of one role are joined by a line break. where: place of `value`.

    Raises:
        DataError: a message has no text, or an unknown role; names its index.
    """
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    messages = list[Row]()
    for place, message in enumerate(value if isinstance(value, list) else [value]):
        here = f"{where}[{place}]" if isinstance(value, list) else where
        if not isinstance(message, dict):
            raise DataError(f"{here}: expected a message with role and content, got {describe_value(message)}.")
        speaker, calls = column(message, "role", here, "from"), message.get("tool_calls")
        if not calls and message.get("function_call"):  # OpenAI's before tools
            calls = [{"type": "function", "function": message["function_call"]}]
        if not isinstance(speaker, str) or speaker not in ROLES:
            raise DataError(f"{here}: {unknown_text('role', str(speaker), ROLES)}")
        if ROLES[speaker] == "assistant" and message.get("weight") == 0:
            raise DataError(f"{here}: weight 0: an answer that is not to be learned. Remove it, or the row.")
        has_text = any(message.get(name) is not None for name in ("content", "value"))
        text = "" if calls and not has_text else column(message, "content", here, "value")
        if not isinstance(text, str):
            raise DataError(f"{here}: content: expected text, got {describe_value(text)}.")
        add_message(
            messages, ROLES[speaker], text, calls, {**reasoning_of(message), **_links_of(message, ROLES[speaker])}
        )
    return messages


def with_system(row: Row, messages: list[Row], where: str) -> list[Row]:
    """The messages, after the text of column "system" or "system_prompt" if they do not begin with a system message."""
    text = column_if_any(row, "system", where, "system_prompt") or ""
    if not isinstance(text, str):
        raise DataError(f"{where}: column 'system': expected text, got {type(text).__name__}.")
    if not text or (messages and messages[0]["role"] == "system"):
        return messages
    return [{"role": "system", "content": text}, *messages]


def reasoning_of(message: Row) -> Row:
    """The reasoning of a message under its key; empty without reasoning."""
    return {name: message[name] for name in REASONING if message.get(name)}


def _links_of(message: Row, role: str) -> Row:
    """Keys that link a tool result to its call."""
    return {name: message[name] for name in LINKS if role == "tool" and message.get(name)}


def add_message(
    messages: list[Row], role: str, text: str, calls: Any = None, more: Mapping[str, Any] | None = None
) -> None:
    """Append a message, or join it to the last one if both have the same role and only text.
    calls: tool calls. more: additional keys."""
    last = messages[-1] if messages else {}
    if last.get("role") == role and role != "tool" and not calls and not more and "tool_calls" not in last:
        last["content"] += f"\n{text}"
        add_change(last, "joined")
    else:
        messages.append({"role": role, "content": text, **({"tool_calls": calls} if calls else {}), **(more or {})})


def alternate(texts: Sequence[str]) -> list[Row]:
    """Turn texts into messages that alternate between user and assistant."""
    return [{"role": ("user", "assistant")[place % 2], "content": text} for place, text in enumerate(texts)]


def up_to_last_answer(messages: list[Row]) -> list[Row]:
    """Drop the messages after the last answer, and count them as removed."""
    end = max((place for place, message in enumerate(messages, 1) if message["role"] == "assistant"), default=0)
    if 0 < end < len(messages):
        add_change(messages[end - 1], "removed", len(messages) - end)
    return messages[:end]


def up_to_length(message: Row, characters: int) -> Row:
    """Truncate a message to `characters`, and count that as shortened."""
    if len(message["content"]) > characters:
        message = {**message, "content": message["content"][:characters]}
        add_change(message, "shortened")
    return message


def add_change(message: Row, change: str, count: int = 1) -> None:
    """Increase the count of a change, one of `CHANGES`, in a message."""
    message[_CHANGE + change] = message.get(_CHANGE + change, 0) + count


def changes_of(message: Row) -> Row:
    """The change counts of a message, by key."""
    return {key: count for key, count in message.items() if key.startswith(_CHANGE)}


def pop_change(message: Row, change: str) -> int:
    """Remove a change count from a message, and return it."""
    return message.pop(_CHANGE + change, 0)


def contradicts_itself(row: Row) -> bool:
    """Whether two equal replies of a prepared row have different ranks."""
    replies = row.get("replies")
    dicts = [each for each in replies if isinstance(each, dict)] if isinstance(replies, list) else []
    pairs = {(str((each.get("content"), reasoning_of(each))), str(each.get("rank"))) for each in dicts}
    return len({reply for reply, _ in pairs}) < len(pairs)


def rank_replies(scores: Mapping[str, float]) -> list[Row]:
    """Rank replies, best first. Equal scores are ties. scores: {reply: score}; higher is better."""
    steps = sorted(set(scores.values()), reverse=True)
    contents_by_score = sorted(scores, key=lambda content: -scores[content])  # stable
    return [{"content": content, "rank": steps.index(scores[content])} for content in contents_by_score]
