"""Tokenizers' Jinja templates, rendered with the real messages, so the text equals that of `apply_chat_template`.

Control tokens spelled out in a message are masked before rendering and restored as plain text afterwards. An answer
starts where the generation prompt ends: `Jinja.spans` renders the prompt of each answer and requires that it is a
prefix of the conversation.
"""

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any, NoReturn

from src.data.text.spans import Span, render_template
from src.errors import DataError
from src.systems.assistants.conversations.answer_forms import Answer, Form, forms_of
from src.systems.assistants.conversations.control_mask import CONTROL, MASK, Mask
from src.systems.assistants.conversations.entries import Message, json_line
from src.systems.assistants.conversations.rendering import ROLE_OF, Role

log = logging.getLogger(__name__)

WHERE = "data.writing.template"
_MARK = re.compile(f"{MASK}{MASK}m([0-9]+){MASK}")
_GENERATION = re.compile(r"{%-?\s*generation\s*-?%}")
_DATE = datetime(2025, 1, 1)
_CODES = [f"%{flag}{letter}" for flag in ("-", "") for letter in "aAbBcCdDeFgGhHIjklmMpPrRSTuUVwWxXyYzZ"]
_FIXED_DATE = (
    "{%- macro strftime_now(format) -%}{{- format"
    + "".join(f" | replace('{code}', '{_DATE.strftime(code)}')" for code in _CODES)
    + " -}}{%- endmacro -%}"
)
"""A fixed date instead of today's: a training that resumes on another day must read the same tokens."""


def tools_of(messages: Sequence[Message]) -> Sequence[Mapping[str, Any]]:
    """The tools of a conversation, from the first message that has any."""
    return next((message.tools for message in messages if message.tools), ())


class _Unlearnable(Exception):
    """Why an answer does not continue its generation prompt."""


class Jinja:
    """A tokenizer's Jinja template."""

    def __init__(self, source: str, tokens: Mapping[str, str], controls: Sequence[str] = ()) -> None:
        """tokens: control tokens by the names that the template uses, such as eos_token.
        controls: the other control tokens of the vocabulary.

        Raises:
            DataError: the template omits or repeats a message, the generation prompt is not a prefix of the
                conversation, or no control token ends an answer.
        """
        self.source, self.tokens = source, dict(tokens)
        self.marks_answers = bool(_GENERATION.search(source))
        self._source = (_FIXED_DATE if "strftime_now" in source else "") + source
        names = {*tokens.values(), *controls, *re.findall(CONTROL, source)} - {""}
        longest_first = sorted(names, key=lambda name: (-len(name), name))  # a name must not hide a longer one
        self._controls = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self.opening: Sequence[Message] = ()
        self._in_parts = False
        """Whether the template reads content as a list of parts, like templates of vision models."""
        self._check()

    def spans(self, messages: Sequence[Message], tags: Sequence[str] = (), answering: bool = False) -> list[Span]:
        """See `rendering.Template`.
        An earlier answer is not learned if the template changes it once another message follows.

        Raises:
            DataError: the template rejects the messages, omits or repeats one, or the last answer cannot be learned.
        """
        if any(tags):
            raise DataError(
                "data.writing.tags: a tokenizer's chat template cannot write them. Use template 'oasst' or 'chatml'."
            )
        mask = Mask(self._controls)
        raw, tools = [mask.message(message) for message in messages], mask.mask(tools_of(messages)) or None
        text, regions = self._fill(raw, tools, answering)
        if tools and text == self._fill(raw, None, answering)[0]:
            raise DataError(f"{WHERE}: the template ignores tools. Remove them, or use another template.")
        parts = self._locate(raw, tools, answering, text)
        before = {number: end for number, (_, end, _, _) in parts.items()}
        form: Form | None = None
        for number in reversed(range(len(messages))):
            if messages[number].role != "assistant":
                continue
            offset = before.get(number - 1, -1)
            if form is not None and (answer := form.match(raw[number], text, offset, regions)):
                parts[number] = (answer.begin, answer.end, Role.ASSISTANT, "")
                continue
            try:
                answer = self._answer(raw, number, tools, text, regions, answering)
            except _Unlearnable as reason:
                if number == len(messages) - 1:
                    raise DataError(f"{WHERE}: {reason}") from None
                continue
            if answer is not None:
                parts[number] = (answer.begin, answer.end, Role.ASSISTANT, answer.missing)
                if number < len(messages) - 1:  # the template can write the last answer differently
                    form = form or Form.find(raw[number], text, offset, answer)
        spans, offset = list[Span](), 0
        for begin, end, role, missing in sorted(parts.values()):
            if begin < offset:
                marks = " within {% generation %}" if self.marks_answers else ""
                advice = "Mark only answers" if self.marks_answers else "Use a template that writes messages in order"
                raise DataError(
                    f"{WHERE}: an answer{marks} overlaps another message: {shorten(text[begin:offset])}. {advice}."
                )
            spans += [Span(text[offset:begin] + missing, Role.TEMPLATE, True), Span(text[begin:end], role, True)]
            offset = end
        return [part for span in (*spans, Span(text[offset:], Role.TEMPLATE, True)) for part in mask.restore(span)]

    def _answer(
        self,
        raw: Sequence[Any],
        number: int,
        tools: Any,
        text: str,
        regions: Sequence[tuple[int, int]],
        answering: bool,
    ) -> Answer | None:
        """Locate message `number` in `text`; None if the template changes it once another message follows.
        answering: the text is a prompt, so no message is learned.

        Raises:
            _Unlearnable: even as the last message it does not continue its generation prompt, or has no end token.
            DataError: even as the last message it is incomplete.
        """
        message = raw[number]
        prompt = self._fill(raw[:number], tools, answering=True)[0]
        is_full_text = number + 1 == len(raw) and not answering
        last, last_regions = (text, regions) if is_full_text else self._fill(raw[: number + 1], tools)
        start = _shared_length(prompt, last)
        self._require_content(raw, number, tools, last, start, answering)
        if start < len(prompt):
            is_empty = not (message["content"].strip() or message.get("tool_calls") or message.get("reasoning_content"))
            if not is_empty or prompt[start:].strip() or number + 1 < len(raw) or not self._controls.match(last, start):
                self._refuse_prefix(prompt, last, start)
        ends, inside = [match.end() for match in self._controls.finditer(last, start)], ""
        if self.marks_answers:
            inside = " within {% generation %}"
            ends = [end for end in ends if end <= max((end for _, end in last_regions), default=0)]
        if not ends:
            raise _Unlearnable(
                f"no control token ends the answer {shorten(last[start:])}, so a model would not learn to stop. "
                f"Write the end token after each answer{inside}, or use another template."
            )
        if self.marks_answers:
            content = _without_blanks(message["content"].rpartition("</think>")[2])
            if content not in _without_blanks(last[start : ends[-1]]):
                raise _Unlearnable(
                    f"{{% generation %}} marks only part of {shorten(message['content'])}. Mark the complete answer."
                )
            same = _shared_length(last, text)
            region_ends = [end for begin, end in regions if end > start and begin <= max(same, start)]
            ends = (
                [match.end() for match in self._controls.finditer(text, start, region_ends[-1])]
                if region_ends and same >= start
                else []
            )
            return Answer(start, ends[-1], prompt[start:]) if ends else None
        if text.startswith(last[: ends[-1]]):
            return Answer(start, ends[-1], prompt[start:])
        same = _shared_length(last, text)  # the template adds to the end of a last answer: <|end|> or <|end|><eos>
        ends = [
            end
            for end in ends
            if end <= same and message["content"].strip() and self._is_complete(message, last[start:end])
        ]
        return Answer(start, ends[-1]) if ends else None

    def _is_complete(self, message: Any, text: str) -> bool:
        return not any(_without_blanks(part) not in _without_blanks(text) for _, part in self._parts_of(message))

    @staticmethod
    def _parts_of(message: Any) -> list[tuple[str, str]]:
        """(name, text) of each part of a message that a template must write."""
        texts = [(name, message.get(name, "")) for name in ("content", "reasoning_content")]
        return texts + [("tool call", call["function"]["name"]) for call in message.get("tool_calls", ())]

    def _require_content(
        self, raw: Sequence[Any], number: int, tools: Any, last: str, start: int, answering: bool
    ) -> None:
        """Raises DataError if `last` drops a part of message `number`. start: end of its generation prompt.

        answering: allow templates to drop reasoning from the content of earlier answers.
        """
        if self._is_complete(raw[number], last[start:]):
            return
        # Include the generation prompt, which can contain <think>.
        turn = last[_shared_length(self._fill(raw[:number], tools)[0], last) :]
        for name, text in self._parts_of(raw[number]):
            text = text.rpartition("</think>")[2] if answering else text
            if _without_blanks(text) not in _without_blanks(turn):
                reason = f"the template drops the {name} {shorten(text)} of messages[{number}]"
                raise DataError(f"{WHERE}: {reason}. Remove it, or use another template.")

    @staticmethod
    def _refuse_prefix(prompt: str, text: str, shared: int) -> NoReturn:
        part = slice(max(0, shared - 40), shared + 40)
        raise _Unlearnable(
            f"the generation prompt is not a prefix of the conversation: {prompt[part]!r} vs. {text[part]!r}. "
            "Use a template that writes both the same way."
        )

    def _locate(
        self, raw: Sequence[Any], tools: Any, answering: bool, text: str
    ) -> dict[int, tuple[int, int, Role, str]]:
        """Locate the messages other than answers in `text`, by number.

        Raises:
            DataError: the template omits or repeats a message.
        """
        marked_messages = [
            {**message, "content": f"{MASK}{MASK}m{number}{MASK}"}
            if message["role"] != "assistant" and message["content"]
            else message
            for number, message in enumerate(raw)
        ]
        first, *pieces = _MARK.split(self._fill(marked_messages, tools, answering)[0])
        numbers = [*map(int, pieces[::2])]
        expected = [
            number for number, message in enumerate(marked_messages) if message["content"] != raw[number]["content"]
        ]
        if sorted(numbers) != expected:
            raise DataError(
                f"{WHERE}: expected the template to write the messages {', '.join(map(str, expected))}, "
                f"got {', '.join(map(str, numbers)) or 'none'}. Use one that writes each message once."
            )
        parts, offset = dict[int, tuple[int, int, Role, str]](), len(first)
        for number, following in zip(numbers, pieces[1::2], strict=True) if text.startswith(first) else ():
            content = raw[number]["content"]
            forms = (*forms_of(content), json_line(content)[1:-1])
            form = next((form for form in forms if text.startswith(form + following, offset)), None)
            if form is None:  # the template changed the content: the rest has the role of the template
                break
            parts[number] = (offset, offset + len(form), ROLE_OF[raw[number]["role"]], "")
            offset += len(form) + len(following)
        return parts

    def _fill(self, raw: Sequence[Any], tools: Any, answering: bool = False) -> tuple[str, Sequence[tuple[int, int]]]:
        """Render messages; returns the text and its spans within {% generation %}.

        Raises:
            DataError: the template fails.
        """
        if self._in_parts:
            raw = [{**message, "content": [{"type": "text", "text": message["content"]}]} for message in raw]
        settings = {"add_generation_prompt": answering, "return_assistant_tokens_mask": self.marks_answers}
        more = {**self.tokens, "date_string": "01 Jan 2025"}
        return render_template(WHERE, self._source, raw, tools=tools, **settings, **more)

    def _check(self) -> None:
        """Raises DataError if the template cannot be used for training.
        Renders one and two turns, with and without reasoning."""
        turns = [Message(("user", "assistant")[number % 2], f"Probe {number}.") for number in range(4)]
        try:
            self._set_parts(turns)
        except DataError as error:
            self.opening = [Message("system", "Probe.")]
            try:
                self._set_parts(turns)
            except DataError:
                raise error from None
            log.info("%s: the template requires a system message in each conversation.", WHERE)
        errors, earlier_learned = dict[str, DataError](), dict[str, bool]()
        for name, change in (
            ("answer", lambda turn: turn),
            ("reasoning", _with_reasoning),
            ("inline reasoning", _with_inline_reasoning),
        ):
            try:
                earlier_learned[name] = self._learns_earlier_answers(
                    [change(turn) if turn.role == "assistant" else turn for turn in turns]
                )
            except DataError as error:
                errors[name] = error
        if not earlier_learned:
            raise errors["answer"]
        if "answer" in errors:
            log.info(
                "%s: only answers with reasoning can be learned: the generation prompt starts the reasoning.", WHERE
            )
        for name in (name for name, earlier in earlier_learned.items() if not earlier):
            kind = "" if name == "answer" else f" with {name}"
            log.info(
                "%s: the template changes an answer%s once another message follows. Only a last answer%s is learned.",
                WHERE,
                kind,
                kind,
            )

    def _set_parts(self, turns: Sequence[Message]) -> None:
        """Detect whether contents must be lists of parts.
        Raises DataError if the template omits or repeats a message in both forms."""
        raw, errors = [Mask(self._controls).message(turn) for turn in (*self.opening, *turns)], list[DataError]()
        for self._in_parts in (False, True):
            try:
                text = self._fill(raw, None)[0]
            except DataError as error:
                errors.append(error)
                continue
            counts = [text.count(turn.content) for turn in turns]
            if counts == [1] * len(turns):
                _, *between = re.split("|".join(re.escape(turn.content) for turn in turns), text)
                if between[2] == between[3] and not between[1].startswith(between[3]):
                    raise DataError(
                        f"{WHERE}: the template writes the generation prompt {shorten(between[3])} after the "
                        "last answer too. Write it only if add_generation_prompt is true."
                    )
                return
            numbers = ", ".join(str(number) for number, count in enumerate(counts) for _ in range(count)) or "none"
            errors.append(
                DataError(
                    f"{WHERE}: expected the template to write the messages 0, 1, 2, 3, got {numbers}. "
                    "Use one that writes each message once."
                )
            )
        raise errors[0]

    def _learns_earlier_answers(self, turns: Sequence[Message]) -> bool:
        """Whether both answers of a conversation are learned.
        Raises DataError if the last answer is not learned, with or without the first turn."""
        answers = [span.text for span in self.spans([*self.opening, *turns]) if span.role is Role.ASSISTANT]
        self.spans([*self.opening, *turns[:2]])
        return any(turns[1].content in text for text in answers)


def _with_reasoning(message: Message) -> Message:
    return replace(message, reasoning=f"Reason of {message.content}")


def _with_inline_reasoning(message: Message) -> Message:
    return replace(message, content=f"<think>\nReason of it.\n</think>\n\n{message.content}")


def shorten(text: str) -> str:
    return repr(text if len(text) <= 60 else f"{text[:57]}...")


def _shared_length(one: str, other: str) -> int:
    """Length of the common prefix, by bisection."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one[:middle] == other[:middle] else (low, middle - 1)
    return low


def _without_blanks(text: str) -> str:
    return "".join(text.split())
