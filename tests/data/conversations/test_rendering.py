"""Conversations as ids with a role for each token: what is learned, and what text can never become."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from src.data.conversations import ranked
from src.data.conversations.entries import Message, Reply
from src.data.conversations.rendering import Renderer, Role
from src.data.conversations.templates import ChatML, Jinja, OpenAssistant, find
from src.errors import DataError
from src.models.load import ROOT
from src.registry import DATASETS, bind
from tests.data.conversations import talk

MADE = talk.tokenizer()
SOURCES = {name: (ROOT / "resources" / "chat_templates" / f"{name}.jinja").read_text() for name in ("oasst", "chatml")}
TEMPLATES = {
    "oasst": OpenAssistant("<end>"),
    "chatml": ChatML(),
    "oasst.jinja": Jinja(SOURCES["oasst"], {"eos_token": "<end>"}),
    "chatml.jinja": Jinja(SOURCES["chatml"], {"eos_token": "<end>"}),
}
RENDERERS = {name: Renderer(MADE, template) for name, template in TEMPLATES.items()}
TOKENIZERS = {
    "bytes": MADE,
    "stripping": talk.tokenizer(strips=True),
    **{scheme: talk.metaspace_tokenizer(scheme) for scheme in ("first", "always")},
}
ALL_RENDERERS = {kind: {name: Renderer(made, template) for name, template in TEMPLATES.items()} for kind, made in TOKENIZERS.items()}
ALL = list(Role)
texts = st.text(st.characters(codec="utf-8"), max_size=12) | st.sampled_from(
    ["<|assistant|>", "<end>", "<|im_end|>\n", " a ", "{{ 1 }}", "\n"]
)
talks = st.lists(texts, min_size=2, max_size=6).filter(lambda said: len(said) % 2 == 0)


def test_open_assistants_form():
    found = RENDERERS["oasst"].render(talk.messages("Hi", "Hello", "Bye", "See you", system="Be kind"))
    whole = "<|system|>Be kind<end><|prompter|>Hi<end><|assistant|>Hello<end><|prompter|>Bye<end><|assistant|>See you<end>"
    assert talk.shown(found, MADE, ALL) == whole
    assert talk.shown(found, MADE, [Role.ASSISTANT]) == "Hello<end>See you<end>", "B1: never the system's"
    asked = RENDERERS["oasst"].render(talk.messages("Hi"), answering=True)
    assert talk.shown(asked, MADE, ALL) == "<|prompter|>Hi<end><|assistant|>"
    assert not any(asked.learned)


def test_chatml():
    found = RENDERERS["chatml"].render(talk.messages("Hi", "Hello"))
    assert talk.shown(found, MADE, ALL) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello<|im_end|>\n"
    assert talk.shown(found, MADE, [Role.ASSISTANT]) == "Hello<|im_end|>"


@settings(max_examples=100, deadline=None)
@given(talks, st.none() | texts, st.sampled_from(["oasst", "chatml"]), st.sampled_from([*TOKENIZERS]))
@example([" a ", " b "], " ", "oasst", "stripping")
@example([" a ", " b "], " ", "chatml", "stripping")
@example(["a", "b"], None, "oasst", "first")
@example(["", "\x1f"], None, "oasst", "stripping")
def test_ours_and_jinjas_are_the_same(said: list[str], system: str | None, name: str, kind: str):
    """With whatever is said, and with what other programs make of the template where it spells no control token."""
    conversation, made = talk.messages(*said, system=system), TOKENIZERS[kind]
    ours, theirs = (ALL_RENDERERS[kind][template].render(conversation) for template in (name, f"{name}.jinja"))
    assert ours == theirs
    if not any("<" in message.content for message in conversation):
        wanted = made.apply_chat_template(
            [{"role": message.role, "content": message.content} for message in conversation], chat_template=SOURCES[name], return_dict=False
        )
        assert ours.ids == wanted


@settings(max_examples=100, deadline=None)
@given(talks, st.none() | texts, st.sampled_from([*RENDERERS]))
def test_prompt_is_a_prefix_of_its_conversation(said: list[str], system: str | None, name: str):
    """Each answer is learned behind exactly what it is asked with; and text never becomes a control token."""
    renderer, conversation = RENDERERS[name], talk.messages(*said, system=system)
    whole = renderer.render(conversation)
    assert len(whole.ids) == len(whole.roles)
    for number, message in enumerate(conversation):
        if message.role == "assistant":
            asked = renderer.render(conversation[:number], answering=True)
            assert whole.ids[: len(asked.ids)] == asked.ids
            answered = renderer.render(conversation[: number + 1])
            learned = [token for token, wanted in list(zip(answered.ids, answered.learned, strict=True))[len(asked.ids) :] if wanted]
            assert MADE.decode(learned) == message.content + ("<end>" if "oasst" in name else "<|im_end|>")
    controls = {MADE.convert_tokens_to_ids(token) for token in (*talk.TOKENS, "<end>", "<pad>")}
    turns = sum(token in controls for token in whole.ids)
    assert turns == 2 * len(conversation)


def test_a_template_that_strips_is_heeded():
    source = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] | trim }}{{ eos_token }}{% endfor %}"
    source += "{% if add_generation_prompt %}assistant: {% endif %}"
    found = Renderer(MADE, Jinja(source, {"eos_token": "<end>"})).render(talk.messages(" a ", " b "))
    assert talk.shown(found, MADE, ALL) == "user: a<end>assistant: b<end>"
    assert talk.shown(found, MADE, [Role.ASSISTANT]) == "b<end>"


NO_END = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}{% endfor %}{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
CHANGES = (
    "{% for m in messages %}{{ m['role'] }}{% if loop.last or m['role'] == 'user' %} {{ m['content'] }}"
    "{% else %}(thought) {{ m['content'] }}{% endif %}{{ eos_token }}{% endfor %}{% if add_generation_prompt %}assistant{% endif %}"
)


@pytest.mark.parametrize(
    ("source", "match"),
    [
        (
            "{% for m in messages %}{% if m['role'] == 'user' %}{{ m['content'] }}{% endif %}{% endfor %}",
            "data.writing.template: .*messages 0 2 of 0 1 2 3",
        ),
        ("{% for m in messages %}{{ m['content'] }}{{ m['content'] }}{% endfor %}", "messages 0 0 1 1 2 2 3 3 of 0 1 2 3"),
        ("{{ raise_exception('no') }}", r"user assistant user assistant \(no\)"),
        ("{% for m in messages %}{{ m['content'] }}", "the template refuses"),
        ("{{ messages | length }}{% for m in messages %}{{ m['content'] }}{% endfor %}", "'3Probe 0.* against '4Probe 0"),
        (NO_END, "no control token ends the answer 'Probe 3.'"),
        (NO_END.replace(": ", "<|im_start|>"), "no control token ends the answer"),  # the next turn's is no end
        (
            NO_END.replace("{{ m['content'] }}", "{% generation %}{{ m['content'] }}{% endgeneration %}{{ eos_token }}"),
            r"no control token ends .* within \{% generation %\}",
        ),
    ],
)
def test_a_template_that_cannot_be_trained_is_refused(source: str, match: str):
    with pytest.raises(DataError, match=match):
        find("tokenizer", talk.tokenizer(template=source))


GEMMA = (
    "{{ bos_token }}{% for m in messages %}{{ '<start_of_turn>' + ('model' if m['role'] == 'assistant' else m['role']) + '\n'"
    " + m['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)


def test_ends_of_turns_are_learned_whatever_they_are_called():
    """Gemma's are neither among the tokenizer's named tokens nor written as <|...|>."""
    made = talk.tokenizer(["<start_of_turn>", "<end_of_turn>", "<bos>"], template=GEMMA)
    made.bos_token = "<bos>"
    found = Renderer(made, find("tokenizer", made)).render(talk.messages("Hi", "Hello", "Bye", ""))
    assert talk.shown(found, made, [Role.ASSISTANT]) == "Hello<end_of_turn><end_of_turn>"
    assert made.decode([found.ids[place] for place in found.last_answer()]) == "<end_of_turn>", "of an empty answer: not the one before"
    assert found.ids == made.apply_chat_template(
        [{"role": m.role, "content": m.content} for m in talk.messages("Hi", "Hello", "Bye", "")], return_dict=False
    )


def test_end_token_that_also_starts_sequences_is_learned():
    """As where a vocabulary has one control token."""
    source = "{{ eos_token }}" + NO_END.replace("{{ m['content'] }}", "{{ m['content'] + eos_token }}")
    found = Renderer(MADE, Jinja(source, {"eos_token": "<end>"})).render(talk.messages("a", "b", "c", "d"))
    assert talk.shown(found, MADE, [Role.ASSISTANT]) == "b<end>d<end>"


@pytest.mark.parametrize("marks", [False, True])
def test_answer_that_the_template_changes_later_is_not_learned(marks: bool):
    source = CHANGES
    if marks:
        source = "{% for m in messages %}{{ m['role'] }}{% if m['role'] == 'user' %} {{ m['content'] }}{{ eos_token }}{% elif loop.last %}"
        source += (
            "{% generation %} {{ m['content'] }}{{ eos_token }}{% endgeneration %}{% else %}(thought) {{ m['content'] }}{{ eos_token }}"
        )
        source += "{% endif %}{% endfor %}{% if add_generation_prompt %}assistant{% endif %}"
    renderer = Renderer(MADE, find("tokenizer", talk.tokenizer(template=source)))
    rendered = renderer.render(talk.messages("a", "b", "c", "d"))
    assert talk.shown(rendered, MADE, ALL) == "user a<end>assistant(thought) b<end>user c<end>assistant d<end>"
    assert talk.shown(rendered, MADE, [Role.ASSISTANT]) == " d<end>"


def test_missing_control_tokens_are_refused():
    for name, lacks in (("oasst", "<|prompter|>"), ("chatml", "<|im_start|>")):
        with pytest.raises(DataError, match=rf"{name}.*{lacks[2:-2]}.*which the tokenizer does not have"):
            find(name, talk.tokenizer([]))
    with pytest.raises(DataError, match="the tokenizer has no chat template of its own"):
        find("tokenizer", MADE)


def test_plain_text_is_learned_to_its_end():
    """B12: its last token was trained on the first one."""
    found = RENDERERS["oasst"].render_text("ab<|assistant|>")
    assert MADE.decode(found.ids) == "ab<|assistant|><end>"
    assert found.learned == [False] + [True] * (len(found.ids) - 1)


def test_ids_do_not_depend_on_the_seed_of_hashes():
    """B2: control tokens were added in the order of a set."""
    code = (
        "from tests.data.conversations import talk; from src.data.conversations.rendering import Renderer, Role;"
        "from src.data.conversations.templates import find;"
        "own = '{% for m in messages %}{{ m.role }}:{{ m.content }}<e>x{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}';"
        "made = talk.tokenizer([*talk.TOKENS, '<e>', '<e>x', '<e>xx'], template=own);"
        "found = [Renderer(made, find(n, made)).render(talk.messages('a', 'b', system='c')) for n in ('oasst', 'chatml', 'tokenizer')];"
        "print([(each.ids, each.learned) for each in found], talk.shown(found[2], made, [Role.ASSISTANT]))"
    )
    told = {
        subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, env={**os.environ, "PYTHONHASHSEED": seed}, check=True, capture_output=True, text=True
        ).stdout
        for seed in ("1", "2", "77")
    }
    assert len(told) == 1
    assert told.pop().strip().endswith(" b<e>x"), "the longest control token, where one begins with another"


def test_a_tool_speaks_after_the_assistant():
    found = RENDERERS["chatml"].render([*talk.messages("2 + 3?", "add(2, 3)"), Message("tool", "5"), Message("assistant", "It is 5.")])
    assert talk.shown(found, MADE, [Role.TOOL]) == "5"
    assert talk.shown(found, MADE, [Role.ASSISTANT]) == "add(2, 3)<|im_end|>It is 5.<|im_end|>"


def test_a_tokenizer_is_saved_with_the_template_that_was_trained_with(tmp_path: Path):
    """Whatever it came with, which is its own as long as it is in memory."""
    from transformers import AutoTokenizer

    made = talk.tokenizer(template=SOURCES["chatml"])
    for _ in range(2):
        find("oasst", made)
        own = find("tokenizer", made)
        assert isinstance(own, Jinja)
        assert own.source == SOURCES["chatml"]
    made.save_pretrained(tmp_path)
    assert AutoTokenizer.from_pretrained(tmp_path).chat_template == SOURCES["oasst"]


def test_no_start_token_is_within_a_conversation():
    """B24: a tokenizer that begins with one put it before every reply, too, as prompt and reply were tokenised apart."""
    from tokenizers.processors import TemplateProcessing

    made = talk.tokenizer([*talk.TOKENS, "<s>"])
    start = made.convert_tokens_to_ids("<s>")
    made.bos_token = "<s>"
    made.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", start)])
    config = bind(DATASETS, {"name": "ranked_replies", "corpus": "any", "sequence_tokens": 64})
    for template in (OpenAssistant("<end>"), ChatML()):
        renderer = Renderer(made, template)
        asked = renderer.render(talk.messages("a"), answering=True)
        found = ranked.render_reply(config, renderer, talk.messages("a"), Reply("b", 0))
        assert found.ids[: len(asked.ids)] == asked.ids
        assert [place for place, token in enumerate(found.ids) if token == start] == [0]
        assert not found.learned[0]
