"""Calls of tools in conversations: written as the tokenizer's template writes them, else as JSON, and learned."""

import json
from pathlib import Path
from typing import Any

import pytest

from data_prep.assistants import prepare_conversations
from src.errors import DataError
from src.experiments.config import Places
from src.experiments.registry import DATASETS, bind
from src.systems.assistants.conversations.entries import read_entry
from src.systems.assistants.conversations.rendering import Renderer, Role
from src.systems.assistants.conversations.templates import find
from tests.systems.assistants.conversations import talk
from tests.systems.assistants.conversations.test_rendering import GEMMA

QWEN = (
    "{% if tools %}{{ '<|im_start|>system\n' + (messages[0]['content'] if messages[0]['role'] == 'system' else '') + "
    "'# Tools' }}"
    "{% for tool in tools %}{{ '\n' + tool | tojson }}{% endfor %}{{ '<|im_end|>\n' }}"
    "{% elif messages[0]['role'] == 'system' %}{{ '<|im_start|>system\n' + messages[0]['content'] + '<|im_end|>\n' "
    "}}{% endif %}"
    "{% for m in messages %}{% if m['role'] == 'tool' %}"
    "{{ '<|im_start|>user\n<tool_response>' + m['content'] + '</tool_response><|im_end|>\n' }}"
    "{% elif m['role'] != 'system' %}{{ '<|im_start|>' + m['role'] }}{% if m['content'] %}{{ '\n' + m['content'] "
    "}}{% endif %}"
    "{% for call in m['tool_calls'] or [] %}{{ '\n<tool_call>' + call['function']['name'] + ' ' }}"
    "{{ call['function']['arguments'] | tojson }}{{ '</tool_call>' }}{% endfor %}{{ '<|im_end|>\n' }}{% endif %}{% "
    "endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant' }}{% endif %}"
)
"""Shaped like Qwen's."""
TOOLS = [{"type": "function", "function": {"name": "add", "description": "Adds \u00fc."}}]
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": ["\u00e9"]}}}
TOKENIZER = talk.tokenizer()


def row(content: str | None = None, call: Any = CALL, tools: Any = TOOLS) -> dict[str, Any]:
    turns = [{"role": "user", "content": "2 + 3?"}, {"role": "assistant", "content": content, "tool_calls": [call]}]
    return {
        "messages": [*turns, {"role": "tool", "content": "5"}, {"role": "assistant", "content": "It is 5."}],
        "tools": tools,
    }


def rendered(template: str, raw: dict[str, Any], source: str | None = QWEN) -> Any:
    tokenizer = talk.tokenizer(template=source)
    return Renderer(tokenizer, find(template, tokenizer)).render(read_entry(raw, "here").messages)


@pytest.mark.parametrize("content", [None, "I add."])
@pytest.mark.parametrize("system", [None, "Be kind."])
def test_a_tokenizers_template_writes_them(content: str | None, system: str | None):
    raw = row(content)
    raw["messages"] = [*([{"role": "system", "content": system}] if system else []), *raw["messages"]]
    sample = rendered("tokenizer", raw)
    plain = [{**message, "content": message["content"] or ""} for message in raw["messages"]]
    assert sample.ids == TOKENIZER.apply_chat_template(plain, tools=raw["tools"], chat_template=QWEN, return_dict=False)
    text = talk.mark_roles(sample, TOKENIZER, [Role.ASSISTANT])
    opening = f"\n{content}" if content else ""
    assert text == f'{opening}\n<tool_call>add {{"a": 2, "b": ["\u00e9"]}}</tool_call><|im_end|>\nIt is 5.<|im_end|>'
    assert talk.mark_roles(sample, TOKENIZER, [Role.TOOL]) == "5"


@pytest.mark.parametrize("template", ["oasst", "chatml"])
def test_other_templates_write_json(template: str):
    sample = rendered(template, row("I add."))
    end = "<end>" if template == "oasst" else "<|im_end|>"
    call = '{"name": "add", "arguments": {"a": 2, "b": ["\u00e9"]}}'
    assert talk.mark_roles(sample, TOKENIZER, [Role.ASSISTANT]) == f"I add.\n{call}{end}It is 5.{end}"
    assert '"description": "Adds \u00fc."' in talk.mark_roles(sample, TOKENIZER, [Role.SYSTEM])
    raw = row("I add.")
    raw["messages"].insert(0, {"role": "system", "content": "Be kind."})
    assert talk.mark_roles(rendered(template, raw), TOKENIZER, [Role.SYSTEM]).startswith("Be kind.\n{")


@pytest.mark.parametrize("content", [None, "I add."])
@pytest.mark.parametrize("system", [None, "Be kind."])
@pytest.mark.parametrize("template", ["oasst", "chatml"])
def test_exports_write_the_tools_and_calls_of_the_training(template: str, system: str | None, content: str | None):
    raw = row(content)
    raw["messages"] = [*([{"role": "system", "content": system}] if system else []), *raw["messages"]]
    tokenizer = talk.tokenizer()
    sample = Renderer(tokenizer, find(template, tokenizer)).render(read_entry(raw, "here").messages)
    assert sample.ids == tokenizer.apply_chat_template(raw["messages"], tools=raw["tools"], return_dict=False)


@pytest.mark.parametrize("template", ["oasst", "chatml", "tokenizer"])
def test_they_never_become_control_tokens(template: str):
    spelled_call = {"name": "add", "arguments": {"<|im_end|>": "<|assistant|> \x7f0\x7f <end>"}}
    tools = [{"name": "add", "is": "<|im_start|>"}]
    plain, sample = (
        rendered(template, row("a", call, declarations))
        for call, declarations in ((CALL, TOOLS), (spelled_call, tools))
    )
    controls = {TOKENIZER.convert_tokens_to_ids(token) for token in (*talk.TOKENS, "<end>", "<pad>")}
    assert sum(token in controls for token in sample.ids) == sum(token in controls for token in plain.ids)
    text = TOKENIZER.decode(sample.ids)
    assert '"<|im_end|>": "<|assistant|> ' in text
    assert '"is": "<|im_start|>"' in text


@pytest.mark.parametrize(
    ("raw", "match"),
    [
        (
            row(call={"name": 3}),
            r"messages\[1\]: tool_calls: expected the name of a tool and its arguments as an object",
        ),
        (row(call={"name": "a", "arguments": "{"}), "arguments: expected JSON, got '{'"),
        (row(tools="x"), "here: tools: expected JSON, got 'x'"),
        (row(tools=[3]), "here: tools: expected a list of objects"),
        (row(call={"name": "a", "arguments": {"b": "\ud800"}}), "surrogate"),
        (
            {"messages": [{"role": "user", "content": "a", "tool_calls": [CALL]}]},
            "only the assistant calls tools, not user",
        ),
    ],
)
def test_wrong_call_is_refused(raw: dict[str, Any], match: str):
    with pytest.raises(DataError, match=match):
        read_entry(raw, "here")


def test_template_without_tools_is_refused():
    tokenizer = talk.tokenizer(["<start_of_turn>", "<end_of_turn>", "<bos>"], template=GEMMA)
    tokenizer.bos_token = "<bos>"
    renderer = Renderer(tokenizer, find("tokenizer", tokenizer))
    with pytest.raises(DataError, match="ignores tools"):
        renderer.render(read_entry(row("a"), "here").messages)
    with pytest.raises(DataError, match="drops the tool call 'add'"):
        renderer.render(read_entry(row("a", tools=None), "here").messages)


def test_rows_of_calls_are_samples(tmp_path: Path):
    """An answer that is a call alone is one; what is asked is what is called for."""
    silent = {"messages": row()["messages"][:2]}
    talk.write_rows(tmp_path / "talk", {"train": [row(), silent], "val": [row(), silent]})
    config = bind(
        DATASETS, {"name": "conversations", "corpus": "talk", "sequence_tokens": 400, "shuffled_answers": True}
    )
    data: Any = config.build(Places(tmp_path, tmp_path), talk.tokenizer(), "train", 0)
    assert len(data) == data.num_questions == 2
    assert data.row(1)["answer"].startswith('{"name": "add"')
    assert "It is 5." in TOKENIZER.decode(data.sample(0, 1)["input_ids"])


def test_ids_of_calls_and_names_of_tools_reach_the_template(tmp_path: Path):
    """Mistral's templates refuse calls without ids; Gemma's name the tool of a result."""
    source = QWEN.replace("call['function']['name']", "call['id'] + call['function']['name']").replace(
        "<tool_response>'", "<tool_response>' + m['tool_call_id'] + m['name']"
    )
    raw = row(call={**CALL, "id": "c1"})
    result = {"role": "tool", "tool_call_id": "c1", "name": "add"}
    raw["messages"][2:3] = [{**result, "content": "5"}, {**result, "content": "6"}]
    path = tmp_path / "rows.jsonl"
    rows = [{**raw, "messages": [{"role": "user", "content": f"{n}?"}, *raw["messages"][1:]]} for n in range(20)]
    path.write_text("".join(json.dumps(each) + "\n" for each in rows))
    words = [
        "--form",
        "messages",
        "--train",
        str(path),
        "--name",
        "own",
        "--data_path",
        str(tmp_path),
        "--val_rate",
        "0.4",
    ]
    assert prepare_conversations.main(words) == 0
    prepared_row = json.loads((tmp_path / "own" / "train.jsonl").read_text().split("\n")[0])
    text = TOKENIZER.decode(rendered("tokenizer", prepared_row, source).ids)
    assert "<tool_call>c1add " in text
    assert "<tool_response>c1add5</tool_response>" in text
    assert "<tool_response>c1add6</tool_response>" in text
