"""Reasoning before answers, and where an answer starts and ends: written by the template or refused."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from src.errors import DataError
from src.experiments.config import Places
from src.experiments.kinds import TokenizerSource
from src.experiments.registry import DATASETS, bind
from src.systems.assistants.conversations.entries import Message, read_entry
from src.systems.assistants.conversations.rendering import Renderer, Role
from src.systems.assistants.conversations.templates import CONTROLS, Jinja, find
from src.systems.assistants.policy_training import write_with
from src.systems.assistants.rewards.interface import Rollout
from src.systems.assistants.rollouts.prompts import Prompts
from tests.systems.assistants.conversations import talk

THINKS = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['reasoning_content'] %}{{ '<think>\n' + "
    "m['reasoning_content']"
    " + '\n</think>\n' }}{% endif %}{{ m['content'] }}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
STARTS_THINKING = THINKS.replace("'<|im_start|>assistant\n'", "'<|im_start|>assistant\n<think>\n'")
STRIPS = (
    "{% for m in messages %}{{ ('<|im_start|>' + m['role'] + '\n' + m['content']) | trim }}{{ '<|im_end|>' }}{% "
    "endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
PAIR = (
    "{% for m in messages %}{{ m['role'] + ': "
    "' + m['content'] + ('<|E|>' if m['role'] == 'assistant' else '') + '<|im_end|>' }}"
)
PAIR += "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"


def renderer(source: str, *tokens: str) -> Renderer:
    tokenizer = talk.tokenizer([*talk.TOKENS, *tokens], template=source)
    return Renderer(tokenizer, find("tokenizer", tokenizer))


def learned_texts(source: str, *messages: Message) -> list[str]:
    """The learned parts of a conversation."""
    writer = renderer(source, "<|E|>")
    rendered = writer.render(messages)
    parts, previous = list[list[int]](), False
    for token, is_learned in zip(rendered.ids, rendered.loss_mask, strict=True):
        if is_learned:
            parts[-1:] = [[*parts[-1], token]] if previous else [*parts[-1:], [token]]
        previous = is_learned
    return [talk.tokenizer([*talk.TOKENS, "<|E|>"]).decode(part) for part in parts]


ASK = Message("user", "2?")
ANSWER = Message("assistant", "two", reasoning="one, two")


def row(name: str = "reasoning_content", reasoning: Any = "one, two") -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "2?"}, {"role": "assistant", "content": "two", name: reasoning}]}


@pytest.mark.parametrize("name", ["reasoning_content", "thinking", "reasoning"])
def test_reasoning_of_a_row_is_learned(name: str, tmp_path: Path):
    talk.write_rows(tmp_path / "talk", {"train": [row(name)], "val": [row(name)]})
    config = bind(
        DATASETS,
        {"name": "conversations", "corpus": "talk", "sequence_tokens": 90, "writing": {"template": "tokenizer"}},
    )
    tokenizer = talk.tokenizer(template=THINKS)
    data: Any = config.build(Places(tmp_path, tmp_path), tokenizer, "train", 0)
    assert (
        talk.mark_roles(data.render(0, 0), tokenizer, [Role.ASSISTANT]) == "<think>\none, two\n</think>\ntwo<|im_end|>"
    )


def test_reasoning_of_ranked_replies_is_learned(tmp_path: Path):
    replies = [{"content": "two", "rank": 0, "thinking": "one, two"}, {"content": "two", "rank": 1, "thinking": "hm"}]
    ranked_row = {"messages": row()["messages"][:1], "replies": replies}
    talk.write_rows(tmp_path / "talk", {"train": [ranked_row], "val": [ranked_row]})
    config = bind(
        DATASETS,
        {"name": "ranked_replies", "corpus": "talk", "sequence_tokens": 90, "writing": {"template": "tokenizer"}},
    )
    tokenizer = talk.tokenizer(template=THINKS)
    data: Any = config.build(Places(tmp_path, tmp_path), tokenizer, "train", 0)
    texts = [talk.mark_roles(rendered, tokenizer, [Role.ASSISTANT]) for rendered in data.render(0, 0)]
    assert texts == ["<think>\none, two\n</think>\ntwo<|im_end|>", "<think>\nhm\n</think>\ntwo<|im_end|>"]


@pytest.mark.parametrize("template", ["oasst", "chatml", "tokenizer"])
@pytest.mark.parametrize("name", ["conversations", "ranked_replies"])
def test_template_that_cannot_write_reasoning_is_refused_at_the_start(name: str, template: str, tmp_path: Path):
    plain, wrong = row(reasoning=""), row()
    if name == "ranked_replies":
        other = {"content": "x", "rank": 1}
        plain, wrong = (
            {"messages": [ask], "replies": [{**best, "rank": 0}, other]}
            for ask, best in (plain["messages"], wrong["messages"])
        )
    talk.write_rows(tmp_path / "talk", {"train": [plain, wrong], "val": [plain]})
    config: Any = bind(
        DATASETS, {"name": name, "corpus": "talk", "sequence_tokens": 90, "writing": {"template": template}}
    )
    without = THINKS.replace("m['reasoning_content']", "''")
    with pytest.raises(DataError, match=r"talk/train\.jsonl:2: data\.writing\.template: .*'one, two'"):
        config.build(Places(tmp_path, tmp_path), talk.tokenizer(template=without), "train", 0)


@pytest.mark.parametrize("template", ["oasst", "chatml"])
def test_control_tokens_of_the_template_are_checked_before_the_training(template: str, tmp_path: Path):
    controls = CONTROLS[template]
    PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({"<end>": 0})),
        eos_token="<end>",
        extra_special_tokens=[controls[0]],
    ).save_pretrained(tmp_path)
    config: Any = bind(
        DATASETS, {"name": "conversations", "corpus": "talk", "sequence_tokens": 90, "writing": {"template": template}}
    )
    places = Places(tmp_path, tmp_path)
    with pytest.raises(DataError, match=r"^data\.writing\.template: .*" + re.escape(controls[1])):
        config.check_tokenizer(places, TokenizerSource(tmp_path))
    config.check_tokenizer(places, TokenizerSource(tmp_path, tuple(controls[1:])))


def test_reasoning_reaches_the_prompt_of_a_reward_model():
    entry = read_entry({"prompt": [*row()["messages"], {"role": "user", "content": "3?"}]}, "here")
    rollout = Rollout([message.raw for message in entry.messages], "three", {}, [], 1, True)
    tokenizer = talk.tokenizer(template=THINKS)
    assert "<think>\none, two\n</think>\ntwo<|im_end|>" in tokenizer.decode(write_with(tokenizer, "tokenizer")(rollout))


@pytest.mark.parametrize(
    ("raw", "place", "value"),
    [
        (row(reasoning=3), "here: messages[1]: reasoning_content", "3"),
        (row(reasoning="\0"), "here: messages[1]: reasoning_content", "U+0000"),
        ({"messages": [{**row()["messages"][0], "thinking": "x"}, row()["messages"][1]]}, "here: messages[0]", "user"),
        (
            {"messages": [row()["messages"][0], {**row()["messages"][1], "thinking": "x"}]},
            "here: messages[1]",
            "thinking",
        ),
        (
            {"messages": [row()["messages"][0], {"role": "assistant", "content": "a\0"}]},
            "here: messages[1]: content",
            "character 1",
        ),
        ({"messages": [row()["messages"][0]] * 2}, "here: messages[1]", "user"),
        ({"messages": []}, "here", "assistant"),
        ({"text": " \n"}, "here: text", "empty"),
        ({}, "here", "(none)"),
    ],
)
def test_wrong_row_is_refused_with_its_place(raw: dict[str, Any], place: str, value: str):
    with pytest.raises(DataError) as error:
        read_entry(raw, "here")
    assert str(error.value).startswith(place)
    assert value in str(error.value)


def test_answer_starts_where_the_generation_prompt_ends():
    assert learned_texts(THINKS, ASK, ANSWER) == ["<think>\none, two\n</think>\ntwo<|im_end|>"]
    assert learned_texts(STARTS_THINKING, ASK, ANSWER) == ["one, two\n</think>\ntwo<|im_end|>"]
    with pytest.raises(DataError, match=r"assistant\\n<think>\\n' vs. '.*assistant\\ntwo"):
        learned_texts(STARTS_THINKING, ASK, Message("assistant", "two"))


def test_end_of_two_tokens_is_learned():
    assert learned_texts(PAIR, ASK, Message("assistant", "two"), ASK, Message("assistant", "")) == [
        "two<|E|><|im_end|>",
        "<|E|><|im_end|>",
    ]
    writer = renderer(PAIR, "<|E|>")
    ends, never = writer.answer_ends()
    assert [writer.safe.control_id(token) for token in ("<end>", "<|im_end|>")] == ends
    assert writer.safe.control_id("<|im_start|>") in never
    assert writer.safe.control_id("<|E|>") not in never


def test_empty_answer_of_a_stripping_template_follows_its_prompt():
    writer = renderer(STRIPS)
    prompt = writer.render([ASK], answering=True).ids
    rendered = writer.render([ASK, Message("assistant", "")])
    assert rendered.ids[: len(prompt)] == prompt
    assert [rendered.ids[place] for place in rendered.last_answer()] == [writer.safe.control_id("<|im_end|>")]
    several = writer.render([ASK, Message("assistant", ""), ASK, Message("assistant", "two")])
    assert sum(several.loss_mask) == len("two") + 1, "an earlier empty answer is not learned"


@pytest.mark.parametrize("scheme", ["bytes", "first", "always"])
@pytest.mark.parametrize("content", ["\nfirst", "  indented", "one", "\n\n"])
def test_prompt_ids_are_a_prefix_although_tokens_would_merge(scheme: str, content: str):
    """Merges of blanks and line breaks would join the end of the prompt with the start of the answer."""
    blank, line = ("\u0120", "\u010a") if scheme == "bytes" else ("\u2581", "\n")
    merges = [(line, line), (blank, blank), (line, blank), (line, "o"), (blank, "o")]
    base = talk.tokenizer(merges=merges) if scheme == "bytes" else talk.metaspace_tokenizer(scheme, merges)
    for source in (THINKS, PAIR.replace("<|E|>", "<|im_end|>")):
        base.chat_template = source
        writer = Renderer(base, find("tokenizer", base))
        prompt = writer.render([ASK], answering=True).ids
        rendered = writer.render([ASK, Message("assistant", content)])
        assert rendered.ids[: len(prompt)] == prompt
        assert rendered.last_answer().start == len(prompt)
        text = base.decode(rendered.ids[len(prompt) :])
        assert text.replace("<|im_end|>", "").replace(" ", "") == content.replace(" ", "") + (
            "\n" if source is THINKS else ""
        )


def test_date_of_a_template_is_fixed():
    source = "{{ strftime_now('%d %B %Y') }}" + THINKS
    tokenizer = talk.tokenizer(template=source)
    assert tokenizer.decode(Renderer(tokenizer, find("tokenizer", tokenizer)).render([ASK, ANSWER]).ids).startswith(
        "01 January 2025<|im_start|>user"
    )


@pytest.mark.parametrize(
    ("source", "text", "message"),
    [
        (THINKS, "<think>\nhm\n</think>\ntwo", Message("assistant", "two", reasoning="hm")),
        (THINKS, "two", Message("assistant", "two")),
        (STARTS_THINKING, "hm\n</think>\ntwo", Message("assistant", "two", reasoning="hm")),
        (PAIR, "two<|E|><|im_end|>", Message("assistant", "two")),
    ],
)
def test_generated_answer_is_split_into_reasoning_and_content(source: str, text: str, message: Message):
    """So that the next prompt of a chat is written by the template from both."""
    assert renderer(source, "<|E|>").read_answer(text) == message


MARKED_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] + ': ' }}{% if m['role'] == 'assistant' and loop.last "
    "%}{% generation %}{{ m['content'] }}{{ '<|im_end|>' }}{% endgeneration %}{% else %}{{ m['content'] }}{{ "
    "'<|im_end|>' }}{% endif %}{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)


def test_only_marked_answers_are_learned():
    assert learned_texts(MARKED_TEMPLATE, ASK, Message("assistant", "two"), ASK, Message("assistant", "four")) == [
        "four<|im_end|>"
    ]
    early = MARKED_TEMPLATE.replace(
        "{{ m['content'] }}{{ '<|im_end|>' }}{% endg",
        "{{ '<|E|>' }}{% endgeneration %}{{ m['content'] }}{% generation %}{% endg",
    )
    with pytest.raises(DataError, match=r"data\.writing\.template: .*generation.*'Probe 3\.'"):
        renderer(early, "<|E|>")


def test_prompt_with_reasoning_that_no_template_writes_is_refused_with_its_row(tmp_path: Path):
    rows = [row(), {"prompt": [*row()["messages"], {"role": "user", "content": "3?"}]}]
    talk.write_rows(tmp_path / "talk", {"train": rows, "val": rows[:1]})
    config: Any = bind(DATASETS, {"name": "conversations", "corpus": "talk", "sequence_tokens": 90})
    plain = Renderer(talk.tokenizer(), find("oasst", talk.tokenizer()))
    prompts = Prompts(config.read(Places(tmp_path, tmp_path), "train"), plain, config.writing, "talk")
    assert len(prompts[0].messages) == 1
    with pytest.raises(DataError, match=r"talk/train\.jsonl:2: data\.writing\.template: .*'one, two'"):
        prompts[1]


class CountingJinja(Jinja):
    """Counts how often the template is filled."""

    fills = 0

    def _fill(self, *args: Any, **options: Any) -> Any:
        self.fills += 1
        return super()._fill(*args, **options)


def talk_of(pairs: int) -> list[Message]:
    answers = (" two\n", "two<|im_end|>x", "t", "")
    messages = [[Message("user", f" {n}?"), Message("assistant", answers[n % 3])] for n in range(pairs)]
    messages[3][1] = Message("assistant", "two", reasoning="one, two")
    messages[5][1] = Message("assistant", "")
    return [message for pair in messages for message in pair]


@pytest.mark.parametrize("source", [THINKS, STRIPS, PAIR])
def test_each_answer_of_a_long_conversation_is_learned(source: str):
    messages = [replace(message, reasoning="") for message in talk_of(9)] if source is not THINKS else talk_of(9)
    parts = learned_texts(source, *messages)
    expected = [learned_texts(source, ASK, message)[0] for message in messages if message.role == "assistant"]
    assert parts == [part for part in expected if part != "<|im_end|>" or source is not STRIPS]


def test_rendering_takes_linear_time_in_the_messages():
    fills = list[int]()
    for pairs in (8, 16, 32):
        template = CountingJinja(THINKS, {}, ["<|im_end|>"])
        template.fills = 0
        template.spans(talk_of(pairs))
        fills.append(template.fills)
    assert fills[0] == fills[1] == fills[2]


def test_template_that_requires_a_system_message():
    source = "{% if messages[0]['role'] != 'system' %}{{ raise_exception('No system.') }}{% endif %}" + THINKS
    system = Message("system", "Count.")
    assert learned_texts(source, system, ASK, ANSWER) == learned_texts(THINKS, system, ASK, ANSWER)
    writer = renderer(source)
    assert writer.answer_ends() == renderer(THINKS).answer_ends()
    assert writer.read_answer("<think>\nhm\n</think>\ntwo").reasoning == "hm"
    with pytest.raises(DataError, match=r"^data\.writing\.template: .*user assistant \(No system\.\)"):
        writer.render([ASK, ANSWER])


@pytest.mark.parametrize(
    ("source", "value"),
    [
        (THINKS.replace("{% if add_generation_prompt %}", "{% if true %}"), r"<\|im_start\|>assistant\\n"),
        ("{{ 1 // (messages | length - 4) }}" + THINKS, "zero"),
        ("{{ messages[0]['content'] | unknown }}", "unknown"),
    ],
)
def test_template_that_cannot_be_trained_with_is_refused(source: str, value: str):
    with pytest.raises(DataError, match=rf"^data\.writing\.template: .*{value}"):
        renderer(source)


def test_lost_earlier_answers_are_logged_at_load(caplog: pytest.LogCaptureFixture):
    caplog.set_level("INFO")
    renderer(THINKS)
    assert not caplog.messages
    renderer(THINKS.replace("m['reasoning_content'] %}", "m['reasoning_content'] and loop.last %}"))
    (message,) = caplog.messages
    assert "an answer with reasoning" in message


def test_mark_around_a_complete_conversation_is_refused():
    source = "{% generation %}" + THINKS.replace("{% if add", "{% endgeneration %}{% if add")
    with pytest.raises(DataError, match=r"^data\.writing\.template: .*generation.*Probe 2"):
        renderer(source)


def test_content_that_spells_a_mask_is_plain_text():
    assert learned_texts(THINKS, Message("user", "\x7f0\x7f"), Message("assistant", "\x7fm0\x7f")) == [
        "\x7fm0\x7f<|im_end|>"
    ]


def test_template_without_a_generation_prompt():
    source = (
        "{% for m in messages %}{{ ('user: "
        "' if m['role'] == 'user' else '') + m['content'] + '<|im_end|>' }}{% endfor %}"
    )
    assert learned_texts(source, ASK, Message("assistant", "two"), ASK, Message("assistant", "")) == [
        "two<|im_end|>",
        "<|im_end|>",
    ]
