"""Conversations as token ids with a role for each token. The roles decide which tokens are learned.

Text of messages never becomes a control token; see `src.data.text.spans`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property
from itertools import groupby
from typing import TYPE_CHECKING, Protocol

from src.data.text.spans import Span, SpanEncoder
from src.data.text.tokenizers import is_control
from src.errors import DataError
from src.systems.assistants.conversations.entries import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


class Role(IntEnum):
    """Source of a token."""

    TEMPLATE = 0
    """Text of the template around messages, and tags before an answer."""
    SYSTEM = 1
    USER = 2
    ASSISTANT = 3
    """An answer, from the end of its generation prompt to its end token."""
    TOOL = 4
    TEXT = 5
    """Plain text."""


LEARNED_ROLES = frozenset({Role.ASSISTANT, Role.TEXT})
ROLE_OF = {"system": Role.SYSTEM, "user": Role.USER, "assistant": Role.ASSISTANT, "tool": Role.TOOL}


class Template(Protocol):
    """Writes messages as text."""

    @property
    def opening(self) -> Sequence[Message]:
        """The system message that each conversation must start with, or nothing."""
        ...

    def spans(self, messages: Sequence[Message], tags: Sequence[str] = (), answering: bool = False) -> list[Span]:
        """The text of a conversation.

        tags: for each message, text to write before it, or "". answering: end with the generation prompt of the next
        answer.
        """
        ...


@dataclass
class Rendered:
    """Token ids of a conversation or of a part of it."""

    ids: list[int] = field(default_factory=list)
    roles: list[int] = field(default_factory=list)
    """A `Role` for each id."""

    @property
    def loss_mask(self) -> list[bool]:
        """Whether each id is learned. The first id never is, as it has no context."""
        return [place > 0 and role in LEARNED_ROLES for place, role in enumerate(self.roles)]

    def last_answer(self) -> range:
        """Positions of the last answer; an empty range at the end if there is no answer."""
        end = len(self.ids)
        while end and self.roles[end - 1] != Role.ASSISTANT:
            end -= 1
        begin = end
        while begin and self.roles[begin - 1] == Role.ASSISTANT:
            begin -= 1
        return range(begin, end) if end else range(len(self.ids), len(self.ids))

    def part(self, begin: int, end: int) -> "Rendered":
        """A range of tokens."""
        return Rendered(self.ids[begin:end], self.roles[begin:end])


class Renderer(SpanEncoder):
    """Renders conversations as ids, with one tokenizer and template."""

    def __init__(self, tokenizer: "PreTrainedTokenizerFast", template: Template) -> None:
        super().__init__(tokenizer)
        self.template = template

    def render(self, messages: Sequence[Message], tags: Sequence[str] = (), answering: bool = False) -> Rendered:
        """See `Template.spans`. The ids start with the tokenizer's start tokens."""
        return self.encode(self.template.spans(messages, tags, answering))

    def render_text(self, text: str) -> Rendered:
        """Plain text and an end token, with the role TEXT."""
        rendered = self.encode([Span(text, Role.TEXT)])
        return Rendered([*rendered.ids, self.safe.eos_id], [*rendered.roles, Role.TEXT])

    def answer_ends(self) -> tuple[list[int], list[int]]:
        """The tokens that end an answer, the end token first, and the control tokens that no answer contains."""
        tool = {
            "type": "function",
            "function": {"name": "add", "description": "Add.", "parameters": {"type": "object", "properties": {}}},
        }
        ask, answer = Message("user", "?"), Message("assistant", "?")
        probes = (
            (ask, answer, ask, answer),
            (ask, Message("assistant", "?", reasoning="?")),
            (ask, Message("assistant", "<think>\n?\n</think>\n\n?")),
            (Message("user", "?", tools=[tool]), Message("assistant", "", calls=[{"name": "add", "arguments": {}}])),
        )
        answers = list[list[Span]]()
        for probe in probes:
            try:
                spans = self._split(self.template.spans([*self.template.opening, *probe]))
            except DataError:
                continue  # the template requires reasoning, or has no reasoning or no tools
            parts = groupby((span for span in spans if span.text), key=lambda span: span.role)
            answers += [[*part] for role, part in parts if role is Role.ASSISTANT]

        def ends(span: Span) -> bool:
            """Whether only white space and control tokens follow `span` in every answer that contains it."""
            places = [(part, place) for part in answers for place, each in enumerate(part) if each == span]
            return all(each.controls or not each.text.strip() for part, place in places for each in part[place:])

        last = [self.safe.control_id(part[-1].text) for part in answers if part[-1].controls and ends(part[-1])]
        tokens = [*dict.fromkeys([self.safe.eos_id, *(token for token in last if token is not None)])]
        inside = {self.safe.control_id(span.text) for part in answers for span in part if span.controls}
        return tokens, [token for token in self.safe.control_ids if token not in tokens and token not in inside]

    @cached_property
    def _answer_forms(self) -> list[tuple[str, str]]:
        """The template's (text before the reasoning, text between reasoning and content), and without reasoning
        (text before the content, "")."""
        forms, marks = list[tuple[str, str]](), ("\u2042reasoning", "\u2042content")
        for reasoning in (marks[0], ""):
            try:
                spans = self.template.spans(
                    [*self.template.opening, Message("user", "?"), Message("assistant", marks[1], reasoning=reasoning)]
                )
            except DataError:
                continue  # the template requires reasoning, or cannot write it
            answer = "".join(span.text for span in spans if span.role is Role.ASSISTANT).partition(marks[1])[0]
            before, _, between = answer.partition(reasoning) if reasoning else (answer, "", "")
            forms.append((before, between))
        return forms

    def read_answer(self, text: str) -> Message:
        """Parse a generated answer into reasoning and content. text: the answer, decoded with its control tokens."""
        content, reasoning = text, ""
        for before, between in self._answer_forms:
            rest = text.removeprefix(before)
            if text.startswith(before) and between in rest:
                reasoning, content = rest.split(between, 1) if between else ("", rest)
                break
        content, reasoning = (self._controls.sub("", part) for part in (content, reasoning.strip()))
        return Message("assistant", content, reasoning=reasoning)

    def is_answer(self, role: int) -> bool:
        return role == Role.ASSISTANT

    def encode(self, spans: Sequence[Span]) -> Rendered:
        """Ids of spans, with their roles. A token that spans two roles gets the later role."""
        ids, roles = self.encode_roles(spans)
        return Rendered(ids, [Role.TEMPLATE if role < 0 else role for role in roles])


def require_controls(tokenizer: "PreTrainedTokenizerFast", tokens: Sequence[str], template: str) -> None:
    """Raises DataError if the vocabulary does not have all control tokens of a template."""
    vocabulary = {str(token) for token in tokenizer.added_tokens_decoder.values() if is_control(token)}
    missing = [token for token in tokens if token not in vocabulary]
    if missing:
        raise DataError(
            f"data.writing.template: {template!r} needs {', '.join(missing)}, missing from the tokenizer. "
            "Add them to the model's extra_tokens."
        )
