"""Conversations and ranked replies as JSON rows, and their validation.

{"messages": [{"role": "user", "content": "2 + 3?"}, {"role": "assistant", "content": "5"}]}
{"messages": [...], "replies": [{"content": "5", "rank": 0}, {"content": "six", "rank": 1}]}
{"prompt": [{"role": "user", "content": "2 + 3?"}], "answer": "5"}
{"messages": [..., {"role": "assistant", "content": null, "tool_calls": [...]}, {"role": "tool", "content": "5"}, ...],
"tools": [...]} {"text": "Plain text."}

A tool call is {"name", "arguments"}, or {"function": {"name", "arguments"}}. Arguments and tools are JSON, or a string
of JSON. An answer can have reasoning as "reasoning_content", "thinking" or "reasoning".

Roles: system (first, at most once), user, assistant, and tool after an assistant. A message can have "lang", "quality",
"humor", "creativity" (0 to 1) and "context". Ranks: smaller is better, equal ranks are a tie. A row that ends with an
answer can have "label", true or false, for data `labeled_replies`. Rewards can read the other keys.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from src.data.jsonl import check_text
from src.errors import DataError
from src.experiments.config import describe_value, nearest_text, unknown_text
from src.support.parsing import parse_json

ROLES = ("system", "user", "assistant", "tool")
_LARGEST_SCORE = 1e30
"""Maximum absolute score: scores are float32 in the loss."""
SHARES = ("quality", "humor", "creativity")
TAGS = ("lang", *SHARES, "context")
LINKS = ("name", "tool_call_id")
"""Keys by which a tool's result refers to its call."""
REASONING = ("reasoning_content", "thinking", "reasoning")
"""Keys of the reasoning before an answer; templates differ in which one they read."""
_AFTER = {
    "": ("system", "user"),
    "system": ("user",),
    "user": ("assistant",),
    "assistant": ("user", "tool"),
    "tool": ("assistant", "tool"),
}


@dataclass(frozen=True)
class Message:
    """One message."""

    role: str
    content: str
    tags: Mapping[str, str | float] = field(default_factory=dict)
    """Properties by their names in `TAGS`."""
    calls: Sequence[Mapping[str, Any]] = ()
    """Tool calls of the assistant, {"name", "arguments"} each."""
    tools: Sequence[Mapping[str, Any]] = ()
    """Tools of the conversation; only on its first message."""
    reasoning: str = ""
    """Reasoning of the assistant before its answer."""
    links: Mapping[str, str] = field(default_factory=dict)
    """Values of the keys in `LINKS`, on a tool's message."""
    call_ids: Sequence[str] = ()
    """Id of each call, or ""."""

    @property
    def full_text(self) -> str:
        """The content and each tool call as a line of JSON."""
        return "\n".join([*([self.content] if self.content or not self.calls else []), *map(json_line, self.calls)])

    @property
    def raw(self) -> dict[str, Any]:
        """The JSON object of the message, as `read_message` reads it, without tags."""
        reasoning: dict[str, Any] = {REASONING[0]: self.reasoning} if self.reasoning else {}
        ids = [*self.call_ids, *[""] * len(self.calls)]
        calls = [
            {**({"id": name} if name else {}), "type": "function", "function": dict(call)}
            for name, call in zip(ids, self.calls, strict=False)
        ]
        return {
            "role": self.role,
            "content": self.content,
            **self.links,
            **reasoning,
            **({"tool_calls": calls} if calls else {}),
        }


@dataclass(frozen=True)
class Reply:
    """One of several answers to a conversation."""

    content: str
    rank: int
    tags: Mapping[str, str | float] = field(default_factory=dict)
    reasoning: str = ""
    score: float | None = None
    """Quality in any unit. The difference of two scores can be the margin of a pair."""

    @property
    def message(self) -> Message:
        return Message("assistant", self.content, self.tags, reasoning=self.reasoning)


@dataclass(frozen=True)
class Entry:
    """A parsed row."""

    messages: Sequence[Message] = ()
    replies: Sequence[Reply] = ()
    """Replies to the last message, which is not the assistant's."""
    text: str | None = None
    is_prompt: bool = False
    """Whether the messages are a prompt without an answer, for a policy."""

    @property
    def conversation(self) -> Sequence[Message]:
        """The messages, with the first of the best replies appended if there are replies."""
        return (
            [*self.messages, min(self.replies, key=lambda reply: reply.rank).message] if self.replies else self.messages
        )


def check_row(row: dict[str, Any], where: str) -> None:
    """Raises DataError, with `where`, for an invalid row."""
    read_entry(row, where)


def read_entry(row: Mapping[str, Any], where: str) -> Entry:
    """Parse a row.

    Raises:
        DataError: the row is invalid; reports `where` and the field.
    """
    if "text" in row:
        if row.keys() & {"messages", "replies"}:
            raise DataError(f"{where}: expected either text or messages, got both.")
        text = _text(row["text"], f"{where}: text")
        if not text.strip():
            raise DataError(f"{where}: text: empty. Remove the row.")
        return Entry(text=text)
    name = "prompt" if "prompt" in row else "messages"
    if not isinstance(row.get(name), list):
        if name in row:
            raise DataError(f"{where}: {name}: expected a list of messages, got {describe_value(row[name])}.")
        hint = nearest_text(("messages", "prompt", "text"), row)
        raise DataError(f"{where}: expected messages, prompt or text, got the keys {', '.join(row) or '(none)'}.{hint}")
    messages = [read_message(raw, f"{where}: {name}[{i}]") for i, raw in enumerate(row[name])]
    replies = row.get("replies")
    if name == "prompt" and row.keys() & {"messages", "replies"}:
        raise DataError(f"{where}: expected either a prompt or messages, got both.")
    if messages and (tools := _objects(row.get("tools"), f"{where}: tools")):
        messages[0] = replace(messages[0], tools=tools)
    _check_roles(
        [message.role for message in messages],
        where,
        "an answer" if name == "prompt" else "replies" if replies is not None else "",
    )
    if replies is None:
        return Entry(messages, is_prompt=name == "prompt")
    if not isinstance(replies, list) or not replies:
        raise DataError(f"{where}: replies: expected a list of at least one reply.")
    parsed = [_reply(raw, f"{where}: replies[{i}]") for i, raw in enumerate(replies)]
    ranks: dict[tuple[str, str], tuple[int, int]] = {}
    for place, reply in enumerate(parsed):
        other, rank = ranks.setdefault((reply.content, reply.reasoning), (place, reply.rank))
        if rank != reply.rank:
            raise DataError(
                f"{where}: replies[{other}] and replies[{place}] are equal but have ranks {rank} and {reply.rank}. "
                "Remove one."
            )
    return Entry(messages, parsed)


def _check_roles(roles: Sequence[str], where: str, missing: str) -> None:
    """Require alternating roles. missing: the part of the row that follows the messages, or ""."""
    before = ""
    for place, role in enumerate(roles):
        if role not in _AFTER[before]:
            expected, after = " or ".join(_AFTER[before]), f"after {before}" if before else "first"
            raise DataError(
                f"{where}: messages[{place}]: roles do not alternate: expected {expected} {after}, got {role}."
            )
        before = role
    if (missing and before in ("assistant", "system")) or (missing == "an answer" and not roles):
        raise DataError(
            f"{where}: the messages before {missing} end with {before or 'nothing'}. Expected user or tool."
        )
    if not missing and "assistant" not in roles:
        raise DataError(f"{where}: no message of the assistant, so there is nothing to learn. Remove the row.")


def read_message(raw: Any, where: str) -> Message:
    """Parse an object with role and content.

    Raises:
        DataError: a field is invalid; reports `where` and the field.
    """
    if not isinstance(raw, dict):
        raise DataError(f"{where}: expected an object with role and content, got {type(raw).__name__}.")
    _require_key(raw, "role", where)
    if raw["role"] not in ROLES:
        raise DataError(f"{where}: {unknown_text('role', str(raw['role']), ROLES)}")
    raw_calls = _objects(raw.get("tool_calls"), f"{where}: tool_calls")
    calls = [_call(each, f"{where}: tool_calls") for each in raw_calls]
    if calls and raw["role"] != "assistant":
        raise DataError(f"{where}: tool_calls: only the assistant calls tools, not {raw['role']}.")
    if not calls:
        _require_key(raw, "content", where)
    content = "" if calls and raw.get("content") is None else _text(raw.get("content"), f"{where}: content")
    reasoning = _reasoning(raw, where)
    if reasoning and raw["role"] != "assistant":
        raise DataError(f"{where}: only the assistant has reasoning, not {raw['role']}. Remove it.")
    links = {name: _text(raw[name], f"{where}: {name}") for name in LINKS if raw["role"] == "tool" and raw.get(name)}
    ids = [str(each.get("id") or "") for each in raw_calls]
    return Message(raw["role"], content, _tags(raw, where), calls, reasoning=reasoning, links=links, call_ids=ids)


def _reasoning(raw: Mapping[str, Any], where: str) -> str:
    """The reasoning of an answer under any of its keys, or ""."""
    texts = {name: _text(raw[name], f"{where}: {name}") for name in REASONING if raw.get(name) is not None}
    if len({*texts.values()} - {""}) > 1:
        raise DataError(f"{where}: {' and '.join(texts)} differ. Remove one.")
    return next((text for text in texts.values() if text), "")


def json_line(value: Any) -> str:
    """JSON as templates write it: non-ASCII letters are not escaped."""
    return json.dumps(value, ensure_ascii=False)


def _objects(raw: Any, where: str) -> list[dict[str, Any]]:
    """Parse a list of objects, given as a list, as JSON text or as None."""
    value = _parse_json(raw, where) if isinstance(raw, str) else raw
    if value is not None and not (isinstance(value, list) and all(isinstance(each, dict) for each in value)):
        raise DataError(f"{where}: expected a list of objects, got {raw!r:.60} ({type(raw).__name__}).")
    check_strings(value, where)
    return value or []


def check_strings(value: Any, where: str) -> None:
    """Raises DataError if a string in a JSON value cannot be encoded or contains NUL."""
    if isinstance(value, str):
        _text(value, where)
    for part in [*value, *value.values()] if isinstance(value, dict) else value if isinstance(value, list) else ():
        check_strings(part, where)


def _call(raw: Mapping[str, Any], where: str) -> dict[str, Any]:
    """{"name", "arguments"} of a call in either form."""
    function = raw.get("function", raw)
    name, value = (function.get("name"), function.get("arguments", {})) if isinstance(function, dict) else (None, {})
    arguments = _parse_json(value, f"{where}: arguments") if isinstance(value, str) else value
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise DataError(f"{where}: expected the name of a tool and its arguments as an object, got {raw!r:.80}.")
    check_strings(arguments, f"{where}: arguments")
    return {"name": name, "arguments": arguments}


def _parse_json(text: str, where: str) -> Any:
    try:
        return parse_json(text, where, DataError) if text.strip() else None
    except DataError:
        raise DataError(f"{where}: expected JSON, got {text!r:.60}.") from None


def _reply(raw: Any, where: str) -> Reply:
    if not isinstance(raw, dict):
        raise DataError(f"{where}: expected an object with content and rank, got {type(raw).__name__}.")
    for name in ("content", "rank"):
        _require_key(raw, name, where)
    rank = raw["rank"]
    if type(rank) is not int:
        raise DataError(f"{where}: rank: expected an integer, smaller for better replies, got {rank!r}.")
    score = raw.get("score")
    if score is not None and (
        isinstance(score, bool) or not isinstance(score, int | float) or not abs(score) < _LARGEST_SCORE
    ):
        raise DataError(f"{where}: score: expected a number below {_LARGEST_SCORE:g}, got {score!r:.60}.")
    return Reply(_text(raw.get("content"), f"{where}: content"), rank, _tags(raw, where), _reasoning(raw, where), score)


def _require_key(raw: Mapping[str, Any], name: str, where: str) -> None:
    if name not in raw:
        raise DataError(f"{where}: no key {name!r}.{nearest_text([name], raw)} It has: {', '.join(raw) or 'none'}.")


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise DataError(f"{where}: expected text, got {value!r:.60} ({type(value).__name__}).")
    check_text(value, where)
    if "\0" in value:
        raise DataError(f"{where}: NUL (U+0000) at character {value.index(chr(0))}. Remove it from the text.")
    return value


def _tags(raw: Mapping[str, Any], where: str) -> dict[str, str | float]:
    tags = dict[str, str | float]()
    for name in TAGS:
        value = raw.get(name)
        if value is None:
            continue
        if name not in SHARES:
            tags[name] = _text(value, f"{where}: {name}")
        elif isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
            raise DataError(f"{where}: {name}: expected a number between 0 and 1, got {value!r}.")
        else:
            tags[name] = float(value)
    return tags
