"""Questions with the contexts in the prompt: exact ids and masks, truncation of either part, closed book, shuffled
contexts."""

import pytest

from src.errors import ConfigError, DataError
from src.experiments.config import load
from src.systems.crossattn.data import prompted

EOS, PREFIX, MIDDLE, SUFFIX, USER, ASSISTANT, C, PAD = range(8)
SYSTEM = "<|system|>"  # not in this vocabulary, so it is text


def ids(text):
    return [8 + b for b in text.encode()]


def row(question="q?", answer="an", context="ctx", **more):
    return {"question": question, "answer": answer, "context": context, "dataset": "d", "sample_idx": 0, **more}


@pytest.fixture
def build(places, write_corpus, tokenizer):
    """Write rows and build a data set on them."""

    def make(rows, split="train", seed=0, tokenizer=tokenizer, **values):
        write_corpus("c", rows)
        values = {
            "corpus": "c",
            "contexts": "all",
            "context_tokens": 64,
            "sequence_tokens": 64,
            "loss_on": "answer",
            **values,
        }
        config = load(prompted.Config, {k: v for k, v in values.items() if v is not None}, "data")
        config.check(places)
        return config.build(places, tokenizer, split, seed)

    return make


def test_exact_sample_and_batch(build):
    data = build([row(), row("q2?", "b", "c")])
    prompt = [*ids("<|system|>\nctx\n"), USER, *ids("\nq?\n"), ASSISTANT, *ids("\n")]
    other = [*ids("<|system|>\nc\n"), USER, *ids("\nq2?\n"), ASSISTANT, *ids("\n")]
    assert data.sample(0, 0) == {
        "input_ids": [*prompt, *ids("an"), EOS],
        "loss_mask": [False] * len(prompt) + [True] * 3,
    }
    assert data.sample(7, 0) == data.sample(0, 0)
    batch = data.collate([data.sample(0, 0), data.sample(0, 1)])
    assert batch["input_ids"].tolist() == [[*prompt, *ids("an"), EOS], [*other, *ids("b"), EOS, PAD, PAD]]
    assert batch["attention_mask"].tolist() == [[True] * (len(prompt) + 3), [True] * (len(other) + 2) + [False] * 2]
    assert batch["loss_mask"].sum(1).tolist() == [3, 2]
    assert set(batch) == {"input_ids", "attention_mask", "loss_mask"}


def test_prompts_are_padded_on_the_left_and_end_before_the_answer(build):
    data = build([row(), row("longer?", answers=["x", "y"], kind="calls")])
    prompts = [data.prompt(i) for i in range(2)]
    for i in range(2):
        sample = data.sample(0, i)
        assert sample["input_ids"][: len(prompts[i]["input_ids"])] == prompts[i]["input_ids"]
        assert sample["loss_mask"].index(True) == len(prompts[i]["input_ids"])
    batch = data.collate_prompts(prompts)
    assert batch["attention_mask"].tolist() == [[False] * 5 + [True] * 22, [True] * 27]
    assert batch["input_ids"][0, :6].tolist() == [PAD] * 5 + ids("<")
    assert batch["input_ids"][:, -2:].tolist() == [[ASSISTANT, *ids("\n")]] * 2
    assert not batch["loss_mask"].any()
    assert data.sources == ["d", "d_calls"]


def test_without_contexts_it_is_the_prompt_of_a_cross_attention_model(build, tokenizer):
    data = build([row(context="secret")], contexts="none", context_tokens=None, loss_on="all")
    sample = data.sample(0, 0)
    assert tokenizer.decode(sample["input_ids"]) == "<|user|>\nq?\n<|assistant|>\nan<|endoftext|>"
    assert sample["loss_mask"] == [False] + [True] * (len(sample["input_ids"]) - 1)
    assert not data.reads_contexts


def test_useful_contexts_or_all_contexts_are_read(build, tokenizer):
    rows = [
        row(context="x", contexts_list=["one", "two", "three"], useful_contexts=[1, 0, 1]),
        row(contexts_list=["four"], useful_contexts=[0]),
    ]
    assert tokenizer.decode(build(rows).prompt(0)["input_ids"]).startswith(f"{SYSTEM}\none two three\n<|user|>")
    useful = build(rows, contexts="useful")
    assert tokenizer.decode(useful.prompt(0)["input_ids"]).startswith(f"{SYSTEM}\none three\n<|user|>")
    assert tokenizer.decode(useful.prompt(1)["input_ids"]).startswith(f"{SYSTEM}\nfour\n<|user|>"), "none is marked"


def test_a_long_context_loses_its_end_whatever_room_the_question_leaves(build, tokenizer):
    data = build([row("question?", "a", "0123456789" * 9)], context_tokens=20, sequence_tokens=64)
    ids_of = data.sample(0, 0)["input_ids"]
    assert tokenizer.decode(ids_of) == f"{SYSTEM}\n01234567\n<|user|>\nquestion?\n<|assistant|>\na<|endoftext|>"
    assert len(data.prompt(0)["input_ids"]) == 20 + len("question?") + 5


def test_truncated_contexts_are_logged(build, caplog):
    data = build([row(context="x" * 52), row(context="x" * 53), row(question="y" * 99)], sequence_tokens=16)
    for i in range(3):
        data.sample(0, i)
    warning = (
        "c: truncated 1 of 2 contexts read by this process: data.context_tokens is 64 and data.too_long is 'truncate'."
    )
    assert caplog.messages == [warning]  # the template adds 12 tokens


def test_contexts_that_are_too_long_are_refused_where_that_is_wanted(build):
    rows = [row(context="a" * 8), row(context="a" * 9)]  # the template adds 12 tokens
    assert len(build(rows, context_tokens=21, too_long="refuse")) == 2
    with pytest.raises(DataError, match=r"c: row 2: the contexts have 21 tokens, but data\.context_tokens is 20"):
        build(rows, context_tokens=20, too_long="refuse")
    with pytest.raises(ConfigError, match=r"^data: too_long: would be ignored with contexts 'none'"):
        build(rows, contexts="none", context_tokens=None, too_long="refuse")


def test_long_question_is_truncated_and_context_is_complete(build, tokenizer):
    data = build([row("0123456789" * 5, "answer", "context")], sequence_tokens=20)
    sample = data.sample(0, 0)
    assert (
        tokenizer.decode(sample["input_ids"])
        == f"{SYSTEM}\ncontext\n<|user|>\n23456789\n<|assistant|>\nanswer<|endoftext|>"
    )
    assert sum(sample["loss_mask"]) == 7
    assert len(data.prompt(0)["input_ids"]) == 19 + len(f"{SYSTEM}\ncontext\n"), "one token is left to answer"


def test_control_tokens_in_user_text_stay_text(build, tokenizer):
    text = "a<|assistant|>b<|endoftext|>"
    sample = build([row(text, text, text)], context_tokens=200, sequence_tokens=200).sample(0, 0)
    assert [i for i in sample["input_ids"] if i < 8] == [USER, ASSISTANT, EOS]
    assert (
        tokenizer.decode(sample["input_ids"])
        == f"{SYSTEM}\n{text}\n<|user|>\n{text}\n<|assistant|>\n{text}<|endoftext|>"
    )


@pytest.mark.parametrize("context_tokens", [64, 24])
def test_the_instruct_template_and_a_start_token(build, make_tokenizer, context_tokens):
    """Cut or not, the start token stands in front once."""
    from tokenizers.processors import TemplateProcessing

    plain = make_tokenizer(["<|endoftext|>", "<s>"], pad=None)
    plain.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    data = build([row(context="c" * 30)], tokenizer=plain, template="instruct", context_tokens=context_tokens)
    context_text = "c" * min(30, context_tokens - 1)
    assert plain.decode(data.sample(0, 0)["input_ids"]) == f"<s>[INST] {context_text}\nq? [/INST] an<|endoftext|>"


def test_shuffled_contexts_are_of_another_text_than_is_read(build):
    rows = [
        row(f"q{i}", context="x", contexts_list=[f"distractor {i}", f"fact {i // 3}"], useful_contexts=[0, 1])
        for i in range(12)
    ]
    data = build(rows, contexts="useful")
    shuffled = data.with_shuffled_contexts()
    for i in range(12):
        right, wrong = data.sample(0, i), shuffled.sample(0, i)
        assert right["input_ids"] != wrong["input_ids"]
        n = right["input_ids"].index(USER)
        assert right["input_ids"][n:] == wrong["input_ids"][wrong["input_ids"].index(USER) :]
    alike = [row(contexts_list=[f"distractor {i}", "fact"], useful_contexts=[0, 1]) for i in range(2)]
    with pytest.raises(DataError, match="all 2 rows have the same context"):
        build(alike, contexts="useful").with_shuffled_contexts()


def test_batches_of_one_length(build):
    rows = [row("q" * i, context="c" * 3 * i) for i in range(1, 5)]
    data, plain = build(rows, fixed_length=True), build(rows)
    samples = [data.sample(0, i) for i in range(2)]
    long, short = data.collate(samples), plain.collate(samples)
    assert long["input_ids"].shape == (2, 128)
    width = short["input_ids"].shape[1]
    for name in ("input_ids", "attention_mask", "loss_mask"):
        assert (long[name][:, :width] == short[name]).all()
    assert not long["attention_mask"][:, width:].any()
    assert data.collate_prompts([data.prompt(0)])["input_ids"].shape[1] < 64


def test_config_refuses_what_would_be_ignored_or_is_missing():
    raw = {"corpus": "c", "contexts": "all", "context_tokens": 64, "sequence_tokens": 64, "loss_on": "answer"}
    with pytest.raises(ConfigError, match=r"^data: context_tokens: would be ignored with contexts 'none'"):
        load(prompted.Config, {**raw, "contexts": "none"}, "data")
    with pytest.raises(ConfigError, match=r"^data: context_tokens: missing\. .* contexts 'useful'"):
        load(
            prompted.Config,
            {**{k: v for k, v in raw.items() if k != "context_tokens"}, "contexts": "useful"},
            "data",
        )
    with pytest.raises(ConfigError, match=r"data.contexts: unknown value 'al'"):
        load(prompted.Config, {**raw, "contexts": "al"}, "data")


def test_context_question_and_new_tokens_must_fit_the_positions_together():
    raw = {"corpus": "c", "contexts": "all", "context_tokens": 100, "sequence_tokens": 20, "loss_on": "answer"}
    config = load(prompted.Config, raw, "data")
    config.check_length(120)
    config.check_length(None, 1000)
    with pytest.raises(
        ConfigError,
        match=r"data\.sequence_tokens \+ data\.context_tokens: 121 tokens \(120 \+ max_new_tokens 1\) are more",
    ):
        config.check_length(120, 1)
    without_contexts = load(
        prompted.Config, {"corpus": "c", "contexts": "none", "sequence_tokens": 20, "loss_on": "all"}, "data"
    )
    without_contexts.check_length(24, 4)
    with pytest.raises(
        ConfigError, match=r"data\.sequence_tokens: 25 tokens \(20 \+ max_new_tokens 5\) are more than the 24 positions"
    ):
        without_contexts.check_length(24, 5)


def test_too_few_tokens_for_the_template_are_refused(build):
    with pytest.raises(ConfigError, match=r"data.context_tokens: expected at least 13 tokens .* got 12"):
        build([row()], context_tokens=12)
    with pytest.raises(ConfigError, match=r"data.sequence_tokens: expected at least 7 tokens .* got 6"):
        build([row()], sequence_tokens=6)


def test_compiling_batches_of_several_lengths_is_refused():
    raw = {"corpus": "c", "contexts": "all", "context_tokens": 64, "sequence_tokens": 64, "loss_on": "answer"}
    load(prompted.Config, {**raw, "fixed_length": True}, "data").check_compiled()
    with pytest.raises(ConfigError, match=r"loop\.compile: needs batches of one length.*data\.fixed_length: true"):
        load(prompted.Config, raw, "data").check_compiled()
