"""Threads and human rankings of Open-Assistant's message trees.

A row is a tree, {"tree_state", "prompt": {"text", "role", "replies": [...]}}, or, as on the hub, the messages of
one tree as a group.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from pydantic import Field

from data_prep.assistants.conversation_forms.rows import (
    ROLES,
    Form,
    Row,
    column,
    objects_of,
    rows_of,
    text_of,
    up_to_last_answer,
)
from src.errors import DataError
from src.experiments.config import unknown_text

_LABELS = ("quality", "humor", "creativity")


class Threads(Form):
    """Threads from the prompt to each last answer.
    If several user messages follow one answer and none of them is answered, only the first is used."""

    languages: Sequence[str] = Field(default=["en"], min_length=1)
    """Languages of the prompts to use."""
    top_k: int | None = Field(default=None, gt=0)
    """Follow only answers with a rank below this; None: all answers."""
    synthetic: bool = False
    """Whether to use messages that were written by a model."""

    def read(self, row: Row, where: str) -> Iterator[Row]:
        """See `Form.read`."""

        def walk(thread: list[Row]) -> Iterator[list[Row]]:
            replies = self.good_replies(thread[-1])
            leaves = [reply for reply in replies if not self.good_replies(reply)]
            if (
                thread[-1]["role"] == "assistant"
            ):  # follow unanswered messages only if none is answered, and only the first
                replies = [reply for reply in replies if reply not in leaves] or leaves[:1]
            if not replies:
                yield thread
            for reply in replies:
                yield from walk([*thread, reply])

        for prompt in self.prompts(row, where):
            for thread in walk([prompt]):
                if messages := up_to_last_answer([_message(each) for each in thread]):
                    yield {"messages": messages}

    def prompts(self, row: Row, where: str) -> list[Row]:
        """[prompt] if the tree is finished, approved by reviewers and in one of the languages; else []."""
        tree = _tree(rows_of(row), where)
        prompt = column(tree, "prompt", where)
        _check(prompt, f"{where}: prompt")
        good = (
            tree.get("tree_state") == "ready_for_export"
            and prompt.get("review_result")
            and prompt.get("lang") in self.languages
        )
        return [{**prompt, "role": "user"}] if good and self.is_read(prompt) else []

    def is_read(self, message: Row) -> bool:
        """Whether to use a message: it is not deleted, and not excluded as synthetic."""
        return not message.get("deleted") and (self.synthetic or not message.get("synthetic"))

    def good_replies(self, message: Row) -> list[Row]:
        """Replies to a message that threads follow."""
        replies = [{**reply, "role": ROLES[reply["role"]]} for reply in message.get("replies") or ()]
        good = [reply for reply in replies if self.is_read(reply)]
        if self.top_k is None or message["role"] == "assistant":
            return good
        only = len(replies) == 1
        return [each for each in good if (only if each.get("rank") is None else each["rank"] < self.top_k)]


class RankedReplies(Threads):
    """Each user message with its ranked replies."""

    def read(self, row: Row, where: str) -> Iterator[Row]:
        """See `Form.read`."""

        def walk(thread: list[Row]) -> Iterator[Row]:
            ranked_replies = [
                each for each in thread[-1].get("replies") or () if type(each.get("rank")) is int and self.is_read(each)
            ]
            if thread[-1]["role"] != "assistant" and len(ranked_replies) > 1:
                replies = [{**_message(reply), "rank": reply["rank"]} for reply in ranked_replies]
                for reply in replies:
                    del reply["role"]
                yield {"messages": [_message(each) for each in thread], "replies": replies}
            for reply in self.good_replies(thread[-1]):
                yield from walk([*thread, reply])

        for prompt in self.prompts(row, where):
            yield from walk([prompt])


def _tree(rows: list[Row], where: str) -> Row:
    """Build a tree from its messages, in any order. A single row that is a tree is returned unchanged."""
    if len(rows) == 1 and "message_id" not in rows[0]:
        return rows[0]
    copies = {text_of(row, "message_id", where): {**row, "replies": list[Row]()} for row in rows}
    roots = list[Row]()
    for message in copies.values():
        above = copies.get(str(message.get("parent_id")))
        (above["replies"] if above else roots).append(message)
    first = next((root for root in roots if root.get("parent_id") is None), {})
    return {"tree_state": first.get("tree_state"), "prompt": first}


def _check(message: Any, where: str) -> None:
    """Raise DataError if a message or one of its replies is malformed."""
    if not isinstance(message, dict):
        raise DataError(
            f"{where}: expected a message with text and role, got {str(message)[:60]!r} ({type(message).__name__})."
        )
    for name in ("text", "role"):
        text_of(message, name, where)
    if message["role"] not in ROLES:
        raise DataError(f"{where}: {unknown_text('role', message['role'], ROLES)}")
    if type(message.get("rank")) not in (int, type(None)):
        raise DataError(f"{where}: rank: expected an integer or null, got {message['rank']!r:.60}.")
    for place, reply in enumerate(objects_of(message, "replies", where) if message.get("replies") is not None else ()):
        _check(reply, f"{where}.replies[{place}]")


def _message(message: Row) -> Row:
    labels = message.get("labels")
    labels = labels if isinstance(labels, dict) else {}
    labels_to_save = {name: value for name in _LABELS if (value := _label(labels, name)) is not None}
    lang = {"lang": message["lang"]} if message.get("lang") else {}
    return {"role": ROLES[message["role"]], "content": message["text"], **lang, **labels_to_save}


def _label(labels: Row, name: str) -> Any:
    """Value of a label. Files have {name: {"value"}}, the hub has {"name": [...], "value": [...]}."""
    names, values = labels.get("name"), labels.get("value")
    if isinstance(names, list) and isinstance(values, list):
        return next((value for each, value in zip(names, values, strict=False) if each == name), None)
    return labels[name].get("value") if isinstance(labels.get(name), dict) else None
