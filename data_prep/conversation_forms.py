"""The layouts in which conversations and preferences are released, each as a function from a row to rows of ours.

A row of ours is as src/data/conversations/entries.py describes it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from src.errors import DataError

Row = dict[str, Any]
_ROLES = {
    "human": "user", "user": "user", "prompter": "user", "gpt": "assistant", "assistant": "assistant", "chatgpt": "assistant",
    "bot": "assistant", "function_call": "assistant", "system": "system", "observation": "tool", "tool": "tool", "function": "tool",
}  # fmt: skip
_LABELS = ("quality", "humor", "creativity")


@dataclass(frozen=True)
class Options:
    """What the forms of Open-Assistant's trees heed."""

    languages: Sequence[str] = ("en",)
    top_k: int | None = None
    """Replies of a rank below it are gone on with; None: all."""
    synthetic: bool = False
    """Whether messages that a model has written are read."""


Form = Callable[[Row, str, Options], Iterator[Row]]
"""(row, where, options) -> rows. Raises DataError, which names `where`, where the row is of another layout."""


def read_messages(row: Row, where: str, options: Options) -> Iterator[Row]:
    """{"messages": [{"role", "content"}]}, or {"conversations": [{"from", "value"}]} as ShareGPT has it.

    Messages of one speaker that follow each other are joined by an end of line; what a person says last, without an answer, is left out.
    """
    talk = _talk(row.get("messages", row.get("conversations")), where)
    while talk and talk[-1]["role"] != "assistant":
        talk.pop()
    if talk:
        yield {"messages": talk}


def read_completion(row: Row, where: str, options: Options) -> Iterator[Row]:
    """{"prompt", "completion"}, of text or of messages."""
    yield {"messages": [*_talk(_column(row, "prompt", where), where), *_talk(_column(row, "completion", where), where, "assistant")]}


def read_alpaca(row: Row, where: str, options: Options) -> Iterator[Row]:
    """{"instruction", "input", "output"}: the input, if there is one, stands below the instruction."""
    asked = "\n".join(part for part in (_text(row, "instruction", where), str(row.get("input") or "")) if part)
    system = [{"role": "system", "content": row["system"]}] if row.get("system") else []
    talk = [*system, {"role": "user", "content": asked}, {"role": "assistant", "content": _text(row, "output", where)}]
    yield {"messages": talk}


def read_pair(row: Row, where: str, options: Options) -> Iterator[Row]:
    """{"chosen", "rejected"} with {"prompt"} or {"conversations"}: each of text, of a message, or of a conversation whose last message is
    the reply, as hh-rlhf has it."""
    chosen, rejected = (_talk(_column(row, name, where), where, "assistant") for name in ("chosen", "rejected"))
    given = row.get("prompt", row.get("conversations"))
    asked = chosen[:-1] if given is None else _talk(given, where)
    if given is None and rejected[:-1] != asked:
        return  # they answer different conversations
    replies = [{"content": talk[-1]["content"], "rank": rank} for rank, talk in enumerate((chosen, rejected))]
    if replies[0]["content"] != replies[1]["content"]:
        yield {"messages": asked, "replies": replies}


def read_ranked(row: Row, where: str, options: Options) -> Iterator[Row]:
    """{"messages", "replies"}: rows as they are trained on, such as `src.serving.page` writes of what a person prefers."""
    yield {name: _column(row, name, where) for name in ("messages", "replies")}


def read_tree(row: Row, where: str, options: Options) -> Iterator[Row]:
    """A tree of Open-Assistant: the threads from its prompt to each last answer."""
    for thread in _threads(_prompt(row, where, options), options):
        while thread and thread[-1]["role"] != "assistant":
            thread = thread[:-1]
        if thread:
            yield {"messages": [_message(each) for each in thread]}


def read_ranked_tree(row: Row, where: str, options: Options) -> Iterator[Row]:
    """A tree of Open-Assistant: each message of a person with the ranked replies to it."""

    def walk(thread: list[Row]) -> Iterator[Row]:
        ranked = [reply for reply in thread[-1].get("replies") or () if type(reply.get("rank")) is int and _is_read(reply, options)]
        if thread[-1]["role"] != "assistant" and len(ranked) > 1:
            replies = [{**_message(reply), "rank": reply["rank"]} for reply in ranked]
            for reply in replies:
                del reply["role"]
            yield {"messages": [_message(each) for each in thread], "replies": replies}
        for reply in _good(thread[-1], options):
            yield from walk([*thread, reply])

    for prompt in _prompt(row, where, options):
        yield from walk([prompt])


FORMS: Mapping[str, Form] = {
    "messages": read_messages,
    "completion": read_completion,
    "alpaca": read_alpaca,
    "pairs": read_pair,
    "ranked": read_ranked,
    "oasst": read_tree,
    "oasst_ranked": read_ranked_tree,
}


def _prompt(row: Row, where: str, options: Options) -> list[Row]:
    """The prompt of a tree that is finished, was found good, and is in one of the languages; else none."""
    prompt = _column(row, "prompt", where)
    good = row.get("tree_state") == "ready_for_export" and prompt.get("review_result") and prompt.get("lang") in options.languages
    return [{**prompt, "role": "user"}] if good and _is_read(prompt, options) else []


def _is_read(message: Row, options: Options) -> bool:
    return not message.get("deleted") and (options.synthetic or not message.get("synthetic"))


def _good(message: Row, options: Options) -> list[Row]:
    """The replies to a message that are gone on with."""
    replies = [{**reply, "role": _ROLES.get(reply.get("role", ""), "")} for reply in message.get("replies") or ()]
    good = [reply for reply in replies if _is_read(reply, options)]
    if options.top_k is None or message["role"] == "assistant":
        return good
    only = len(replies) == 1
    return [each for each in good if (only if each.get("rank") is None else each["rank"] < options.top_k)]


def _threads(prompts: Sequence[Row], options: Options) -> Iterator[list[Row]]:
    """From the prompt to each leaf. Of several that a person says after one answer and nobody has answered, the first counts."""

    def walk(thread: list[Row]) -> Iterator[list[Row]]:
        found = _good(thread[-1], options)
        leaves = [reply for reply in found if not _good(reply, options)]
        if thread[-1]["role"] == "assistant":  # their threads end with it: once
            found = [reply for reply in found if reply not in leaves] or leaves[:1]
        if not found:
            yield thread
        for reply in found:
            yield from walk([*thread, reply])

    for prompt in prompts:
        yield from walk([prompt])


def _message(message: Row) -> Row:
    labels = message.get("labels") or {}
    told = {name: labels[name]["value"] for name in _LABELS if isinstance(labels.get(name), dict) and labels[name].get("value") is not None}
    lang = {"lang": message["lang"]} if message.get("lang") else {}
    return {"role": message["role"] if message["role"] in ("user", "assistant") else _ROLES.get(message["role"], "user"),
            "content": message["text"], **lang, **told}  # fmt: skip


def _talk(value: Any, where: str, role: str = "user") -> list[Row]:
    """Messages of a text, which is of `role`, of a message, or of a list of messages."""
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    found = list[Row]()
    for message in [value] if isinstance(value, dict) else value if isinstance(value, list) else [None]:
        speaker = message.get("role", message.get("from")) if isinstance(message, dict) else None
        text = message.get("content", message.get("value")) if isinstance(message, dict) else None
        if speaker not in _ROLES or not isinstance(text, str):
            raise DataError(f"{where}: expected messages with role and content, or from and value; got {str(message)[:80]!r}.")
        if found and found[-1]["role"] == _ROLES[speaker]:
            found[-1]["content"] += f"\n{text}"
        else:
            found.append({"role": _ROLES[speaker], "content": text})
    return found


def _column(row: Row, name: str, where: str) -> Any:
    if row.get(name) is None:
        raise DataError(f"{where}: no column {name!r}. It has: {', '.join(row) or 'none'}. --columns {name}=COLUMN names another.")
    return row[name]


def _text(row: Row, name: str, where: str) -> str:
    value = _column(row, name, where)
    if not isinstance(value, str):
        raise DataError(f"{where}: column {name!r}: expected text, got {type(value).__name__}.")
    return value
