"""Common layouts: messages, prompt with completion, Alpaca, chosen and rejected reply, plain text."""

import re
from collections.abc import Iterator, Sequence

from pydantic import Field

from data_prep.assistants.conversation_forms.rows import (
    Form,
    Row,
    add_change,
    alternate,
    changes_of,
    column,
    column_if_any,
    messages_of,
    pick,
    reasoning_of,
    text_of,
    up_to_last_answer,
    with_system,
)
from src.errors import DataError
from src.experiments.config import describe_value

_NO_INPUT = re.compile(
    r"\W*(input\W+)?(no ?input(\W+(is\W+)?(required|needed|necessary|provided|given))?|n/a)\W*", re.IGNORECASE
)


class Messages(Form):
    """{"messages": [{"role", "content"}]}, or {"conversations": [{"from", "value"}]} as in ShareGPT.

    Consecutive messages of one role are joined by a line break; messages after the last answer are removed.
    The "tool_calls" and reasoning of messages, and the "tools" of the row, are unchanged. A text in column "system" is
    the first message, unless they have one.
    """

    def read(self, row: Row, where: str) -> Iterator[Row]:
        """See `Form.read`."""
        if talk := up_to_last_answer(_messages_in(row, where, "messages", "conversations")):
            yield {"messages": with_system(row, talk, where), **_tools(row, where)}


def _messages_in(row: Row, where: str, name: str, *others: str, role: str = "user") -> list[Row]:
    """The messages in a column, or in the first of `others` that is not null. role: that of a text."""
    value = column(row, name, where, *others)
    return messages_of(value, f"{where}: {next(each for each in (name, *others) if row.get(each) is value)}", role)


def _tools(row: Row, where: str) -> Row:
    """{"tools"} of a row, or of its "functions" as OpenAI had them before; empty if it has no tools."""
    tools, functions = column_if_any(row, "tools", where), row.get("functions")
    if not tools and isinstance(functions, list):
        tools = [{"type": "function", "function": function} for function in functions]
    return {"tools": tools} if tools else {}


class Completion(Form):
    """{"prompt", "completion"}, as texts or as messages."""

    def read(self, row: Row, where: str) -> Iterator[Row]:
        """See `Form.read`."""
        prompt, answer = (
            _messages_in(row, where, "prompt"),
            _messages_in(row, where, "completion", role="assistant"),
        )
        if answer:
            yield {"messages": with_system(row, [*prompt, *answer], where), **_tools(row, where)}


class Alpaca(Form):
    """{"instruction", "input", "output"}: the input follows the instruction on a new line.
    "history", a list of [instruction, output], are earlier turns; "system" is the system message."""

    joins: Sequence[str] = Field(default=["\n"], min_length=1)
    """Separators; one is inserted between the instruction and the input."""
    skip_no_input: bool = False
    """Whether to drop inputs such as "no input" and inputs that are part of the instruction."""

    def read(self, row: Row, where: str) -> Iterator[Row]:
        """See `Form.read`."""
        prompt = text_of(row, "instruction", where)
        more = "" if column_if_any(row, "input", where) is None else text_of(row, "input", where)
        answer = text_of(row, "output", where)
        if self.skip_no_input and (_NO_INPUT.fullmatch(more) or more.lower() in prompt.lower()):
            more = ""
        prompt = pick(self.joins, prompt, more).join(part for part in (prompt, more) if part)
        if prompt.strip() and answer.strip():
            turns = [text for pair in _history(row, where) for text in pair]
            yield {"messages": with_system(row, alternate([*turns, prompt, answer]), where)}


def _history(row: Row, where: str) -> list[list[str]]:
    """The earlier [instruction, output] of a row."""
    turns = column_if_any(row, "history", where) or []
    if not isinstance(turns, list) or not all(
        isinstance(each, list) and len(each) == 2 and all(isinstance(text, str) for text in each) for each in turns
    ):
        raise DataError(
            f"{where}: column 'history': expected a list of [instruction, output], got {describe_value(turns)}."
        )
    return turns


class Pairs(Form):
    """{"chosen", "rejected"} with {"prompt"} or {"conversations"}:
    texts, messages, or conversations that end with the reply. "system" is the system message."""

    def read(self, row: Row, where: str) -> Iterator[Row]:
        """See `Form.read`."""
        chosen_turns, rejected_turns = (
            _messages_in(row, where, name, role="assistant") for name in ("chosen", "rejected")
        )
        names = ("prompt", "conversations")
        has_context = any(row.get(name) is not None for name in names)
        if not has_context and len(chosen_turns) == 1:
            column_if_any(row, names[0], where, names[1])  # a misspelled one must not be ignored
        prompt = _messages_in(row, where, *names) if has_context else chosen_turns[:-1]
        if (
            not (chosen_turns and rejected_turns)
            or chosen_turns[-1]["role"] != "assistant"
            or rejected_turns[-1]["role"] != "assistant"
        ):
            return  # one side has no reply
        longest = max(chosen_turns[:-1], rejected_turns[:-1], key=len)
        is_longer = len(longest) > len(prompt) and prompt in (longest[: len(prompt)], longest[-len(prompt) :])
        if is_longer:  # it continues the prompt, or begins with a system message
            prompt = longest
        if (not has_context or is_longer) and chosen_turns[:-1] != rejected_turns[:-1]:
            return  # they answer different conversations
        replies = [_reply(talk[-1], where) for talk in (chosen_turns, rejected_turns)]
        for talk, reply in zip((chosen_turns, rejected_turns), replies, strict=True):
            if talk[:-1] and talk[:-1] != prompt[1 - len(talk) :]:
                add_change(reply, "removed", len(talk) - 1)
        for reply, score in zip(replies, _scores(row), strict=False):
            reply["score"] = score
        yield from ({**each, **_tools(row, where)} for each in pair(with_system(row, prompt, where), *replies))


def _scores(row: Row) -> tuple[float, ...]:
    """Scores of the two replies, from "score_chosen" and "score_rejected", or from "margin"; () if missing."""
    if row.get("score_chosen") is not None and row.get("score_rejected") is not None:
        return row["score_chosen"], row["score_rejected"]
    return (row["margin"], 0.0) if row.get("margin") is not None else ()


def _reply(message: Row, where: str) -> Row:
    """Content, reasoning and change counts of an answer."""
    if message.get("tool_calls"):
        raise DataError(
            f"{where}: tool_calls: expected replies without tool calls, got {str(message['tool_calls'])[:60]}. "
            "Remove the row."
        )
    return {"content": message["content"], **reasoning_of(message), **changes_of(message)}


def pair(messages: list[Row], chosen_reply: str | Row, rejected_reply: str | Row) -> Iterator[Row]:
    """Yield a row with two ranked replies, unless they are equal."""
    if chosen_reply != rejected_reply:
        replies = [{"content": reply} if isinstance(reply, str) else reply for reply in (chosen_reply, rejected_reply)]
        yield {"messages": messages, "replies": [{**reply, "rank": rank} for rank, reply in enumerate(replies)]}


class RankedReplies(Form):
    """{"messages", "replies"}: prepared rows, such as the preferences of `src.systems.assistants.serving.page`."""

    def read(self, row: Row, where: str) -> Iterator[Row]:
        """See `Form.read`."""
        yield {**{name: column(row, name, where) for name in ("messages", "replies")}, **_tools(row, where)}


class Text(Form):
    """{"text"}: plain text, split into pieces."""

    characters: int = Field(default=65_536, gt=0)
    """Length of a piece."""

    def read(self, row: Row, where: str) -> Iterator[Row]:
        """See `Form.read`."""
        text = text_of(row, "text", where)
        pieces = (text[begin : begin + self.characters] for begin in range(0, len(text), self.characters))
        yield from ({"text": piece} for piece in pieces if piece.strip())
