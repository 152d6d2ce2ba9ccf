"""Rows that are conversations, and what is said about those that are not; what an epoch reads of them."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from src.errors import DataError
from src.experiments.config import Places
from src.experiments.registry import DATASETS, bind
from src.systems.assistants.conversations.choices import Tags, draws, window
from src.systems.assistants.conversations.entries import Message, read_entry
from src.systems.assistants.conversations.refusals import refuses
from src.systems.assistants.conversations.rendering import Rendered, Role
from tests.systems.assistants.conversations import talk
from tests.systems.assistants.conversations.talk import row

TOKENIZER = talk.tokenizer()
TALK = [
    row("Hi", "Hello"),
    row("2 + 3?", "5", quality=0.84, lang="en"),
    {"text": "Once upon a time."},
    row("a", "b", "c", "d" * 40),
]


def write(folder: Path, rows: list[dict[str, Any]] = TALK, **options: Any) -> Any:
    """The data set of rows, read for a training."""
    talk.write_rows(folder / "talk", {"train": rows, "val": rows})
    return build(folder, "train", **options)


def build(folder: Path, split: str, **options: Any) -> Any:
    config = bind(DATASETS, {"name": "conversations", "corpus": "talk", "sequence_tokens": 60, **options})
    return config.build(Places(folder, folder), TOKENIZER, split, 0)


@pytest.mark.parametrize(
    ("raw", "match"),
    [
        ({}, "expected messages, prompt or text, got the keys"),
        ({"text": "a", "messages": []}, "expected either text or messages, got both"),
        ({"text": ""}, "text: empty"),
        ({"text": 3}, r"text: expected text, got 3 \(int\)"),
        ({"messages": []}, "no message of the assistant"),
        ({"messages": [{"role": "user", "content": "a"}]}, "no message of the assistant"),
        (
            {"messages": [{"role": "human", "content": "a"}]},
            r"messages\[0\]: unknown role 'human'. Known: assistant, system, tool, user",
        ),
        ({"messages": [{"role": "user"}]}, r"messages\[0\]: no key 'content'\. It has: role\."),
        ({"messages": ["a"]}, r"messages\[0\]: expected an object with role and content, got str"),
        ({"messages": [{"role": "assistant", "content": "a"}]}, "expected system or user first, got assistant"),
        (
            {"messages": [{"role": "user", "content": "a"}] * 2},
            r"messages\[1\]: roles do not alternate: expected assistant after user, got user",
        ),
        (row("a", "b", quality=1.5), "quality: expected a number between 0 and 1, got 1.5"),
        (row("a", "b", lang=3), r"lang: expected text, got 3 \(int\)"),
        (row("a", "\ud800"), "surrogate"),
        ({**row("a"), "replies": []}, "replies: expected a list of at least one reply"),
        ({**row("a"), "replies": [{"content": "b"}]}, r"replies\[0\]: no key 'rank'\. It has: content\."),
        (
            {**row("a"), "replies": [{"content": "b", "rank": 0}, {"content": "b", "rank": 2}]},
            r"replies\[0\] and replies\[1\] are equal but have ranks 0 and 2",
        ),
        ({**row("a", "b"), "replies": [{"content": "c", "rank": 0}]}, "the messages before replies end with assistant"),
    ],
)
def test_wrong_conversation_is_refused(raw: dict[str, Any], match: str):
    with pytest.raises(DataError, match=match):
        read_entry(raw, "x.jsonl:3")


def test_a_malformed_row_is_named_by_its_line(tmp_path: Path):
    with pytest.raises(DataError, match=r"train\.jsonl:2: messages\[1\]: roles do not alternate"):
        write(tmp_path, [TALK[0], {"messages": [{"role": "user", "content": "a"}] * 2}])


def test_samples_learn_the_answers_of_the_assistant(tmp_path: Path):
    data = write(tmp_path)
    assert len(data) == 4
    learned_texts = [
        TOKENIZER.decode(
            [token for token, is_learned in zip(sample["input_ids"], sample["loss_mask"], strict=True) if is_learned]
        )
        for sample in (data.sample(0, i) for i in range(4))
    ]
    assert learned_texts[:3] == ["Hello<end>", "5<end>", "nce upon a time.<end>"]
    assert [data.length(0, i) for i in range(4)] == [len(data.sample(0, i)["input_ids"]) for i in range(4)]
    batch = data.collate([data.sample(0, 0), data.sample(0, 2)])
    assert batch["loss_mask"].sum() == 6 + 17
    everything = build(tmp_path, "train", train_all_roles=True).sample(0, 0)
    assert everything["loss_mask"] == [False] + [True] * (len(everything["input_ids"]) - 1)
    with_system = build(tmp_path, "train", writing={"system": "Be kind"}).sample(0, 0)
    assert TOKENIZER.decode(with_system["input_ids"]).startswith("<|system|>Be kind<end><|prompter|>")


def test_of_ranked_replies_the_best_is_learned(tmp_path: Path):
    """As of webgpt's, to learn answers from."""
    ranked_row = {**row("a"), "replies": [{"content": "worse", "rank": 3}, {"content": "best", "rank": 1}]}
    sample = write(tmp_path, [ranked_row]).render(0, 0)
    assert TOKENIZER.decode(sample.ids) == "<|prompter|>a<end><|assistant|>best<end>"


def test_options_change_the_fingerprint(tmp_path: Path):
    plain = write(tmp_path).fingerprint
    assert plain == build(tmp_path, "train").fingerprint
    for options in (
        {"sequence_tokens": 50},
        {"train_all_roles": True},
        {"writing": {"template": "chatml"}},
        {"random_offset": 0.5},
    ):
        assert build(tmp_path, "train", **options).fingerprint != plain


def test_tags_come_before_their_answer_and_are_not_learned(tmp_path: Path):
    data = write(tmp_path, writing={"tags": {"length": True}})
    sample = build(tmp_path, "val", writing={"tags": {"length": True}}).render(0, 1)
    expected = "<|prompter|>2 + 3?<end><|system|>lang: en\nquality: 0.8\nlength: 1\n<end><|assistant|>5<end>"
    assert TOKENIZER.decode(sample.ids) == expected
    assert talk.mark_roles(sample, TOKENIZER, [Role.ASSISTANT]) == "5<end>"
    texts = Counter(TOKENIZER.decode(data.render(epoch, 1).ids) for epoch in range(60))
    assert len(texts) > 8, "each property is dropped by itself, and their order is drawn"
    assert [data.sample(7, 1), data.sample(8, 1)] == [
        build(tmp_path, "train", writing={"tags": {"length": True}}).sample(e, 1) for e in (7, 8)
    ]


@pytest.mark.parametrize(("words", "expected"), [(0, 1), (4, 1), (5, 2), (9, 2), (10, 3), (14, 3), (25, 6)])
def test_the_length_is_that_of_open_assistant(words: int, expected: int):
    assert Tags(length=True).write(Message("assistant", "word " * words), None) == f"length: {expected}\n"


def test_a_context_comes_last():
    message = Message("assistant", "a", {"context": " So. ", "lang": "en", "humor": 0.25, "creativity": 1.0})
    assert Tags().write(message, None) == "lang: en\nhumor: 0.2\ncreativity: 1.0\ncontext: So.\n"
    assert Tags(dropout=1.0).write(message, draws(1)) == ""


masks = st.lists(st.sampled_from([Role.USER, Role.ASSISTANT]), min_size=2, max_size=40)


@settings(max_examples=300, deadline=None)
@given(masks, st.integers(2, 40), st.floats(0, 1), st.integers(0, 5))
def test_a_window_always_has_something_to_learn(roles: list[Role], most: int, probability: float, seed: int):
    """If the whole has. In evaluations it is always the same; the answers of long prompts were lost (spec 1.3)."""
    whole = Rendered(list(range(len(roles))), [*roles])
    for draw in (lambda: draws(seed), None):
        part = window(whole, most, probability, draw)
        assert len(part.ids) == min(most, len(roles))
        assert part.ids == whole.ids[part.ids[0] : part.ids[0] + len(part.ids)]
        assert any(part.loss_mask) == any(whole.loss_mask)
        assert part == window(whole, most, probability, draw)


def test_windows_start_everywhere():
    whole = Rendered(list(range(100)), [Role.ASSISTANT] * 100)
    begins = Counter(window(whole, 10, 1.0, lambda i=i: draws(i)).ids[0] for i in range(3000))
    assert set(begins) == set(range(91))
    assert {window(whole, 10, 0.0, lambda i=i: draws(i)).ids[0] for i in range(50)} == {0}


@pytest.mark.parametrize(
    ("text", "is_refusal"),
    [
        ("As an AI language model, I do.", True),
        ("I\u2019m sorry, but I can\u2019t.", True),
        ("As a machine learning engineer at OpenAI", False),
        ("it was an ai", False),
    ],
)
def test_refusals_match_complete_words(text: str, is_refusal: bool, tmp_path: Path):
    """Spec 1.2: substrings took "As a machine learning engineer" and any "OpenAI"."""
    assert refuses(talk.messages("a", text)) == is_refusal
    assert not refuses(talk.messages(text, "a")), "what a user says does not matter"
    rows = [row("a", "b"), row("a", text)]
    assert len(write(tmp_path, rows, without_refusals=True)) == 2 - is_refusal
    if is_refusal:
        talk.write_rows(tmp_path / "talk", {"train": rows[1:], "val": rows})
        with pytest.raises(DataError, match="every conversation is a refusal"):
            build(tmp_path, "train", without_refusals=True)


def test_control_ends_training_conversations_with_other_answers(tmp_path: Path):
    def sample_texts(data: Any, epoch: int = 0) -> list[str]:
        return [TOKENIZER.decode(data.sample(epoch, n)["input_ids"]) for n in range(len(data))]

    plain = write(tmp_path, [row(f"question {n}", f"answer {n}") for n in range(6)])
    train, val = (build(tmp_path, split, shuffled_answers=True) for split in ("train", "val"))
    assert all(
        f"question {n}" in text and f"answer {n}" not in text and "answer" in text
        for n, text in enumerate(sample_texts(train))
    )
    assert sample_texts(train) == sample_texts(train, epoch=1)
    assert sample_texts(val) == sample_texts(plain)
    assert train.fingerprint != plain.fingerprint


def test_conversations_without_an_answer_are_counted_and_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """Rows without a token to learn; all of them is an error."""
    caplog.set_level("INFO")
    rows = [row("a", ""), row("b", "c"), row("d", " ", "e", ""), row("f", "", "g", "h"), {"text": "i"}]
    data = write(tmp_path, rows)
    assert [TOKENIZER.decode(data.sample(0, n)["input_ids"])[12:13] for n in range(len(data))] == ["b", "f", ""]
    assert "2 of 5 conversations have only empty answers" in caplog.text
    assert [data.row(n)["question"] for n in range(data.num_questions)] == ["b", "g"]
    assert len(build(tmp_path, "train", train_all_roles=True)) == 5
    with pytest.raises(DataError, match="all answers of the assistant are empty"):
        write(tmp_path, [row("a", "")] * 3)


def test_control_changes_the_answers_of_the_assistant(tmp_path: Path):
    """Also where a person has the last word."""
    data = write(tmp_path, [row(f"q{n}", f"a{n}", f"bye{n}") for n in range(6)], shuffled_answers=True)
    for n in range(6):
        sample_text = TOKENIZER.decode(data.sample(0, n)["input_ids"])
        assert all(text in sample_text for text in (f"q{n}", f"bye{n}", "<|assistant|>a"))
        assert f"a{n}" not in sample_text
