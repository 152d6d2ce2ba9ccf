"""The templates that conversations are written with: Open-Assistant's, ChatML, and any template of Jinja.

A template of Jinja is filled in with marks in the place of messages, and what stands between the marks is the template's own text. So what
is said cannot change the template, nor become a part of it.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from src.data.conversations.entries import Message, json_line
from src.data.conversations.rendering import ROLE_OF, Role, Span, Template, require_controls
from src.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

OASST_TOKENS = ("<|prompter|>", "<|assistant|>", "<|system|>", "<|prefix_begin|>", "<|prefix_end|>")
CHATML_TOKENS = ("<|im_start|>", "<|im_end|>")
_OASST = {"user": "<|prompter|>", "assistant": "<|assistant|>", "system": "<|system|>", "tool": "<|prompter|>"}
NAMES = ("chatml", "oasst", "tokenizer")
_MARK = re.compile("\x02([0-9]+)\x03")
_MASK = "\x7f"
"""Around a number, in the place of text that must not become a control token; JSON writes it as it is."""
_OWN = "own_chat_template"
_GENERATION = re.compile(r"{%-?\s*generation\s*-?%}")


def find(name: str, tokenizer: "PreTrainedTokenizerFast") -> Template:
    """The template of a name, or the tokenizer's own. The tokenizer gets the one of a name, so that exports of the run write the same.

    Raises:
        DataError: the tokenizer lacks its control tokens, or has no template, or one with which nothing could be trained.
    """
    if name == "oasst":
        require_controls(tokenizer, OASST_TOKENS[:3], name)
        _keep_source(tokenizer, name)
        return OpenAssistant(str(tokenizer.eos_token))
    if name == "chatml":
        require_controls(tokenizer, CHATML_TOKENS, name)
        _keep_source(tokenizer, name)
        return ChatML()
    source = getattr(tokenizer, _OWN, tokenizer.chat_template)
    if not isinstance(source, str):
        raise DataError("data.writing.template: the tokenizer has no chat template of its own. Take 'oasst' or 'chatml'.")
    tokens = {name: str(token) for name, token in tokenizer.special_tokens_map.items() if isinstance(token, str)}
    return Jinja(source, tokens, [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special])


def _keep_source(tokenizer: "PreTrainedTokenizerFast", name: str) -> None:
    """Give the tokenizer the template as Jinja. Its own, if it has one, is still what `find` takes for "tokenizer"."""
    if tokenizer.chat_template is not None:
        setattr(tokenizer, _OWN, getattr(tokenizer, _OWN, tokenizer.chat_template))
    tokenizer.chat_template = read_source(name)


def read_source(name: str) -> str:
    """The template "oasst" or "chatml" as Jinja."""
    return (Path(__file__).resolve().parents[3] / "resources" / "chat_templates" / f"{name}.jinja").read_text(encoding="utf-8")


@dataclass(frozen=True)
class OpenAssistant:
    """v2.5 of Open-Assistant: each turn is its role's token, the text and the end token, and nothing between turns."""

    end: str
    """The end token."""

    def spans(self, messages: Sequence[Message], tags: Sequence[str] = (), answering: bool = False) -> list[Span]:
        """See `rendering.Template`. System messages come first, and what is told of an answer before it, as a system's."""
        messages, tools = _write_tools(messages)
        found = self._turn("<|system|>", tools, Role.SYSTEM) if tools else []
        for number, message in enumerate(messages):
            found += self._turn("<|system|>", tags[number], Role.TEMPLATE) if number < len(tags) and tags[number] else []
            found += self._turn(_OASST[message.role], message.written, ROLE_OF[message.role])
        found += self._turn("<|system|>", tags[-1], Role.TEMPLATE) if answering and len(tags) > len(messages) and tags[-1] else []
        return [*found, Span("<|assistant|>", Role.TEMPLATE, True)] if answering else found

    def _turn(self, name: str, text: str, role: Role) -> list[Span]:
        return [Span(name, Role.TEMPLATE, True), Span(text, role), Span(self.end, _role_of_end(role), True)]


@dataclass(frozen=True)
class ChatML:
    """<|im_start|>ROLE, an end of line, the text, <|im_end|> and an end of line."""

    def spans(self, messages: Sequence[Message], tags: Sequence[str] = (), answering: bool = False) -> list[Span]:
        """See `rendering.Template`."""
        messages, tools = _write_tools(messages)
        found = self._turn("system", tools, Role.SYSTEM) if tools else []
        for number, message in enumerate(messages):
            found += self._turn("system", tags[number], Role.TEMPLATE) if number < len(tags) and tags[number] else []
            found += self._turn(message.role, message.written, ROLE_OF[message.role])
        found += self._turn("system", tags[-1], Role.TEMPLATE) if answering and len(tags) > len(messages) and tags[-1] else []
        return [*found, Span("<|im_start|>assistant\n", Role.TEMPLATE, True)] if answering else found

    @staticmethod
    def _turn(name: str, text: str, role: Role) -> list[Span]:
        begin, end = Span(f"<|im_start|>{name}\n", Role.TEMPLATE, True), Span("<|im_end|>", _role_of_end(role), True)
        return [begin, Span(text, role), end, Span("\n", Role.TEMPLATE)]


def _tools_of(messages: Sequence[Message]) -> Sequence[Mapping[str, Any]]:
    """The tools of a conversation, whether or not something stands before its first message."""
    return next((message.tools for message in messages if message.tools), ())


def _write_tools(messages: Sequence[Message]) -> tuple[Sequence[Message], str]:
    """The messages with the tools below what the system says, a line of JSON each; or those lines, where it says nothing."""
    lines = "\n".join(map(json_line, _tools_of(messages)))
    if not lines or messages[0].role != "system":
        return messages, lines
    return [replace(messages[0], content=f"{messages[0].content}\n{lines}"), *messages[1:]], ""


def _role_of_end(role: Role) -> Role:
    """Of the token that ends a turn: the assistant has to learn when to end."""
    return role if role is Role.ASSISTANT else Role.TEMPLATE


class Jinja:
    """A template of Jinja, as tokenizers have them."""

    def __init__(self, source: str, tokens: Mapping[str, str], controls: Sequence[str] = ()) -> None:
        """tokens: control tokens by the names that the template may use, such as eos_token. controls: more of the vocabulary's.

        Raises:
            DataError: nothing could be trained with it: it leaves out or repeats a message, its beginning changes with what follows, while
                it does not mark its answers, or nothing that is learned ends an answer.
        """
        self.source, self.tokens = source, dict(tokens)
        self.marks_answers = bool(_GENERATION.search(source))
        names = {*tokens.values(), *controls, *re.findall(r"<\|[^|\s]+\|>", source)}
        longest_first = sorted(names, key=lambda name: (-len(name), name))  # so that no name hides one that begins with it
        self._controls = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self._strips = frozenset(self._stripped_roles())
        self._begins = frozenset(self._controls.findall(self._fill(["user"])[0].partition("\x02")[0]))
        """Control tokens before what a user says."""
        behind = self._fill(["user", "assistant"])[0].rpartition("\x03")[2]
        own = self._controls.search(behind)
        self._end = behind[: own.end()] if own else ""
        """What the template writes behind an answer that nothing follows."""
        self._check()

    def _stripped_roles(self) -> Iterator[str]:
        """Roles of messages around which the template takes blanks away."""
        for roles, can_lack in ((["user", "assistant"], False), (["system", "user"], True), (["user", "assistant", "tool"], True)):
            try:
                text = self._fill(roles, padding="\t\t")[0]
            except DataError:
                if can_lack:
                    continue
                raise
            yield from (roles[int(mark.group(1))] for mark in _MARK.finditer(text) if text[: mark.start()][-2:] != "\t\t")

    def spans(self, messages: Sequence[Message], tags: Sequence[str] = (), answering: bool = False) -> list[Span]:
        """See `rendering.Template`. What is told of an answer has no place in it.

        Raises:
            DataError: the template refuses the messages, or leaves one out or repeats it.
        """
        if any(tags):
            raise DataError("data.writing.tags: a template of the tokenizer has no place for them. Take template 'oasst' or 'chatml'.")
        roles, more = [message.role for message in messages], _Tools(messages, self._controls)
        text, answers = self._fill(roles, answering, tools=more)
        marks = {int(mark.group(1)): mark for mark in _MARK.finditer(text)}
        wanted = [number for number, message in enumerate(messages) if message.content or not message.calls]
        if [int(found) for found in _MARK.findall(text)] != wanted:
            found, of = " ".join(_MARK.findall(text)), f"of messages {' '.join(map(str, wanted)) or 'without text'}"
            raise DataError(f"data.writing.template: {of} the template writes: {found or 'none'}. Take another.")
        if more.tools and text == self._fill(roles, answering, tools=_Tools(messages, self._controls, without=True))[0]:
            raise DataError("data.writing.template: the template does not write which tools there are. Leave them out, or take another.")
        spans, place = list[Span](), 0
        for number, message in enumerate(messages):
            begin, end = self._call(text, roles, number, more) if message.calls else (marks[number].start(), 0)
            spans.append(Span(text[place:begin], Role.TEMPLATE, True))
            place = begin
            if number in marks:
                said = message.content.strip() if message.role in self._strips else message.content
                spans += [Span(text[place : marks[number].start()], Role.ASSISTANT, True)] if message.calls else []
                spans.append(Span(said, ROLE_OF[message.role]))
                place = marks[number].end()
            if message.role == "assistant":
                end = end or self._end_of_answer(text, place, answers)
                spans.append(Span(text[place:end], Role.ASSISTANT, True))
                place = end
        return [part for span in (*spans, Span(text[place:], Role.TEMPLATE, True)) for part in more.unmask(span)]

    def _call(self, text: str, roles: Sequence[str], number: int, more: "_Tools") -> tuple[int, int]:
        """Where a message with calls of tools begins in a text, and where its end does: behind the last control token that it has."""
        asked, answered = self._fill(roles[:number], True, tools=more)[0], self._fill(roles[: number + 1], tools=more)[0]
        controls = list(self._controls.finditer(answered, len(asked)))
        end = controls[-1].end() if controls else len(answered)
        written = all(call["function"]["name"] in answered[len(asked) :] for call in more.calls[number])
        if not written or not answered.startswith(asked) or not text.startswith(answered[:end]):
            raise DataError(
                "data.writing.template: the template writes no calls of tools, or changes them with what follows. Leave them out, or take "
                "another."
            )
        return len(asked), end

    def _end_of_answer(self, text: str, place: int, answers: Sequence[tuple[int, int]]) -> int:
        """Where what ends the answer before `place` ends: as the template marks it; behind the control token that follows, but for one
        with which the next turn begins."""
        for begin, end in answers:
            if begin <= place <= end:
                return end
        if self._end and text.startswith(self._end, place):
            return place + len(self._end)
        following = _MARK.search(text, place)
        control = self._controls.search(text, place, following.start() if following else len(text))
        return control.end() if control and control.group() not in self._begins else place

    def _fill(
        self, roles: Sequence[str], answering: bool = False, padding: str = "", tools: "_Tools | None" = None
    ) -> tuple[str, list[tuple[int, int]]]:
        """The text with marks for messages of these roles; and where answers begin and end in it, if the template says so.

        tools: those of a conversation that begins with these roles, and their calls.

        Raises:
            DataError: the template fails.
        """
        from jinja2 import TemplateError
        from transformers.utils.chat_template_utils import render_jinja_template

        more: dict[str, Any] = {**self.tokens, "date_string": "01 Jan 2025"}
        marked: Any = [{"role": role, "content": f"{padding}\x02{i}\x03{padding}"} for i, role in enumerate(roles)]
        for message, calls, says in zip(marked, tools.calls, tools.says, strict=False) if tools else ():
            if calls:
                message |= {"tool_calls": [*calls], **({} if says else {"content": ""})}
        try:
            texts, answers = cast(Any, render_jinja_template)(
                conversations=[marked],
                tools=(tools.tools or None) if tools else None,
                chat_template=self.source,
                add_generation_prompt=answering,
                return_assistant_tokens_mask=self.marks_answers,
                **more,
            )
        except (TemplateError, TypeError, KeyError, IndexError, AttributeError, ValueError) as error:
            reason = " ".join(str(error).split())[:200]
            raise DataError(f"data.writing.template: the template refuses {' '.join(roles)} ({reason}).") from None
        return texts[0], [(begin, end) for begin, end in answers[0]] if self.marks_answers else []

    def _check(self) -> None:
        roles = ["user", "assistant"] * 2
        spans = self.spans([Message(role, "") for role in roles])
        for number in () if self.marks_answers else (1, 3):
            asked, answered, later = (
                self._fill(roles[:number], answering=True)[0],
                self._fill(roles[: number + 1])[0],
                self._fill(roles)[0],
            )
            known = answered[: answered.index("\x03", len(asked)) + 1] if answered.startswith(asked) else ""
            if not known or not later.startswith(known):
                raise DataError(
                    "data.writing.template: what the template writes before an answer changes with what follows it, so that the answer "
                    "would be learned behind another text than it is asked for. Mark its answers with {% generation %}, or take another "
                    "template."
                )
        if not all(span.text for span in spans if span.role is Role.ASSISTANT and span.controls):
            inside = ", within {% generation %}" if self.marks_answers else ""
            raise DataError(
                "data.writing.template: the template writes no control token behind an answer, so that no model would learn where one "
                f"ends. Let it write the end token there{inside}, or take another template."
            )


class _Tools:
    """The tools of a conversation and their calls, as a template of Jinja is given them: masked where they spell a control token."""

    def __init__(self, messages: Sequence[Message], controls: re.Pattern[str], without: bool = False) -> None:
        """without: leave the tools out."""
        self._spelled = list[str]()
        self._controls = re.compile(f"{controls.pattern}|{_MASK}")
        self.tools: list[Any] = [] if without else [self._mask(tool) for tool in _tools_of(messages)]
        self.calls: list[list[Any]] = [
            [{"type": "function", "function": self._mask(call)} for call in message.calls] for message in messages
        ]
        """Of each message."""
        self.says = [bool(message.content) for message in messages]

    def _mask(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._controls.sub(self._note, value)
        if isinstance(value, dict):
            return {self._mask(key): self._mask(each) for key, each in value.items()}
        return [self._mask(each) for each in value] if isinstance(value, list) else value

    def _note(self, found: re.Match[str]) -> str:
        self._spelled.append(found.group())
        return f"{_MASK}{len(self._spelled) - 1}{_MASK}"

    def unmask(self, span: Span) -> Iterator[Span]:
        """A span of the template's text, apart from what it spells in the place of masks."""
        if not span.controls or not self._spelled:
            yield span
            return
        for place, piece in enumerate(re.split(f"{_MASK}([0-9]+){_MASK}", span.text)):
            yield Span(self._spelled[int(piece)], span.role) if place % 2 else Span(piece, span.role, True)
