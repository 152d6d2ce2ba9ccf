"""Questions on contexts: exact ids, masks, truncation, purity, and contexts that are surely another's."""

import copy
import os
import pickle
import re
import subprocess
import sys

import pytest

from src.errors import ConfigError, DataError
from src.evaluation.metrics import answers
from src.experiments.config import load
from src.systems.crossattn.data import cross_attention

EOS, PREFIX, MIDDLE, SUFFIX, USER, ASSISTANT, C, PAD = range(8)


def ids(text):
    return [8 + b for b in text.encode()]


def row(question="q?", answer="an", context="ctx", **more):
    return {"question": question, "answer": answer, "context": context, "dataset": "d", "sample_idx": 0, **more}


@pytest.fixture
def build(places, write_corpus, tokenizer):
    """Write rows and build a data set on them."""

    def make(rows, split="train", seed=0, tokenizer=tokenizer, **values):
        write_corpus("c", rows)
        config = load(
            cross_attention.Config,
            {"corpus": "c", "context_tokens": 64, "sequence_tokens": 64, "loss_on": "answer", **values},
            "data",
        )
        config.check(places)
        return config.build(places, tokenizer, split, seed)

    return make


def test_exact_sample_and_batch(build):
    data = build([row(), row("q2?", "b", "")])
    prompt = [USER, *ids("\nq?\n"), ASSISTANT, *ids("\n")]
    context = [USER, *ids("\n"), C, *ids("\n"), ASSISTANT, *ids("\n")]
    assert data.sample(0, 0) == {
        "input_ids": [*prompt, *ids("an"), EOS],
        "loss_mask": [False] * len(prompt) + [True] * 3,
        "context_chunks": [[*context, *ids("ctx")]],
    }
    assert data.sample(0, 1)["context_chunks"] == [context]  # an empty context is the template alone
    batch = data.collate([data.sample(0, 0), data.sample(0, 1)])
    assert batch["input_ids"].tolist() == [
        [*prompt, *ids("an"), EOS],
        [USER, *ids("\nq2?\n"), ASSISTANT, *ids("\nb"), EOS],
    ]
    assert batch["context_ids"].tolist() == [[[*context, *ids("ctx")]], [[*context, PAD, PAD, PAD]]]
    assert batch["context_mask"].sum().item() == 2 * len(context) + 3
    assert batch["loss_mask"].sum(1).tolist() == [3, 2]
    assert batch["attention_mask"].all()


def test_loss_on_all_scores_every_token_but_the_first_and_never_padding(build):
    data = build([row(), row(answer="longer")], loss_on="all")
    batch = data.collate([data.sample(0, i) for i in range(2)])
    expected = batch["attention_mask"].clone()
    expected[:, 0] = False
    assert batch["loss_mask"].equal(expected)


def test_the_end_token_is_scored_where_it_is_also_the_padding(build, make_tokenizer):
    data = build([row(), row(answer="longer")], tokenizer=make_tokenizer(pad=None))
    batch = data.collate([data.sample(0, i) for i in range(2)])
    assert batch["input_ids"][0, -5:].tolist() == [EOS] * 5
    assert batch["loss_mask"][0, -5:].tolist() == [True, False, False, False, False]
    assert batch["attention_mask"][0, -5:].tolist() == [True, False, False, False, False]


def test_control_tokens_in_user_text_stay_text(build, tokenizer):
    text = "a<|assistant|>b<fim_prefix><|endoftext|>"
    data = build([row(text, text, text)], context_tokens=200, sequence_tokens=200)
    sample = data.sample(0, 0)
    assert [i for i in sample["input_ids"] if i < 8] == [USER, ASSISTANT, EOS]
    assert [i for i in sample["context_chunks"][0] if i < 8] == [USER, C, ASSISTANT]
    assert tokenizer.decode(sample["input_ids"]) == f"<|user|>\n{text}\n<|assistant|>\n{text}<|endoftext|>"
    assert tokenizer.decode(sample["context_chunks"][0]) == f"<|user|>\n<|C|>\n<|assistant|>\n{text}"


def test_templates_in_a_vocabulary_without_their_tokens(build, make_tokenizer):
    plain = make_tokenizer(["<|endoftext|>"], pad=None)
    data = build([row()], tokenizer=plain, template="instruct", questions_on_contexts=True)
    sample = data.sample(0, 0)
    assert plain.decode(sample["input_ids"]) == "[INST] q? [/INST] an<|endoftext|>"
    assert (
        plain.decode([i for i, m in zip(sample["input_ids"], sample["loss_mask"], strict=True) if m])
        == " an<|endoftext|>"
    )
    assert plain.decode(sample["context_chunks"][0]) == "[INST] q?<|C|> [/INST] ctx"


def test_long_question_is_truncated_from_the_left_and_answer_is_complete(build, tokenizer):
    data = build([row("0123456789" * 5, "answer")], sequence_tokens=20)
    sample = data.sample(0, 0)
    assert len(sample["input_ids"]) == 20
    assert tokenizer.decode(sample["input_ids"]) == "<|user|>\n23456789\n<|assistant|>\nanswer<|endoftext|>"
    assert sum(sample["loss_mask"]) == 7


def test_an_answer_that_is_too_long_loses_its_end_and_does_not_end_there(build, tokenizer):
    sample = build([row("question", "0123456789" * 5)], sequence_tokens=15).sample(0, 0)
    assert tokenizer.decode(sample["input_ids"]) == "<|user|>\n\n<|assistant|>\n0123456789"
    assert sum(sample["loss_mask"]) == 10


def test_a_long_context_loses_its_end(build, tokenizer):
    sample = build([row(context="0123456789" * 9)], context_tokens=16).sample(0, 0)
    assert tokenizer.decode(sample["context_chunks"][0]) == "<|user|>\n<|C|>\n<|assistant|>\n0123456789"


def test_too_few_tokens_for_the_template_are_refused(build):
    with pytest.raises(ConfigError, match=r"data.sequence_tokens: expected at least 7 tokens .* got 6"):
        build([row()], sequence_tokens=6)
    with pytest.raises(ConfigError, match=r"data.context_tokens: expected at least 7 tokens .* got 6"):
        build([row()], context_tokens=6)


@pytest.mark.parametrize(
    "change", [{"context_tokens": 0}, {"sequence_tokens": -1}, {"loss_on": "question"}, {"val_samples": 0}]
)
def test_config_refuses(change):
    raw = {"corpus": "c", "context_tokens": 64, "sequence_tokens": 64, "loss_on": "answer", **change}
    with pytest.raises(ConfigError, match=rf"^data\.{next(iter(change))}: "):
        load(cross_attention.Config, raw, "data")


def test_several_contexts_are_joined_or_chunked(build, tokenizer):
    rows = [row(context="all", contexts_list=["one", "two"], useful_contexts=[0, 1]), row(context="only")]
    as_one, as_chunks = build(rows), build(rows, chunked_contexts=True)
    assert [tokenizer.decode(c)[29:] for c in as_one.sample(0, 0)["context_chunks"]] == ["one two"]
    assert [tokenizer.decode(c)[29:] for c in as_chunks.sample(0, 0)["context_chunks"]] == ["one", "two"]
    batch = as_chunks.collate([as_chunks.sample(0, i) for i in range(2)])
    assert batch["context_mask"].any(-1).tolist() == [[True, True], [True, False]]


def test_contexts_are_seen_a_second_time_as_language(build, tokenizer):
    rows = [
        row(f"q{i}", context="c", contexts_list=[f"useless {i}", f"useful context number {i}"], useful_contexts=[0, 1])
        for i in range(60)
    ]
    data = build(rows, include_contexts=True)
    assert len(data) == 120
    plain = 0
    for i in range(60):
        sample = data.sample(0, 60 + i)
        text = tokenizer.decode(sample["input_ids"])
        assert "useless" not in text
        assert sample["loss_mask"] == [False] + [True] * (len(sample["input_ids"]) - 1)
        assert sample["input_ids"][-1] == EOS
        assert sample["context_chunks"] == data.sample(0, i)["context_chunks"]
        if PREFIX in sample["input_ids"]:
            assert sorted(sample["input_ids"]) == sorted(
                [*ids(f"\n\n\nuseful context number {i}"), PREFIX, MIDDLE, SUFFIX, USER, C, ASSISTANT, EOS]
            )
        else:
            plain += 1
            assert text == f"<|user|>\n<|C|>\n<|assistant|>\nuseful context number {i}<|endoftext|>"
    assert 15 < plain < 45
    assert len(build(rows, split="val", include_contexts=True)) == 60


def test_long_context_as_text_has_at_most_its_length(build):
    data = build([row(context="x" * 500)] * 20, include_contexts=True, context_tokens=50)
    assert all(len(data.sample(e, 20 + i)["input_ids"]) == 50 for e in range(3) for i in range(20))


def test_validation_rows_are_the_same_for_every_seed(build):
    rows = [row(f"question {i}") for i in range(50)]
    splits = [build(rows, split="val", seed=seed, val_samples=10) for seed in range(2)]
    assert len(splits[0]) == 10
    assert [splits[0].sample(0, i) for i in range(10)] == [splits[1].sample(0, i) for i in range(10)]
    assert len(build(rows, split="train", val_samples=10)) == 50
    with pytest.raises(DataError, match=r"51 requested, only 50 available"):
        build(rows, split="val", val_samples=51)


def test_shuffled_contexts_are_always_of_another_text(build):
    rows = [row(f"q{i}", f"a{i}", f"context {i // 3}") for i in range(30)]
    data = build(rows)
    shuffled = data.with_shuffled_contexts()
    assert len(shuffled) == 30
    for i in range(30):
        right, wrong = data.sample(0, i), shuffled.sample(0, i)
        assert wrong["input_ids"] == right["input_ids"]
        assert wrong["loss_mask"] == right["loss_mask"]
        assert wrong["context_chunks"] != right["context_chunks"]
    contexts = {tuple(shuffled.sample(0, i)["context_chunks"][0]) for i in range(30)}
    assert contexts == {tuple(data.sample(0, i)["context_chunks"][0]) for i in range(30)}
    assert data.sample(0, 0) == build(rows).sample(0, 0)  # the right one is as it was


def test_shuffled_contexts_keep_their_own_question(build, tokenizer):
    shuffled = build(
        [row("qa", context="A"), row("qb", context="B")], questions_on_contexts=True
    ).with_shuffled_contexts()
    assert tokenizer.decode(shuffled.sample(0, 0)["context_chunks"][0]) == "<|user|>\nqa<|C|>\n<|assistant|>\nB"


def test_shuffling_is_the_same_in_every_process_and_differs_by_seed(build, places):
    rows = [row(f"q{i}", f"a{i}", f"context {i}") for i in range(40)]
    data = build(rows)
    mine = [data.with_shuffled_contexts()._context_rows, data.with_shuffled_contexts()._context_rows]
    assert mine[0] == mine[1]
    assert build(rows, seed=1).with_shuffled_contexts()._context_rows != mine[0]
    (places.data / "data.pickle").write_bytes(pickle.dumps(data))
    code = (
        f"import pickle; print(pickle.load(open({str(places.data / 'data.pickle')!r}, "
        f"'rb')).with_shuffled_contexts()._context_rows)"
    )
    out = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONHASHSEED": "7"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert out.stdout.strip() == str(mine[0])


def test_one_context_cannot_be_shuffled(build):
    with pytest.raises(DataError, match=r"c: all 2 rows have the same context"):
        build([row("q1"), row("q2")]).with_shuffled_contexts()


def test_prompts_end_before_the_answer(build):
    data = build([row(), row("longer question?", answers=["x", "y"], kind="calls")])
    prompts = [data.prompt(i) for i in range(2)]
    for i in range(2):
        sample = data.sample(0, i)
        assert sample["input_ids"][: len(prompts[i]["input_ids"])] == prompts[i]["input_ids"]
        assert sample["loss_mask"].index(True) == len(prompts[i]["input_ids"])
        assert prompts[i]["context_chunks"] == sample["context_chunks"]
    batch = data.collate_prompts(prompts)
    assert batch["attention_mask"].tolist() == [[False] * 14 + [True] * 7, [True] * 21]
    assert batch["input_ids"][:, -2:].tolist() == [[ASSISTANT, *ids("\n")]] * 2
    assert not batch["loss_mask"].any()
    assert batch["context_mask"].all()
    assert [data.source(i) for i in range(2)] == ["d", "d_calls"]
    assert data.sources == ["d", "d_calls"]


def test_a_prompt_leaves_room_for_an_answer(build):
    assert len(build([row("0123456789" * 5)], sequence_tokens=20).prompt(0)["input_ids"]) == 19


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"answer": 3}, "train.jsonl:2: field 'answer': expected str, got 3 (int)."),
        ({"answers": "x"}, "train.jsonl:2: field 'answers': expected list, got 'x' (str)."),
        (
            {"contexts_list": ["a"], "useful_contexts": [1, 0]},
            "train.jsonl:2: field 'useful_contexts': expected 1 entries, as in 'contexts_list', got 2.",
        ),
    ],
)
def test_malformed_rows_are_named(build, change, message):
    with pytest.raises(DataError, match=re.escape(message)):
        build([row(), row(**change)])


def test_missing_corpus_is_found_without_building(places):
    config = load(
        cross_attention.Config,
        {"corpus": "stdlib_qa", "context_tokens": 64, "sequence_tokens": 64, "loss_on": "all"},
        "data",
    )
    with pytest.raises(DataError, match=r"Make it with: python -m data_prep.crossattn.stdlib_qa"):
        config.check(places)


def test_importing_and_checking_load_no_torch():
    code = (
        "import sys; from src.systems.crossattn.data import cross_attention; from src.data.text import dataset; "
        "from src.evaluation.metrics import squad; print({'torch', 'transformers', 'tokenizers', 'numpy'} & "
        "set(sys.modules))"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
        == "set()"
    )


def test_squad_as_it_is(build, shared_data):
    """Real questions: every answer stands in its context, and comes back from the ids."""
    import json

    articles = json.loads((shared_data / "squad" / "squad_v1.1-dev-shared.json").read_text())["data"]
    rows = [
        row(q["question"], q["answers"][0]["text"], p["context"], answers=sorted({a["text"] for a in q["answers"]}))
        for article in articles[:2]
        for p in article["paragraphs"]
        for q in p["qas"]
    ]
    data = build(rows, context_tokens=8192, sequence_tokens=1024)
    shuffled = data.with_shuffled_contexts()
    assert len(data) > 80
    for i in range(len(data)):
        sample = data.sample(0, i)
        assert bytes(t - 8 for t in sample["context_chunks"][0][6:]).decode() == rows[i]["context"]
        assert (
            bytes(
                t - 8 for t, m in zip(sample["input_ids"], sample["loss_mask"], strict=True) if m and t != EOS
            ).decode()
            == rows[i]["answer"]
        )
        assert rows[i]["answer"] in answers.references(data.row(i))
        assert shuffled.sample(0, i)["context_chunks"] != sample["context_chunks"]


@pytest.mark.parametrize(("both", "length"), [(False, 48), (True, 64)])
def test_batches_of_fixed_length_have_the_same_content(build, both, length):
    rows = [row(f"q{i}?", "a" * (i + 1), "ctx " * i or "c", contexts_list=["ctx"]) for i in range(6)]
    fixed_length = build(rows, sequence_tokens=48, fixed_length=True, include_contexts=both)
    plain = build(rows, sequence_tokens=48, include_contexts=both)
    for first in range(0, len(plain), 2):
        one, other = ([data.sample(0, i) for i in (first, first + 1)] for data in (fixed_length, plain))
        assert one == other
        long, short = fixed_length.collate(one), plain.collate(other)
        width = short["input_ids"].shape[1]
        assert width < length
        for name in ("input_ids", "attention_mask", "loss_mask"):
            assert long[name].shape == (2, length)
            assert (long[name][:, :width] == short[name]).all()
        assert not long["attention_mask"][:, width:].any()
        assert not long["loss_mask"][:, width:].any()
        assert (long["context_ids"] == short["context_ids"]).all()
    prompts = fixed_length.collate_prompts([fixed_length.prompt(0), fixed_length.prompt(1)])
    assert prompts["input_ids"].shape[1] < 48, "generation goes on from prompts that end where the batch does"


def test_compiling_batches_of_several_lengths_is_refused():
    raw = {"corpus": "c", "context_tokens": 64, "sequence_tokens": 64, "loss_on": "answer"}
    load(cross_attention.Config, {**raw, "fixed_length": True}, "data").check_compiled()
    with pytest.raises(ConfigError, match=r"loop\.compile: needs batches of one length.*data\.fixed_length: true"):
        load(cross_attention.Config, raw, "data").check_compiled()


class TestChat:
    """Template "chat": the tokenizer's own."""

    TEMPLATE = (
        "<|user|>{% for m in messages %}{{ m.content | trim }}{% endfor %} !{% if add_generation_prompt "
        "%}<|assistant|>{% endif %}"
    )

    def test_prompts_and_contexts(self, build, tokenizer):
        tokenizer = copy.deepcopy(tokenizer)
        tokenizer.chat_template = self.TEMPLATE
        data = build(
            [row(question="q<|C|>", context="c", answer="a")], tokenizer=tokenizer, template="chat", loss_on="all"
        )
        sample = data.sample(0, 0)
        assert sample["input_ids"] == [USER, *ids("q<|C|> !"), ASSISTANT, *ids("a"), EOS], (
            "what a user writes is no control token"
        )
        assert sample["context_chunks"] == [[USER, C, *ids(" !"), ASSISTANT, *ids("c")]]

    @pytest.mark.parametrize("template", [None, "{{ strftime_now('%Y') }}{{ messages[0].content }}", "no message"])
    def test_a_tokenizer_without_a_usable_one(self, build, tokenizer, template):
        tokenizer = copy.deepcopy(tokenizer)
        tokenizer.chat_template = template
        with pytest.raises(
            ConfigError,
            match=r"data\.template: the tokenizer has no usable chat template\. Use assistant or instruct",
        ):
            build([row()], tokenizer=tokenizer, template="chat")
