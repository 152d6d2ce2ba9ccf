"""Span corruption of packed text: exact lengths, nothing lost, the same masks wherever they are drawn."""

import numpy as np
import pytest

from src.errors import ConfigError, DataError
from src.experiments.config import Places, load
from src.experiments.kinds import TokenizerSource
from src.systems.t5.denoising import span_corruption

CONTROLS = (
    "<|endoftext|>",
    "<|pad|>",
    *[f"<extra_id_{k}>" for k in range(99, -1, -1)],
)  # <extra_id_0> is 101; byte b is 102 + b
EOS, PAD, FIRST = 0, 1, 101
TEXTS = [f"Document {i} says {'more and ' * i}no more." for i in range(40)]


def byte_ids(text):
    return [len(CONTROLS) + b for b in text.encode()]


@pytest.fixture
def build(places, write_corpus, make_tokenizer):
    """Write documents and build a data set of inputs of 32 tokens on them: rows of 34 tokens, targets of 8."""

    def make(documents=TEXTS, split="train", seed=0, controls=CONTROLS, **values):
        write_corpus("t", [{"text": d} for d in documents])
        config = load(span_corruption.Config, {"corpus": "t", "input_tokens": 32, **values}, "data")
        config.check(places)
        return config.build(places, make_tokenizer(controls, "<|pad|>"), split, seed)

    return make


def restore(sample):
    """The row that a sample was made from: each sentinel of the inputs replaced by what follows it in the targets."""
    inputs, targets = sample["input_ids"].tolist(), sample["labels"].tolist()
    assert inputs[-1] == targets[-1] == EOS
    runs, expected = {}, FIRST
    for token in targets[:-1]:
        if token == expected:
            runs[token], expected = [], expected - 1
        else:
            runs[expected + 1].append(token)
    row = []
    for token in inputs[:-1]:
        row += runs.pop(token, [token])
    assert not runs
    return row


def test_inputs_and_targets_give_back_the_text(build):
    data = build()
    all_ids = [token for text in TEXTS for token in [*byte_ids(text), EOS]]
    for epoch in (0, 1):
        samples = [data.sample(epoch, i) for i in range(len(data))]
        rows = [token for sample in samples for token in restore(sample)]
        assert rows == all_ids[: len(rows)]
        assert 0 <= len(all_ids) - len(rows) < 34


def test_every_length_is_exact(build):
    data = build()
    samples = [data.sample(epoch, i) for i in range(len(data)) for epoch in range(3)]
    assert {len(s["input_ids"]) for s in samples} == {32}
    assert {len(s["labels"]) for s in samples} == {8}
    assert {s["input_ids"].dtype for s in samples} == {np.dtype("int32")}


def test_batch(build):
    data = build()
    samples = [data.sample(0, 0), data.sample(0, 1)]
    batch = data.collate(samples)
    assert batch["input_ids"].tolist() == [s["input_ids"].tolist() for s in samples]
    assert batch["labels"].tolist() == [s["labels"].tolist() for s in samples]
    assert batch["decoder_input_ids"].tolist() == [[PAD, *s["labels"].tolist()[:-1]] for s in samples]
    assert batch["attention_mask"].all()
    assert batch["loss_mask"].all()
    assert batch["attention_mask"].shape == (2, 32)
    assert batch["loss_mask"].shape == (2, 8)


def test_sentinels_and_padding_in_documents_stay_text(build):
    data = build(["<extra_id_0></s><|pad|>\0" * 9])
    rows = [restore(data.sample(0, i)) for i in range(len(data))]
    assert all(token >= len(CONTROLS) for row in rows for token in row)


def test_ids_are_those_of_the_table_however_it_is_ordered(build):
    """The first sentinel is neither the last id of the vocabulary nor its size less one."""
    data = build(controls=(*CONTROLS[:2], *CONTROLS[:1:-1]))
    assert data.sample(0, 0)["labels"][0] == 2


def test_more_sentinels_than_there_are_is_refused_before_documents_are_read(build):
    with pytest.raises(
        ConfigError, match=r"^data\.input_tokens: masks 128 runs per sequence, .* has 100 sentinels\. Use fewer"
    ):
        build(["long enough" * 99], input_tokens=512, noise_density=0.5)
    with pytest.raises(DataError, match="has no sentinels"):
        build(controls=CONTROLS[:2])


def test_too_few_sentinels_are_found_without_loading_the_tokenizer(make_tokenizer, tmp_path):
    dense, sparse = (
        load(span_corruption.Config, {"corpus": "t", "noise_density": density}, "data") for density in (0.5, 0.15)
    )
    make_tokenizer(CONTROLS, "<|pad|>").save_pretrained(tmp_path / "hundred")
    make_tokenizer(CONTROLS[:2], "<|pad|>").save_pretrained(tmp_path / "none")
    dense.check_tokenizer(Places(tmp_path, tmp_path), None)
    dense.check_tokenizer(Places(tmp_path, tmp_path), TokenizerSource(tmp_path))
    sparse.check_tokenizer(Places(tmp_path, tmp_path), TokenizerSource(tmp_path / "hundred"))
    with pytest.raises(ConfigError, match=r"^data\.input_tokens: masks 128 runs per sequence, .*hundred has 100"):
        dense.check_tokenizer(Places(tmp_path, tmp_path), TokenizerSource(tmp_path / "hundred"))
    with pytest.raises(DataError, match="none: the tokenizer has no sentinels"):
        sparse.check_tokenizer(Places(tmp_path, tmp_path), TokenizerSource(tmp_path / "none"))
    (tmp_path / "none" / "tokenizer.json").write_text("[")
    sparse.check_tokenizer(Places(tmp_path, tmp_path), TokenizerSource(tmp_path / "none"))


def test_too_little_text(build):
    with pytest.raises(DataError, match=r"train.jsonl: \d+ tokens, fewer than the 34 of one sequence"):
        build(["a" * 22])
    with pytest.raises(DataError, match=r"9 requested, only 1 available"):
        build(["a" * 40], "val", val_sequences=9)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"noise_density": 0.0}, r"data\.noise_density: "),
        ({"noise_density": 1.0}, r"data\.noise_density: "),
        ({"mean_span_tokens": 0.9}, r"data\.mean_span_tokens: "),
        ({"input_tokens": 2}, r"data\.input_tokens: "),
        ({"val_sequences": 0}, r"data\.val_sequences: "),
        ({"input_tokens": 3}, r"data: no row of tokens gives exactly 3 input tokens"),
        ({"input_tokens": 512, "noise_density": 0.9}, r"data: .* leaves \d+ tokens, too few to separate the runs"),
    ],
)
def test_config_refuses(values, message):
    with pytest.raises(ConfigError, match=f"^{message}"):
        load(span_corruption.Config, {"corpus": "t", **values}, "data")


def test_config_of_t5():
    config = load(span_corruption.Config, {"corpus": "t"}, "data")
    assert (config.input_tokens, config.noise_density, config.mean_span_tokens) == (512, 0.15, 3.0)


def test_a_model_with_fewer_positions_is_refused():
    config = load(span_corruption.Config, {"corpus": "t"}, "data")
    config.check_length(None)
    config.check_length(512)
    with pytest.raises(ConfigError, match=r"^data\.input_tokens: 512 tokens are more than the 511"):
        config.check_length(511)
    few = load(
        span_corruption.Config,
        {"corpus": "t", "input_tokens": 10, "noise_density": 0.8, "mean_span_tokens": 20.0},
        "data",
    )
    with pytest.raises(ConfigError, match=r"its targets have \d+ tokens"):
        few.check_length(10)


def test_missing_corpus_is_found_without_building(places):
    with pytest.raises(DataError, match=r"Make it with: python -m data_prep.crossattn.stdlib_qa"):
        load(span_corruption.Config, {"corpus": "stdlib_text"}, "data").check(places)
