"""Prefix language modelling: what is read and what is written make up the text."""

import pytest

from src.errors import ConfigError, DataError
from src.experiments.config import load
from src.systems.t5.denoising import prefix_lm

TEXTS = [f"Document {i} says {'more and ' * i}no more." for i in range(40)]
CONTROLS = ("<|endoftext|>", "<|pad|>")


@pytest.fixture
def build(places, write_corpus, make_tokenizer):
    """Write documents and build a data set of rows of 16 tokens on them."""

    def make(documents=TEXTS, split="train", seed=0, **values):
        write_corpus("t", [{"text": d} for d in documents])
        config = load(prefix_lm.Config, {"corpus": "t", "sequence_tokens": 16, **values}, "data")
        config.check(places)
        return config.build(places, make_tokenizer(CONTROLS, "<|pad|>"), split, seed)

    return make


@pytest.mark.parametrize("prefix_tokens", [None, 1, 15])
def test_prefix_and_rest_are_the_text(build, prefix_tokens):
    data = build(prefix_tokens=prefix_tokens)
    joined = [token for text in TEXTS for token in [*(2 + b for b in text.encode()), 0]]
    cuts = set()
    for index in range(len(data)):
        sample = data.sample(3, index)
        inputs, targets = sample["input_ids"].tolist(), sample["labels"].tolist()
        assert [*inputs[:-1], *targets[:-1]] == joined[16 * index : 16 * index + 16]
        assert inputs[-1] == targets[-1] == 0
        cuts.add(len(inputs) - 1)
    assert cuts == (set(range(1, 16)) if prefix_tokens is None else {prefix_tokens})


def test_batch_is_padded(build):
    data = build()
    samples = [data.sample(0, i) for i in range(8)]
    batch = data.collate(samples)
    assert batch["attention_mask"].sum(1).tolist() == [len(s["input_ids"]) for s in samples]
    assert batch["loss_mask"].sum(1).tolist() == [len(s["labels"]) for s in samples]
    assert (batch["input_ids"][~batch["attention_mask"]] == 1).all()
    assert (batch["labels"][~batch["loss_mask"]] == -100).all()


def test_one_shape_needs_a_fixed_cut():
    free, fixed = (
        load(prefix_lm.Config, {"corpus": "t", "sequence_tokens": 16, "prefix_tokens": n}, "data") for n in (None, 4)
    )
    fixed.check_compiled()
    with pytest.raises(ConfigError, match=r"^loop\.compile: needs batches of one length.*data\.prefix_tokens"):
        free.check_compiled()
    fixed.check_length(13)
    with pytest.raises(ConfigError, match=r"^data\.sequence_tokens: 13 tokens are more than the 12"):
        fixed.check_length(12)
    free.check_length(16)
    with pytest.raises(ConfigError, match=r"^data\.sequence_tokens: 16 tokens are more than the 15"):
        free.check_length(15)


def test_refusals(build):
    with pytest.raises(ConfigError, match="prefix_tokens: 16 leave nothing to write of 16 sequence_tokens"):
        build(prefix_tokens=16)
    with pytest.raises(DataError, match="fewer than the 16"):
        build(["short"])
