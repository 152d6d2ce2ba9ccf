"""The layouts that many releases share: messages, a prompt and its completion, Alpaca's, a chosen and a rejected reply, plain text."""

import re
from collections.abc import Iterator, Sequence

from pydantic import Field

from data_prep.conversation_forms.rows import Form, Row, column, messages_of, pick, reasoning_of, text_of, up_to_last_answer
from src.errors import DataError

_NO_INPUT = re.compile(r"\W*(input\W+)?(no ?input(\W+(is\W+)?(required|needed|necessary|provided|given))?|n/a)\W*", re.IGNORECASE)


class Messages(Form):
    """{"messages": [{"role", "content"}]}, or {"conversations": [{"from", "value"}]} as ShareGPT has it.

    Messages of one speaker that follow each other are joined by an end of line; what a person says last, without an answer, is left out.
    "tool_calls" of messages and "tools" of the row are kept as they are.
    """

    def read(self, row: Row, where: str) -> Iterator[Row]:
        """See `Form.read`."""
        if talk := up_to_last_answer(messages_of(row.get("messages", row.get("conversations")), where)):
            yield {"messages": talk, **_tools(row)}


def _tools(row: Row) -> Row:
    """The tools of a row, if it has some."""
    return {"tools": row["tools"]} if row.get("tools") else {}


class Completion(Form):
    """{"prompt", "completion"}, of text or of messages."""

    def read(self, row: Row, where: str) -> Iterator[Row]:
        """See `Form.read`."""
        asked, answer = messages_of(column(row, "prompt", where), where), messages_of(column(row, "completion", where), where, "assistant")
        if answer:
            yield {"messages": [*asked, *answer], **_tools(row)}


class Alpaca(Form):
    """{"instruction", "input", "output"}: the input, if there is one, stands below the instruction."""

    joins: Sequence[str] = Field(default=["\n"], min_length=1)
    """Between the instruction and the input: one of these."""
    skip_no_input: bool = False
    """Whether an input is left out that says that there is none, or that the instruction has already."""

    def read(self, row: Row, where: str) -> Iterator[Row]:
        """See `Form.read`."""
        asked, more = text_of(row, "instruction", where), str(row.get("input") or "")
        answer = text_of(row, "output", where)
        if self.skip_no_input and (_NO_INPUT.fullmatch(more) or more.lower() in asked.lower()):
            more = ""
        asked = pick(self.joins, asked, more).join(part for part in (asked, more) if part)
        system = [{"role": "system", "content": row["system"]}] if row.get("system") else []
        if asked.strip() and answer.strip():
            yield {"messages": [*system, {"role": "user", "content": asked}, {"role": "assistant", "content": answer}]}


class Pairs(Form):
    """{"chosen", "rejected"} with {"prompt"} or {"conversations"}: each of text, of a message, or of a conversation whose last message is
    the reply."""

    def read(self, row: Row, where: str) -> Iterator[Row]:
        """See `Form.read`."""
        chosen, rejected = (messages_of(column(row, name, where), where, "assistant") for name in ("chosen", "rejected"))
        given = row.get("prompt", row.get("conversations"))
        asked = chosen[:-1] if given is None else messages_of(given, where)
        if not (chosen and rejected) or chosen[-1]["role"] != "assistant" or rejected[-1]["role"] != "assistant":
            return  # one has no reply
        if given is None and rejected[:-1] != asked:
            return  # they answer different conversations
        yield from ({**each, **_tools(row)} for each in pair(asked, *(_reply(talk[-1], where) for talk in (chosen, rejected))))


def _reply(message: Row, where: str) -> Row:
    """The content and the reasoning of an answer."""
    if message.get("tool_calls"):
        raise DataError(f"{where}: tool_calls: expected replies of text, got {str(message['tool_calls'])[:60]}. Remove the row.")
    return {"content": message["content"], **reasoning_of(message)}


def pair(messages: list[Row], chosen: str | Row, rejected: str | Row) -> Iterator[Row]:
    """A row with two replies, unless they are the same."""
    if chosen != rejected:
        replies = [{"content": reply} if isinstance(reply, str) else reply for reply in (chosen, rejected)]
        yield {"messages": messages, "replies": [{**reply, "rank": rank} for rank, reply in enumerate(replies)]}


class RankedReplies(Form):
    """{"messages", "replies"}: rows as they are trained on, such as `src.serving.page` writes of what a person prefers."""

    def read(self, row: Row, where: str) -> Iterator[Row]:
        """See `Form.read`."""
        yield {**{name: column(row, name, where) for name in ("messages", "replies")}, **_tools(row)}


class Text(Form):
    """{"text"}: plain text, in pieces."""

    characters: int = Field(default=65_536, gt=0)
    """Of a piece."""

    def read(self, row: Row, where: str) -> Iterator[Row]:
        """See `Form.read`."""
        text = text_of(row, "text", where)
        for begin in range(0, len(text), self.characters):
            yield {"text": text[begin : begin + self.characters]}
