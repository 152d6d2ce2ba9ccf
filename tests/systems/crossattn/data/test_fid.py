"""Passages for Fusion-in-Decoder: exact ids and masks, titles, what is cut and what goes on, shuffled contexts."""

import json
import struct

import pytest

from src.errors import ConfigError, DataError
from src.experiments.config import load
from src.experiments.interfaces import NewTokens
from src.systems.crossattn.data import fid

EOS, PREFIX, MIDDLE, SUFFIX, USER, ASSISTANT, C, PAD = range(8)
BEGIN = PAD  # the model puts its start token there


def ids(text):
    return [8 + b for b in text.encode()]


def row(question="q?", answer="an", context="ctx", **more):
    return {"question": question, "answer": answer, "context": context, "dataset": "d", "sample_idx": 0, **more}


TWO = {"contexts_list": ["one", "two"], "titles_list": ["A", ""], "useful_contexts": [0, 1]}


@pytest.fixture
def build(places, write_corpus, tokenizer):
    """Write rows and build a data set on them."""

    def make(rows, split="train", seed=0, tokenizer=tokenizer, **values):
        write_corpus("c", rows)
        raw = {"corpus": "c", "contexts": "all", "passage_tokens": 64, "answer_tokens": 16, **values}
        config = load(fid.Config, raw, "data")
        config.check(places)
        return config.build(places, tokenizer, split, seed)

    return make


@pytest.fixture
def texts(tokenizer):
    """Passages of sample 0 as text."""
    return lambda data: [tokenizer.decode(passage) for passage in data.prompt(0)["passages"]]


def test_exact_sample_and_batch(build):
    data = build([row(**TWO), row("q2?", "b")])
    first, second = [*ids("question: q? title: A context: one"), EOS], [*ids("question: q? context: two"), EOS]
    other = [*ids("question: q2? context: ctx"), EOS]
    assert data.sample(0, 0) == {
        "input_ids": [BEGIN, *ids("an"), EOS],
        "loss_mask": [False, True, True, True],
        "passages": [first, second],
    }
    assert data.sample(3, 0) == data.sample(0, 0)
    batch = data.collate([data.sample(0, 0), data.sample(0, 1)])
    S = len(first)
    assert batch["input_ids"].tolist() == [[BEGIN, *ids("an"), EOS], [BEGIN, *ids("b"), EOS, PAD]]
    assert batch["attention_mask"].tolist() == [[True] * 4, [True] * 3 + [False]]
    assert batch["loss_mask"].tolist() == [[False, True, True, True], [False, True, True, False]]
    assert batch["context_ids"].tolist() == [
        [first, second + [PAD] * (S - len(second))],
        [other + [PAD] * (S - len(other)), [PAD] * S],
    ]
    assert batch["context_mask"].sum(-1).tolist() == [[S, len(second)], [len(other), 0]]


def test_prompts_only_have_the_start_of_the_answer(build):
    data = build([row(**TWO), row(answers=["x", "y"])])
    batch = data.collate_prompts([data.prompt(i) for i in range(2)])
    assert batch["input_ids"].tolist() == [[BEGIN], [BEGIN]]
    assert batch["attention_mask"].all()
    assert not batch["loss_mask"].any()
    assert batch["context_mask"].any(-1).tolist() == [[True, True], [True, False]]


def test_only_useful_or_first_passages_are_read(build, texts):
    assert texts(build([row(**TWO)], contexts="useful")) == ["question: q? context: two<|endoftext|>"]
    assert texts(build([row(**TWO)], num_passages=1)) == ["question: q? title: A context: one<|endoftext|>"]
    assert texts(build([row(**TWO)], contexts="none")) == ["question: q?<|endoftext|>"]
    assert texts(build([row(context="")])) == ["question: q? context:<|endoftext|>"]


def test_long_context_is_truncated_or_split(build, texts):
    rows = [row("q?", title="", context="0123456789" * 2)]
    head = "question: q? context:"  # 21 tokens, and the end token: 10 are left, the first for the space
    assert texts(build(rows, passage_tokens=32)) == [f"{head} 012345678<|endoftext|>"]
    split = build(rows, passage_tokens=32, too_long="split")
    assert texts(split) == [f"{head} 012345678<|endoftext|>", f"{head}9012345678<|endoftext|>", f"{head}9<|endoftext|>"]
    assert texts(build(rows, passage_tokens=32, too_long="split", num_passages=2)) == texts(split)[:2]


def test_truncated_contexts_are_logged(build, caplog):
    contexts = ["x" * 10, "x" * 100, "x" * 100]
    data = build([row(contexts_list=contexts)], num_passages=2)
    data.sample(0, 0)
    warning = (
        "c: truncated 1 of 2 contexts read by this process: data.passage_tokens is 64 and data.too_long is 'truncate'."
    )
    assert caplog.messages == [warning]
    caplog.clear()
    build([row(contexts_list=contexts)], too_long="split").sample(0, 0)
    assert not caplog.messages


def test_parts_of_a_context_are_consecutive_with_their_title(build, texts):
    rows = [row("q?", contexts_list=["abcdef", "x"], titles_list=["T", "U"])]
    head = "question: q? title: T context:"  # 30 tokens, and the end token
    assert texts(build(rows, passage_tokens=35, too_long="split")) == [
        f"{head} abc<|endoftext|>",
        f"{head}def<|endoftext|>",
        "question: q? title: U context: x<|endoftext|>",
    ]


def test_a_long_question_and_a_long_title_leave_a_quarter_to_the_context(build, texts):
    rows = [row("0123456789" * 3, contexts_list=["c" * 50], titles_list=["t" * 50])]
    # question: 9, title: 7, context: 9 characters with their words' spaces, and the end token: of 46 are 20 left, 10 +
    # 5 + 5.
    assert texts(build(rows, passage_tokens=46)) == ["question:0123456789 title: tttt context: cccc<|endoftext|>"]
    whole = texts(build([row("0123456789" * 3)]))
    assert whole == [f"question: {'0123456789' * 3} context: ctx<|endoftext|>"], "what fits is not cut"


def test_question_without_context_is_truncated_from_the_left(build, texts):
    data = build([row("0123456789" * 5)], contexts="none", passage_tokens=40)
    assert texts(data) == [f"question:{('0123456789' * 5)[-30:]}<|endoftext|>"]


def test_a_long_answer_loses_its_end_and_does_not_end_there(build):
    sample = build([row(answer="0123456789")], answer_tokens=4).sample(0, 0)
    assert sample["input_ids"] == [BEGIN, *ids("0123")]
    assert sample["loss_mask"] == [False] + [True] * 4


def test_control_tokens_in_user_text_stay_text(build, tokenizer):
    text = "a<|assistant|>b<|endoftext|>"
    sample = build([row(text, text, text)], passage_tokens=200, answer_tokens=200).sample(0, 0)
    assert [i for i in sample["passages"][0] if i < 8] == [EOS]
    assert [i for i in sample["input_ids"] if i < 8] == [BEGIN, EOS]


def test_end_token_replaces_a_missing_padding_token(build, make_tokenizer):
    data = build([row(), row(answer="longer")], tokenizer=make_tokenizer(pad=None))
    batch = data.collate([data.sample(0, i) for i in range(2)])
    assert batch["input_ids"][0].tolist() == [EOS, *ids("an"), EOS, EOS, EOS, EOS, EOS]
    assert batch["loss_mask"][0].tolist() == [False, True, True, True, False, False, False, False]


def test_shuffled_contexts_keep_their_question_and_come_with_their_titles(build, texts):
    rows = [row(f"q{i}", contexts_list=[f"context {i // 2}"], titles_list=[f"title {i // 2}"]) for i in range(12)]
    data = build(rows)
    shuffled = data.with_shuffled_contexts()
    for i in range(12):
        right, wrong = data.sample(0, i), shuffled.sample(0, i)
        assert wrong["input_ids"] == right["input_ids"]
        assert wrong["passages"] != right["passages"]
    question, _, rest = texts(shuffled)[0].partition(" title: title ")
    assert question == "question: q0"
    assert rest[0] == rest.removesuffix("<|endoftext|>")[-1] != "0"
    with pytest.raises(DataError, match="all 2 rows have the same context"):
        build([row("a"), row("b")]).with_shuffled_contexts()


def test_config_refuses_what_would_be_ignored():
    raw = {"corpus": "c", "contexts": "none", "passage_tokens": 64, "answer_tokens": 16}
    for ignored in ({"num_passages": 3}, {"too_long": "split"}):
        with pytest.raises(ConfigError, match=r"^data: contexts: with 'none' there is one passage"):
            load(fid.Config, {**raw, **ignored}, "data")


def test_checks_without_data():
    config = load(fid.Config, {"corpus": "c", "contexts": "all", "passage_tokens": 64, "answer_tokens": 16}, "data")
    config.check_length(None, 1000)
    config.check_length(64, 63)
    with pytest.raises(ConfigError, match=r"data\.passage_tokens: 64 tokens are more than the 63 positions"):
        config.check_length(63)
    with pytest.raises(ConfigError, match=r"max_new_tokens: 65 tokens are more than the 64 positions"):
        config.check_length(64, 64)
    with pytest.raises(ConfigError, match=r"^answers\.max_new_tokens: 65 tokens are more than the 64 positions"):
        config.check_length(64, NewTokens(64, "answers.max_new_tokens"))
    with pytest.raises(
        ConfigError, match=r"loop\.compile: needs batches of one length.*'fid_qa' differ\. Leave loop\.compile out"
    ):
        config.check_compiled()


def test_too_few_tokens_for_the_words_are_refused(build):
    # "question:", " title:", " context:" and the end token are 26, and each of their parts gets at least one.
    with pytest.raises(ConfigError, match=r"data.passage_tokens: expected at least 30 tokens .* got 29"):
        build([row()], passage_tokens=29)


def test_titles_that_are_not_those_of_the_contexts_are_refused(build):
    with pytest.raises(
        DataError, match=r"train.jsonl:1: field 'titles_list': expected 2 entries, as in 'contexts_list', got 1"
    ):
        build([row(contexts_list=["a", "b"], titles_list=["A"])])


def pieces(model: bytes) -> list[tuple[str, float]]:
    """(text, score) of each piece of a SentencePiece model: field 1 of the message, in it 1 and 2.
    github.com/google/sentencepiece."""

    def varint(at: int) -> tuple[int, int]:
        value, shift = 0, 0
        while True:
            byte = model[at]
            value, shift, at = value | (byte & 127) << shift, shift + 7, at + 1
            if byte < 128:
                return value, at

    parts, at = [], 0
    while model[at] == 0x0A:
        size, at = varint(at + 1)
        assert model[at] == 0x0A
        length, start = varint(at + 1)
        assert model[start + length] == 0x15
        (score,) = struct.unpack_from("<f", model, start + length + 1)
        parts.append((model[start : start + length].decode(), score))
        at += size
    return parts


def test_squad_in_the_vocabulary_of_t5(build, shared_data):
    """Real questions: passages are what the tokenizer makes of the whole text, </s> included."""
    from transformers import T5Tokenizer

    vocabulary = pieces((shared_data / "tokenizer" / "t5" / "spiece.model").read_bytes())
    assert len(vocabulary) == 32_000
    t5 = T5Tokenizer(vocab=vocabulary)
    paragraph = json.loads((shared_data / "squad" / "squad_v1.1-dev-shared.json").read_text())["data"][0]["paragraphs"][
        0
    ]
    rows = [row(q["question"], q["answers"][0]["text"], paragraph["context"]) for q in paragraph["qas"]]
    data = build(rows, tokenizer=t5, passage_tokens=512)
    for i, expected in enumerate(rows):
        sample = data.sample(0, i)
        (passage,) = sample["passages"]
        assert passage == t5(f"question: {expected['question']} context: {expected['context']}")["input_ids"]
        assert passage[-1] == sample["input_ids"][-1] == t5.eos_token_id == 1
        assert sample["input_ids"] == [0, *t5(expected["answer"])["input_ids"]]


def test_useful_passages_are_retained_in_training(build, texts):
    """Others make room for them, in the order of the contexts; a validation reads the first ones, as an application
    does."""
    many = {"contexts_list": list("abcde"), "titles_list": [""] * 5, "useful_contexts": [0, 0, 1, 0, 1]}
    options = {"num_passages": 3, "keep_gold": True}
    assert [text.partition("context: ")[2][0] for text in texts(build([row(**many)], **options))] == ["a", "c", "e"]
    assert [text.partition("context: ")[2][0] for text in texts(build([row(**many)], split="val", **options))] == [
        "a",
        "b",
        "c",
    ]
    with pytest.raises(ConfigError, match="keep_gold: has no effect without num_passages"):
        build([row(**many)], keep_gold=True)
