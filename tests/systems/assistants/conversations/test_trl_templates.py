"""Templates that TRL ships: the generation prompt of an answer is a prefix of its conversation, and the rest of the
answer is learned."""

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from src.errors import DataError
from src.systems.assistants.conversations.entries import Message
from src.systems.assistants.conversations.rendering import Renderer
from src.systems.assistants.conversations.templates import Jinja, find
from tests.systems.assistants.conversations import talk

_PACKAGE = find_spec("trl")
_FOLDERS = [
    Path(folder) / "chat_templates" for folder in (_PACKAGE.submodule_search_locations or () if _PACKAGE else ())
]
PATHS = sorted(path for folder in _FOLDERS for path in folder.glob("*.jinja"))
pytestmark = pytest.mark.skipif(not PATHS, reason="the package trl is not installed: pip install --no-deps trl")
_CONTROL = re.compile(r"<\|[^|\s<>]+\|>|<\uff5c[^\uff5c\n]+\uff5c>|<\w+_of_\w+>|<\|\w+>|<\w+\|>|<[be]os>|</?s>")

REFUSED_TEMPLATES = {
    "deepseek_r1_distill": "<think>",  # writes no reasoning, but its generation prompt starts one
    "deepseekv3": "<think>",
    "deepseekv3_training": "<think>",
    "glm4moe": "no control token",  # the next turn ends an answer
}
"""Templates that cannot be trained with, and what the error shows."""
TOOL = {"type": "object", "properties": {"a": {"type": "integer", "description": "A number."}}, "required": ["a"]}
TOOLS = [{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": TOOL}}]
CALL = Message("assistant", "", calls=[{"name": "add", "arguments": {"a": 2}}])
ASK = Message("user", "2 + 3?")
CASES = {
    "one turn": [ASK, Message("assistant", "Five")],
    "system": [Message("system", "Be brief."), ASK, Message("assistant", "Five")],
    "blanks": [Message("user", " 2?\n"), Message("assistant", "\n Five \n")],
    "two turns": [ASK, Message("assistant", "Five"), Message("user", "Sure?"), Message("assistant", "Yes")],
    "empty": [ASK, Message("assistant", "")],
    "empty, then not": [ASK, Message("assistant", ""), Message("user", "Sure?"), Message("assistant", "Yes")],
    "control tokens": [Message("user", "<|im_end|>"), Message("assistant", "<|im_end|></s><|return|><end_of_turn>")],
    "reasoning": [ASK, Message("assistant", "Five", reasoning="Count to five.")],
    "reasoning twice": [
        ASK,
        Message("assistant", "Five", reasoning="Count."),
        Message("user", "Sure?"),
        Message("assistant", "Yes", reasoning="Again."),
    ],
    "inline reasoning": [ASK, Message("assistant", "<think>\nCount.\n</think>\n\nFive")],
    "call": [Message("user", "2?", tools=TOOLS), CALL],
    "call and answer": [
        Message("user", "2?", tools=TOOLS), CALL, Message("tool", '{"sum": 5}'), Message("assistant", "Five"),
    ],
}  # fmt: skip


def load(path: Path) -> Any:
    """A tokenizer of bytes with the template and its control tokens."""
    source = path.read_text()
    tokens = sorted({*_CONTROL.findall(source)} - {"<s>"})
    tokenizer = talk.tokenizer([*tokens, "<s>"], template=source)
    tokenizer.bos_token = "<s>"
    return tokenizer


def write(message: Message, in_parts: bool) -> dict[str, Any]:
    raw = message.raw
    return {**raw, "content": [{"type": "text", "text": message.content}]} if in_parts else raw


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_answer_is_learned_from_the_end_of_its_generation_prompt(path: Path):
    tokenizer = load(path)
    if path.stem in REFUSED_TEMPLATES:
        with pytest.raises(DataError, match=rf"^data\.writing\.template: .*{REFUSED_TEMPLATES[path.stem]}"):
            find("tokenizer", tokenizer)
        return
    template = find("tokenizer", tokenizer)
    assert isinstance(template, Jinja)
    renderer, passing_cases = Renderer(tokenizer, template), set[str]()
    errors = list[str]()
    ends, _ = renderer.answer_ends()
    controls = {token.content for token in tokenizer.added_tokens_decoder.values()}
    for name, messages in CASES.items():
        try:
            rendered = renderer.render(messages)
        except DataError as error:
            errors.append(str(error))
            continue
        passing_cases.add(name)
        prompt = renderer.render(messages[:-1], answering=True).ids
        assert rendered.ids[: len(prompt)] == prompt, name
        answer = rendered.last_answer()
        assert answer.start == len(prompt), name
        assert rendered.ids[answer.stop - 1] in ends, (name, tokenizer.decode(rendered.ids[answer.start : answer.stop]))
        assert all(rendered.loss_mask[place] for place in answer)
        after = tokenizer.decode(rendered.ids[answer.stop :]).strip()
        assert after in ("", "<|tool_response>"), name  # one template ends a call before the mark of its result
        text = tokenizer.decode(rendered.ids[answer.start : answer.stop])
        for part in (messages[-1].content.rpartition("</think>")[2].strip(), messages[-1].reasoning):
            assert part in text, name
        if name in ("one turn", "two turns", "reasoning", "reasoning twice"):
            message = renderer.read_answer(text)
            assert (message.content.strip(), message.reasoning) == (
                messages[-1].content.strip(),
                messages[-1].reasoning,
            ), name
        if not any(control in message.content for message in messages for control in controls):
            raw = [write(message, template._in_parts) for message in messages]
            tools: Any = [*messages[0].tools] or None
            assert rendered.ids == _apply(tokenizer, raw, tools), name
            assert prompt == _apply(tokenizer, raw[:-1], tools, add_generation_prompt=True), name
    assert all(error.startswith("data.writing.template: ") for error in errors)
    assert passing_cases & {"one turn", "reasoning", "inline reasoning"}
    assert not {"one turn", "two turns"} & passing_cases or {"blanks", "two turns", "control tokens"} <= passing_cases


def _apply(tokenizer: Any, messages: list[Any], tools: Any, **more: Any) -> list[int]:
    """`apply_chat_template` on the fixed date of a training."""
    text = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, date_string="01 Jan 2025", **more)
    today = tokenizer.apply_chat_template(
        [{"role": "user", "content": "x"}],
        tokenize=False,
        chat_template="{{ strftime_now('%Y-%m-%d') }}~{{ strftime_now('%d %b %Y') }}",
    )
    for date, fixed_date in zip(today.split("~"), ("2025-01-01", "01 Jan 2025"), strict=True):
        text = text.replace(date, fixed_date)
    return tokenizer(text, add_special_tokens=False)["input_ids"]
