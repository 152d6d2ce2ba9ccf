"""Where an answer stands in a rendered conversation, found again without rendering by the text around it."""

from collections.abc import Sequence
from typing import Any, NamedTuple


class Answer(NamedTuple):
    """The part of a rendered conversation that is an answer."""

    begin: int
    end: int
    missing: str = ""
    """Blanks of the generation prompt that the template strips before an empty answer."""


class Form(NamedTuple):
    """The text around an answer without reasoning and calls, after which another message follows.

    Earlier answers of the conversation with the same text around them need no rendering of their own, so time is linear
    in the messages.
    """

    lead: str
    """Text between the previous message and the content."""
    prompt: int
    """Length of its part before the answer."""
    end: str
    """Text between the content and the end of the answer."""

    @classmethod
    def find(cls, message: Any, text: str, place: int, answer: Answer) -> "Form | None":
        """The form of an answer; None without one. place: end of the previous message."""
        for content in forms_of(message["content"]) if place >= 0 and _is_plain(message) else ():
            begin = text.find(content, answer.begin, answer.end)
            if begin >= 0:
                return cls(text[place:begin], answer.begin - place, text[begin + len(content) : answer.end])
        return None

    def match(self, message: Any, text: str, place: int, regions: Sequence[tuple[int, int]]) -> Answer | None:
        """The answer after `place`; None if it has another form. regions: those within {% generation %}."""
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
    """Whether an answer is only text, without reasoning, which templates can move or drop."""
    return (
        bool(message["content"].strip())
        and not message.get("tool_calls")
        and not message.get("reasoning_content")
        and ("think>" not in message["content"])
    )


def forms_of(content: str) -> tuple[str, ...]:
    """A content as templates write it."""
    return content, content.strip(), content.lstrip(), content.rstrip()
