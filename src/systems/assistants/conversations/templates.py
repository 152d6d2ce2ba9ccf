"""Templates of conversations: Open-Assistant's, ChatML, and tokenizers' Jinja templates."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from src.data.text.spans import Span
from src.data.text.tokenizers import default_template, is_control, start_ids
from src.errors import DataError
from src.files import ROOT
from src.systems.assistants.conversations.entries import Message, json_line
from src.systems.assistants.conversations.jinja_templates import WHERE, Jinja, shorten, tools_of
from src.systems.assistants.conversations.rendering import ROLE_OF, Role, Template, require_controls

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

OASST_TOKENS = ("<|prompter|>", "<|assistant|>", "<|system|>", "<|prefix_begin|>", "<|prefix_end|>")
CHATML_TOKENS = ("<|im_start|>", "<|im_end|>")
CONTROLS = {"oasst": OASST_TOKENS[:3], "chatml": CHATML_TOKENS}
"""Control tokens without which a template cannot be used."""
_OASST = {"user": "<|prompter|>", "assistant": "<|assistant|>", "system": "<|system|>", "tool": "<|prompter|>"}
NAMES = ("chatml", "oasst", "tokenizer")
_TEMPLATES = "chat_templates"
"""Attribute of a tokenizer: its chat template as `find` has set it, and the original one."""


def find(name: str, tokenizer: "PreTrainedTokenizerFast", system: str | None = None) -> Template:
    """Return the named template, and set it as the tokenizer's, so that exports of the run write the same text: with
    the start tokens that the tokenizer adds, and with the message `system` in conversations without one.

    Raises:
        DataError: the tokenizer has no template or not all control tokens, or its template cannot be trained with.
    """
    current, original = getattr(tokenizer, _TEMPLATES, (None, None))
    if tokenizer.chat_template != current:
        original = default_template(tokenizer)
    template: Template
    if name in CONTROLS:
        require_controls(tokenizer, CONTROLS[name], name)
        source = read_source(name)
        template = ChatML() if name == "chatml" else OpenAssistant(str(tokenizer.eos_token))
    elif not isinstance(original, str):
        raise DataError(f"{WHERE}: the tokenizer has no chat template. Use 'oasst' or 'chatml'.")
    else:
        source = original
        controls = [str(token) for token in tokenizer.added_tokens_decoder.values() if is_control(token)]
        tokens = {name: str(token) for name, token in tokenizer.special_tokens_map.items() if isinstance(token, str)}
        template = Jinja(source, tokens, controls)
    if name in CONTROLS or tokenizer.chat_template != current:  # else an earlier call has set it
        tokenizer.chat_template = _default_system(system) + _missing_start(template, tokenizer) + source
        setattr(tokenizer, _TEMPLATES, (tokenizer.chat_template, original))
    return template


def _default_system(text: str | None) -> str:
    """Jinja source that puts a system message before conversations without one."""
    if text is None:
        return ""
    message = f"{{'role': 'system', 'content': {json_line(text)}}}"
    first = "messages[0]['role'] if messages else ''"
    return f"{{%- if ({first}) != 'system' -%}}{{%- set messages = [{message}] + messages -%}}{{%- endif -%}}"


def _missing_start(template: Template, tokenizer: "PreTrainedTokenizerFast") -> str:
    """The start tokens that the tokenizer adds to each text, if the template does not write them."""
    start = "".join(tokenizer.convert_ids_to_tokens(start_ids(tokenizer)))
    try:
        spans = template.spans([*template.opening, Message("user", "?")], answering=True)
    except DataError:  # it requires other messages
        return ""
    return "" if "".join(span.text for span in spans).startswith(start) else start


def read_source(name: str) -> str:
    """Jinja source of the template "oasst" or "chatml"."""
    return (ROOT / "resources" / "chat_templates" / f"{name}.jinja").read_text(encoding="utf-8")


@dataclass(frozen=True)
class OpenAssistant:
    """Open-Assistant's v2.5: a turn is the token of its role, the text and the end token, without separators."""

    end: str
    """The end token."""
    opening: Sequence[Message] = ()

    def spans(self, messages: Sequence[Message], tags: Sequence[str] = (), answering: bool = False) -> list[Span]:
        """See `rendering.Template`. Tags are a system turn before their answer."""
        messages, tools = _write_tools(messages, "oasst")
        spans = self._turn("<|system|>", tools, Role.SYSTEM) if tools else []
        for number, message in enumerate(messages):
            spans += (
                self._turn("<|system|>", tags[number], Role.TEMPLATE) if number < len(tags) and tags[number] else []
            )
            spans += self._turn(_OASST[message.role], message.full_text, ROLE_OF[message.role])
        spans += (
            self._turn("<|system|>", tags[-1], Role.TEMPLATE)
            if answering and len(tags) > len(messages) and tags[-1]
            else []
        )
        return [*spans, Span("<|assistant|>", Role.TEMPLATE, True)] if answering else spans

    def _turn(self, name: str, text: str, role: Role) -> list[Span]:
        return [Span(name, Role.TEMPLATE, True), Span(text, role), Span(self.end, _role_of_end(role), True)]


@dataclass(frozen=True)
class ChatML:
    """<|im_start|>ROLE, a line break, the text, <|im_end|> and a line break."""

    opening: Sequence[Message] = ()

    def spans(self, messages: Sequence[Message], tags: Sequence[str] = (), answering: bool = False) -> list[Span]:
        """See `rendering.Template`."""
        messages, tools = _write_tools(messages, "chatml")
        spans = self._turn("system", tools, Role.SYSTEM) if tools else []
        for number, message in enumerate(messages):
            spans += self._turn("system", tags[number], Role.TEMPLATE) if number < len(tags) and tags[number] else []
            spans += self._turn(message.role, message.full_text, ROLE_OF[message.role])
        spans += (
            self._turn("system", tags[-1], Role.TEMPLATE)
            if answering and len(tags) > len(messages) and tags[-1]
            else []
        )
        return [*spans, Span("<|im_start|>assistant\n", Role.TEMPLATE, True)] if answering else spans

    @staticmethod
    def _turn(name: str, text: str, role: Role) -> list[Span]:
        start, end = Span(f"<|im_start|>{name}\n", Role.TEMPLATE, True), Span("<|im_end|>", _role_of_end(role), True)
        return [start, Span(text, role), end, Span("\n", Role.TEMPLATE)]


def _write_tools(messages: Sequence[Message], name: str) -> tuple[Sequence[Message], str]:
    """Append the tools to the system message, one line of JSON per tool. Returns (messages, tools as text), where the
    text is empty if there is a system message.

    Raises:
        DataError: a message has reasoning, which these templates cannot write.
    """
    number = next((number for number, message in enumerate(messages) if message.reasoning), None)
    if number is not None:
        raise DataError(
            f"{WHERE}: {name!r} cannot write reasoning, and messages[{number}] has "
            f"{shorten(messages[number].reasoning)}. Use template "
            "'tokenizer', or move the reasoning into the content."
        )
    lines = "\n".join(map(json_line, tools_of(messages)))
    if not lines or messages[0].role != "system":
        return messages, lines
    return [replace(messages[0], content=f"{messages[0].content}\n{lines}"), *messages[1:]], ""


def _role_of_end(role: Role) -> Role:
    """Role of the token that ends a turn. The model must learn the end of an answer."""
    return role if role is Role.ASSISTANT else Role.TEMPLATE
