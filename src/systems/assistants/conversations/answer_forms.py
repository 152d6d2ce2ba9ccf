"""Locate answers in a rendered conversation by the text around them, without rendering again."""

from collections.abc import Sequence
from typing import Any, NamedTuple


class Answer(NamedTuple):
    """Span of an answer in a rendered conversation."""

    begin: int
    end: int
    missing: str = ""
    """White space of the generation prompt that the template strips before an empty answer."""


class Form(NamedTuple):
    """The text around an answer that has no reasoning or tool calls and is followed by another message.

    Earlier answers with the same text around them need no rendering of their own, so the time is linear in the number
    of messages.
    """

    lead: str
    """Text between the previous message and the content."""
    prompt: int
    """Length of the part of `lead` before the answer."""
    end: str
    """Text between the content and the end of the answer."""

    @classmethod
    def find(cls, message: Any, text: str, place: int, answer: Answer) -> "Form | None":
        """The form of an answer, or None. place: end of the previous message."""
        for content in forms_of(message["content"]) if place >= 0 and _is_plain(message) else ():
            begin = text.find(content, answer.begin, answer.end)
            if begin >= 0:
                return cls(text[place:begin], answer.begin - place, text[begin + len(content) : answer.end])
        return None

    def match(self, message: Any, text: str, place: int, regions: Sequence[tuple[int, int]]) -> Answer | None:
        """The answer after `place`, or None if its form differs. regions: spans within {% generation %}."""
        if place < 0 or not _is_plain(message) or not text.startswith(self.lead, place):
            return None
        begin = place + len(self.lead)
        for content in forms_of(message["content"]):
            end = begin + len(content) + len(self.end)
            if text.startswith(content + self.end, begin) and (
                not regions or any(one <= begin and end <= two for one, two in regions)
            ):
                return Answer(place + self.prompt, end)
        return None


def _is_plain(message: Any) -> bool:
    """Whether an answer is only text. Templates can move or drop reasoning."""
    return (
        bool(message["content"].strip())
        and not message.get("tool_calls")
        and not message.get("reasoning_content")
        and ("think>" not in message["content"])
    )


def forms_of(content: str) -> tuple[str, ...]:
    """Variants of a message's content, as templates write it."""
    return content, content.strip(), content.lstrip(), content.rstrip()
