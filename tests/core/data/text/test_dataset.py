"""Packed text: every token once, in order, in sequences of one length."""

import re

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from src.data.text import dataset, documents
from src.data.text.tokenizers import SafeTokenizer
from src.errors import ConfigError, DataError
from src.experiments.config import load
from src.experiments.registry import DATASETS, bind
from src.systems.crossattn.data import cross_attention


def ids(string):
    return [8 + b for b in string.encode()]


@pytest.fixture
def build(places, write_corpus, tokenizer):
    """Write documents and build a data set on them."""

    def make(documents, split="train", seed=0, **values):
        write_corpus("t", [{"text": d, "source": "s"} for d in documents])
        config = load(dataset.Config, {"corpus": "t", "sequence_tokens": 4, **values}, "data")
        config.check(places)
        return config.build(places, tokenizer, split, seed)

    return make


def test_documents_are_joined_by_the_end_token_and_the_remainder_is_dropped(build):
    """An empty document leaves nothing, also no end token of its own."""
    data = build(["abc", "", "defgh", "xy"])
    assert [data.sample(0, i)["input_ids"] for i in range(len(data))] == [
        [*ids("abc"), 0],
        ids("defg"),
        [*ids("h"), 0, *ids("xy")],
    ]


def test_token_ids_of_a_large_corpus_are_saved_and_loaded(build, places, tokenizer, monkeypatch):
    """A damaged file, another tokenizer or other rows are tokenized anew."""
    monkeypatch.setattr(documents, "_MIN_BYTES", 1)
    texts = ["abc", "", "defgh", "xy"]
    before = build(texts)
    (saved,) = (places.data / "t").glob(".train.jsonl.*")

    def samples(data):
        return [data.sample(0, i)["input_ids"] for i in range(len(data))]

    with monkeypatch.context() as once:
        once.setattr(SafeTokenizer, "encode_all", None)  # whoever tokenizes again fails
        config = load(dataset.Config, {"corpus": "t", "sequence_tokens": 4}, "data")
        again = config.build(places, tokenizer, "train", 0)
        assert (samples(again), again.fingerprint) == (samples(before), before.fingerprint)
        with pytest.raises(TypeError):
            config.build(
                places, PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, eos_token="a"), "train", 0
            )
    whole = saved.read_bytes()
    place = whole.index(np.array(ids("defgh"), np.int32).tobytes())
    flipped_bit = whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :]
    for content in (
        flipped_bit,
        b"",
        whole[: len(whole) // 2],
        bytes(len(whole)),
        bytes(byte ^ 255 for byte in whole),
        b"[" * 100_000,
    ):
        saved.write_bytes(content)
        assert samples(config.build(places, tokenizer, "train", 0)) == samples(before)
        assert saved.read_bytes() == whole
    other = samples(build(["other", "rows"]))
    saved.write_bytes(whole)  # the ids of the earlier rows
    assert samples(config.build(places, tokenizer, "train", 0)) == other != samples(before)


def test_batch(build):
    data = build(["abcdefgh"])
    batch = data.collate([data.sample(0, 0), data.sample(5, 1)])
    assert batch["input_ids"].tolist() == [ids("abcd"), ids("efgh")]
    assert batch["attention_mask"].all()
    assert batch["loss_mask"].tolist() == [[False, True, True, True]] * 2


def test_separate_documents(build):
    data = build(["abc", "", "defgh", "xy"], separate_documents=True)
    joined_data = build(["abc", "", "defgh", "xy"])
    assert [data.sample(0, i)["input_ids"] for i in range(3)] == [
        joined_data.sample(0, i)["input_ids"] for i in range(3)
    ]
    assert data.fingerprint == joined_data.fingerprint
    batch = data.collate([data.sample(0, i) for i in range(3)])
    assert batch["position_ids"].tolist() == [[0, 1, 2, 3], [0, 1, 2, 3], [0, 1, 0, 1]]
    assert batch["loss_mask"].tolist() == [
        [False, True, True, True],
        [False, True, True, True],
        [False, True, False, True],
    ]
    assert batch["attention_mask"].all()
    assert "position_ids" not in joined_data.collate([joined_data.sample(0, 0)])


def test_parts_of_a_mixture_with_separate_documents(build, places, tokenizer):
    build(["abc", "defgh", "xy"])
    part = {"name": "text", "corpus": "t", "separate_documents": True}
    config = bind(
        DATASETS,
        {"name": "mixture", "parts": {"a": {**part, "sequence_tokens": 4}, "b": {**part, "sequence_tokens": 6}}},
    )
    with pytest.raises(
        ConfigError, match=r"data\.parts\.a: packed documents are not tested with the model family None\..*\n.*parts\.b"
    ):
        config.check_model(None)
    data = config.build(places, tokenizer, "val", 0)
    batch = data.collate([data.sample(0, i) for i in range(len(data))])
    assert batch["position_ids"].tolist()[0] == [0, 1, 2, 3, 0, 0], "padding reads nothing"


def test_control_tokens_in_documents_stay_text(build):
    data = build(["<|endoftext|>" * 4])
    assert all(token >= 8 for i in range(len(data)) for token in data.sample(0, i)["input_ids"])


def test_many_documents_arrive_once_and_in_order(build):
    documents = [f"document {i}" for i in range(700)]
    data = build(documents, sequence_tokens=16)
    all_tokens = [token for i in range(len(data)) for token in data.sample(0, i)["input_ids"]]
    expected = [token for d in documents for token in [*ids(d), 0]]
    assert all_tokens == expected[: len(all_tokens)]
    assert 0 <= len(expected) - len(all_tokens) < 16


def test_val_sequences(build):
    assert len(build(["abcd" * 10], "val", val_sequences=3)) == 3
    assert len(build(["abcd" * 10], "train", val_sequences=3)) == 10
    with pytest.raises(DataError, match=r"val.jsonl: 11 validation samples requested, only 10 available"):
        build(["abcd" * 10], "val", val_sequences=11)


def test_too_little_text(build):
    with pytest.raises(DataError, match=r"train.jsonl: 4 tokens, fewer than the 10 of one sequence"):
        build(["abc"], sequence_tokens=10)


@pytest.mark.parametrize("change", [{"sequence_tokens": 1}, {"val_sequences": 0}, {"corpus": ""}])
def test_config_refuses(change):
    with pytest.raises(ConfigError, match=rf"^data\.{next(iter(change))}: "):
        load(dataset.Config, {"corpus": "t", "sequence_tokens": 4, **change}, "data")


def test_missing_field_is_named(places, write_corpus, tokenizer):
    write_corpus("t", [{"source": "s"}])
    with pytest.raises(DataError, match=re.escape("train.jsonl:1: field 'text' is missing. Fields: source.")):
        load(dataset.Config, {"corpus": "t", "sequence_tokens": 4}, "data").build(places, tokenizer, "train", 0)


def test_missing_corpus_is_found_without_building(places):
    with pytest.raises(DataError, match=r"Make it with: python -m data_prep.crossattn.stdlib_qa"):
        load(dataset.Config, {"corpus": "stdlib_text", "sequence_tokens": 4}, "data").check(places)


@pytest.mark.parametrize(
    ("module", "values"), [(dataset, {}), (cross_attention, {"context_tokens": 3, "loss_on": "answer"})]
)
def test_every_data_set_leaves_room_for_the_tokens_to_be_written(module, values):
    config = load(module.Config, {"corpus": "t", "sequence_tokens": 4, **values}, "data")
    config.check_length(6, 2)
    config.check_length(4)
    config.check_length(None, 100)
    with pytest.raises(
        ConfigError, match=r"^data\.sequence_tokens: 7 tokens \(4 \+ max_new_tokens 3\) are more than the 6 positions"
    ):
        config.check_length(6, new_tokens=3)
