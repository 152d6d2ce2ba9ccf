"""Mixtures: each part in its share, evenly spread, every sample of a part once before one is read again."""

import random
import re
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from src.data.mixture import dataset
from src.data.mixture.interleaving import Interleaving, rates, shares
from src.data.orders import feistel_permute
from src.errors import ConfigError, DataError
from src.experiments.config import Places, load
from src.experiments.kinds import TokenizerSource
from src.experiments.registry import DATASETS, bind, resolved_dict


@pytest.mark.parametrize(
    "counts", [[3, 1], [5, 2], [1], [100, 33, 7, 1], [1000, 1], [40, 40], [31, 32, 33], [3] * 150, [1] * 90 + [700]]
)
def test_sample_k_of_a_part_is_placed_by_its_time(counts):
    order = Interleaving(counts)
    times = sorted(((k + 0.5) / count, part, k) for part, count in enumerate(counts) for k in range(count))
    assert [order.place(i) for i in range(len(order))] == [(part, k) for _, part, k in times]
    with pytest.raises(IndexError, match=f"sample {sum(counts)} of"):
        order.place(sum(counts))


def test_long_mixtures_need_no_memory_and_keep_the_proportion():
    order = Interleaving([3 * 10**11, 10**11])
    start = 123_456_789_012
    assert Counter(order.place(start + i)[0] for i in range(400)) == {0: 300, 1: 100}


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 63, 64, 65, 1000])
def test_shuffling_is_a_permutation(size):
    assert sorted(feistel_permute(i, size, "a") for i in range(size)) == list(range(size))
    if size > 60:
        assert [feistel_permute(i, size, "a") for i in range(size)] != [
            feistel_permute(i, size, "b") for i in range(size)
        ]
        assert sum(feistel_permute(i, size, "a") == i for i in range(size)) < 8


def test_rates_of_t5():
    """r_m = min(e_m, K)^(1/T) / sum. Of 4, 9 and 16 examples: 4/29, 9/29, 16/29; with K = 9: 4, 9, 9 of 22; with T = 2:
    2, 3, 4 of 9."""
    assert rates([4, 9, 16], None, 1.0) == pytest.approx([4 / 29, 9 / 29, 16 / 29])
    assert rates([4, 9, 16], 9, 1.0) == pytest.approx([4 / 22, 9 / 22, 9 / 22])
    assert rates([4, 9, 16], None, 2.0) == pytest.approx([2 / 9, 3 / 9, 4 / 9])
    assert rates([4, 9, 16], 9, 2.0) == pytest.approx([2 / 8, 3 / 8, 3 / 8])


def test_shares_are_integers_and_fill_the_epoch():
    assert shares([1, 1, 1], 10) == [4, 3, 3]
    assert shares([0.5, 0.3, 0.2], 9) == [4, 3, 2]  # 4.5, 2.7, 1.8
    assert shares([3, 5, 7], 15) == [3, 5, 7]
    assert shares([1, 9], 3) == [0, 3]
    assert all(sum(shares([1, 2**0.5, 3**0.5], n)) == n for n in range(100))


@pytest.fixture
def build(places, write_corpus, tokenizer):
    """A mixture of text data: part name -> (documents of 3 letters, sequence_tokens)."""

    def make(parts, split="train", seed=0, **values):
        parts_by_name = {}
        for name, (letters, length) in parts.items():
            rows = [{"text": letter * 3, "source": "s"} for letter in letters]
            write_corpus(name, rows)
            parts_by_name[name] = {"name": "text", "corpus": name, "sequence_tokens": length}
        config = load(dataset.Config, {"parts": parts_by_name, **values}, "data")
        config.check(places)
        return config.build(places, tokenizer, split, seed)

    return make


ABC = {"small": ("abc", 4), "large": ("defghijklmno", 4)}


def test_in_proportion_to_examples_an_epoch_is_every_sample_once(build):
    data = build(ABC)
    assert len(data) == 15
    for epoch in range(3):
        where = [data.locate(epoch, i) for i in range(15)]
        assert sorted(where) == sorted(
            [("small", epoch, i) for i in range(3)] + [("large", epoch, i) for i in range(12)]
        )
    sources = [data.sample_source(0, i) for i in range(15)]
    assert [sum(name == "small" for name in sources[i : i + 5]) for i in (0, 5, 10)] == [1, 1, 1]
    assert data.sources == ["large", "small"]


def test_a_part_continues_in_the_next_epoch_and_counts_its_own_epochs(build):
    data = build(ABC, rates={"small": 1, "large": 1}, samples_per_epoch=8)
    read = [data.locate(epoch, i) for epoch in range(9) for i in range(8)]
    for name, size in (("small", 3), ("large", 12)):
        mine = [(epoch, index) for part, epoch, index in read if part == name]
        assert len(mine) == 36
        assert mine == sorted(mine, key=lambda one: one[0])
        assert sorted(mine) == [(epoch, index) for epoch in range(36 // size) for index in range(size)]
    orders = [[index for part, epoch, index in read if part == "large" and epoch == n] for n in range(3)]
    assert len({tuple(order) for order in orders}) == 3


def test_any_window_has_the_proportion_of_the_rates(build):
    data = build(ABC, rates={"small": 0.2, "large": 0.6}, samples_per_epoch=400)
    small = [data.sample_source(0, i) == "small" for i in range(400)]
    assert sum(small) == 100
    assert {sum(small[i : i + 40]) for i in range(360)} <= {9, 10, 11}


def test_validation_is_every_sample_of_every_part_once(build):
    data = build(ABC, "val", rates={"small": 9, "large": 1}, samples_per_epoch=100)
    assert [data.locate(0, i) for i in range(len(data))] == [("large", 0, i) for i in range(12)] + [
        ("small", 0, i) for i in range(3)
    ]
    assert [data.sample_source(0, i) for i in (0, 11, 12, 14)] == ["large", "large", "small", "small"]
    assert data.sample(0, 13).sample == data.parts["small"].sample(0, 1)
    for index in (15, -1):
        with pytest.raises(IndexError, match="of 15"):
            data.locate(0, index)


def test_a_batch_of_several_parts_is_padded_in_the_order_of_its_samples(build):
    data = build({"a": ("a", 4), "b": ("b", 2)}, "val")
    batch = data.collate([data.sample(0, i) for i in (1, 0, 2)])
    a, b = 8 + ord("a"), 8 + ord("b")
    assert batch["input_ids"].tolist() == [[b, b, 7, 7], [a, a, a, 0], [b, 0, 7, 7]]
    assert batch["attention_mask"].tolist() == [[True, True, False, False], [True] * 4, [True, True, False, False]]
    assert batch["loss_mask"].tolist() == [
        [False, True, False, False],
        [False, True, True, True],
        [False, True, False, False],
    ]


def test_labels_are_padded_with_not_learned_and_pair_masks_in_both_axes():
    wide = {"labels": torch.tensor([[5, 6]]), "attention_mask": torch.ones(1, 2, 2, dtype=torch.bool)}
    slim = {"labels": torch.tensor([[9]]), "attention_mask": torch.ones(1, 1, 1, dtype=torch.bool)}
    batch = dataset.join_batches([(wide, [1]), (slim, [0])], pad_id=3)
    assert batch["labels"].tolist() == [[9, -100], [5, 6]]
    assert batch["attention_mask"].tolist() == [[[True, False], [False, False]], [[True, True], [True, True]]]


class Apart:
    """A data set that does not say how it collates."""

    def __init__(self, data):
        self.data, self.fingerprint, self.sample, self.collate = data, data.fingerprint, data.sample, data.collate

    def __len__(self):
        return len(self.data)


ALIKE = {
    "documents": {"name": "documents"},
    "span_corruption": {"name": "span_corruption", "input_tokens": 20, "mean_span_tokens": 1.5},
    "prefix_lm": {"name": "prefix_lm", "sequence_tokens": 12},
    "task": {"name": "task", "task": "rte"},
}


@pytest.mark.parametrize(
    "names", [["documents"] * 3, ["span_corruption", "prefix_lm", "prefix_lm"], ["task", "task", "span_corruption"]]
)
def test_parts_with_equal_collation_make_the_same_batch_as_joining(places, write_corpus, make_tokenizer, names):
    """But for ids that nothing reads: joining pads with the mixture's token, a part with its own and with what the
    decoder reads last."""
    tokenizer = make_tokenizer(["<|endoftext|>", "<|pad|>", *(f"<extra_id_{n}>" for n in range(40))], "<|pad|>")
    parts = {}
    for number, name in enumerate(names):
        rows = [{"text": chr(97 + i) * (3 + 5 * number + 7 * i % 11)} for i in range(9)]
        pairs = [
            {"sentence1": "a" * (i + 4 * number), "sentence2": "b", "label": "entailment", "index": i} for i in range(9)
        ]
        write_corpus(f"{name}{number}", pairs if name == "task" else rows)
        parts[f"{name}{number}"] = {**ALIKE[name], "corpus": f"{name}{number}"}
    data = load(dataset.Config, {"parts": parts, "rates": dict.fromkeys(parts, 1)}, "data").build(
        places, tokenizer, "train", 0
    )
    counts = [len(part) for part in data.parts.values()]
    joined_batch = dataset.MixtureDataset(
        {name: Apart(part) for name, part in data.parts.items()}, counts, 0, tokenizer.pad_token_id
    )
    draw = random.Random(0)
    several = 0
    for _ in range(30):
        samples = [data.sample(0, draw.randrange(len(data))) for _ in range(draw.randint(1, 8))]
        several += len({sample.part for sample in samples}) > 1
        batch, other = data.collate(samples), joined_batch.collate(samples)
        assert batch.keys() == other.keys()
        for key, tensor in batch.items():
            mask = {"input_ids": "attention_mask", "decoder_input_ids": "loss_mask"}.get(key)
            read = batch[mask] if mask else torch.ones_like(tensor, dtype=torch.bool)
            assert tensor.dtype == other[key].dtype
            assert tensor.shape == other[key].shape
            assert tensor[read].equal(other[key][read]), key
    assert several > 10


class Replies(Apart):
    """As many rows as the sample says."""

    def __init__(self, collation):
        self.fingerprint, self.collation = "replies", collation

    def __len__(self):
        return 3

    def sample(self, epoch, index):
        return index + 1

    def collate(self, samples):
        of_row = [number for number, count in enumerate(samples) for _ in range(count)]
        return {
            "sample_of_row": torch.tensor(of_row),
            "input_ids": torch.tensor([[samples[number]] for number in of_row]),
        }


def test_parts_with_equal_collation_do_not_need_joinable_batches():
    data = dataset.MixtureDataset({"a": Replies("replies"), "b": Replies("replies")}, [3, 3], None, 0)
    data.require_same_tensors()
    batch = data.collate([data.sample(0, i) for i in (4, 0, 2)])
    assert batch["sample_of_row"].tolist() == [0, 0, 1, 2, 2, 2]
    assert batch["input_ids"].tolist() == [[2], [2], [1], [3], [3], [3]]
    dataset.MixtureDataset({"a": Replies("replies")}, [3], None, 0).require_same_tensors()


def test_multi_row_samples_need_equal_collation():
    data = dataset.MixtureDataset({"a": Replies("one"), "b": Replies("another")}, [3, 3], None, 0)
    with pytest.raises(DataError, match=r"^data\.parts: samples have several rows"):
        data.require_same_tensors()


def test_parts_that_make_other_batches_are_refused():
    def part(**tensors):
        return SimpleNamespace(
            fingerprint="f", __len__=None, sample=lambda epoch, index: 0, collate=lambda samples: tensors
        )

    class FixedSizeData(SimpleNamespace):
        def __len__(self):
            return 1

    one, other = (
        FixedSizeData(**vars(part(ids=torch.zeros(shape, dtype=torch.int64)))) for shape in ((1, 2), (1, 2, 2))
    )
    data = dataset.MixtureDataset({"a": one, "b": other}, [1, 1], None, 0)
    message = (
        "data.parts.b: its batches differ from those of 'a' in the tensors ids (int64, 2 axes), ids (int64, 3 axes)"
    )
    with pytest.raises(DataError, match=re.escape(message)):
        data.require_same_tensors()


def test_tasks_count_as_many_examples_as_in_t5s_mixtures(places, write_corpus, tokenizer):
    """CoLA 8551, RTE 2490, however many rows there are here; WNLI is in none, so its own 3 rows count."""
    rows = {
        "cola": [{"sentence": "a", "label": "acceptable", "index": 0}],
        "rte": [{"sentence1": "a", "sentence2": "b", "label": "entailment", "index": 0}] * 2,
        "wnli": [{"sentence1": "a", "sentence2": "b", "label": "entailment", "index": 0}] * 3,
    }
    for name, examples in rows.items():
        write_corpus(name, examples)
    parts = {name: {"name": "task", "task": name, "corpus": name} for name in rows}
    config = load(dataset.Config, {"parts": parts, "samples_per_epoch": 8551 + 2490 + 3}, "data")
    data = config.build(places, tokenizer, "train", 0)
    assert Counter(data.sample_source(0, i) for i in range(len(data))) == {"cola": 8551, "rte": 2490, "wnli": 3}


def test_a_share_of_less_than_a_sample_is_refused(build):
    with pytest.raises(
        DataError,
        match=r"data.parts.small: .* less than one of the 15 samples .*data.samples_per_epoch",
    ):
        build(ABC, rates={"small": 1e-4, "large": 1})


@pytest.mark.parametrize(
    ("draw", "small", "large"),
    [
        ({"large": {"fraction": 0.25}}, 3, 3),
        ({"large": {"size": 5}, "small": {"fraction": 2.5}}, 8, 5),
        ({"large": {"fraction": 0.5, "size": 5}, "small": {"fraction": 0.4, "size": 2}}, 1, 5),
        ({"small": {"fraction": 3, "size": 7}}, 7, 12),
        ({"small": {"size": 3}}, 3, 12),
    ],
)
def test_a_draw_is_an_exact_count_and_the_next_epoch_continues_it(build, draw, small, large):
    """Of every part, also of one that the draw does not name: the reference's fractions ended before its extra data
    sets (B4)."""
    data, epochs = build(ABC, draw=draw), 24
    assert len(data) == small + large
    read = [[data.locate(epoch, i) for i in range(len(data))] for epoch in range(epochs)]
    for name, count, size in (("small", small, 3), ("large", large, 12)):
        mine = [[(part_epoch, index) for part, part_epoch, index in epoch if part == name] for epoch in read]
        assert {len(epoch) for epoch in mine} == {count}
        flat = [key for epoch in mine for key in epoch]
        assert len(set(flat)) == len(flat), "nothing twice in an epoch of the part"
        passes = len(flat) // size
        assert sorted(flat[: passes * size]) == [
            (part_epoch, index) for part_epoch in range(passes) for index in range(size)
        ], "all before one again"
    assert sum(data.sample_source(0, i) == "small" for i in range(len(data))) == small


def test_a_draw_does_not_change_the_validation_split(build):
    plain, with_draw = build(ABC, "val"), build(ABC, "val", draw={"large": {"size": 1}})
    assert [with_draw.locate(0, i) for i in range(len(with_draw))] == [plain.locate(0, i) for i in range(15)]


@pytest.mark.parametrize(
    ("draw", "message"),
    [
        (
            {"small": {"size": 4}},
            "data.draw.small.size: 4, but the part has only 3 samples. To repeat samples within an epoch, use",
        ),
        (
            {"small": {"fraction": 0.1}},
            "data.draw.small.fraction: 0.1 of 3 samples is less than one sample. Use a larger fraction, or only size.",
        ),
    ],
)
def test_a_draw_that_the_part_cannot_give_is_refused(build, draw, message):
    with pytest.raises(DataError, match="^" + re.escape(message)):
        build(ABC, draw=draw)


QA = {"name": "qa", "corpus": "t", "sequence_tokens": 4, "context_tokens": 4, "loss_on": "answer"}
TEXT = {"name": "text", "corpus": "t", "sequence_tokens": 4}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"parts": {}}, "data.parts: "),
        ({"parts": {"a": {**TEXT, "sequence_tokens": 1}}}, "data.parts.a.sequence_tokens: "),
        ({"parts": {"a": {**TEXT, "name": "txt"}}}, "data.parts.a.name: unknown dataset 'txt'. Did you mean 'text'?"),
        ({"rates": {"a": 0.0}}, "data.rates: expected numbers above 0, got a: 0.0."),
        ({"rates": {"b": 1.0}}, "data: rates: expected a rate for each part (a), got b."),
        ({"rates": {"a": 1.0}, "cap": 5}, "data: rates: cap and temperature are ignored with rates."),
        ({"temperature": 0.5}, "data.temperature: "),
        ({"draw": {"b": {"size": 1}}}, "data: draw: unknown part 'b'. Known: a."),
        ({"draw": {"a": {}}}, "data.draw.a: set fraction, size, or both"),
        ({"draw": {}}, "data.draw: "),
        ({"draw": {"a": {"size": 0}}}, "data.draw.a.size: expected a number > 0, got 0 (int)."),
        ({"draw": {"a": {"fraction": -1.0}}}, "data.draw.a.fraction: expected a number > 0.0, got -1.0 (float)."),
        *[
            (
                {"draw": {"a": {"size": 1}}, **also},
                "data: draw: rates, cap, temperature and samples_per_epoch are ignored with draw.",
            )
            for also in ({"rates": {"a": 1.0}}, {"cap": 5}, {"temperature": 2.0}, {"samples_per_epoch": 9})
        ],
        ({"parts": {"a": QA}}, "data: parts.a: 'qa' data have contexts"),
    ],
)
def test_config_refuses(values, message):
    with pytest.raises(ConfigError, match="^" + re.escape(message)):
        load(dataset.Config, {"parts": {"a": TEXT}, **values}, "data")


def test_parts_for_different_models_are_refused():
    spans = {"name": "span_corruption", "corpus": "t"}
    with pytest.raises(
        ConfigError, match=r"one model cannot read all of these data: parts\.a encoder_decoder, parts\.b decoder"
    ):
        load(dataset.Config, {"parts": {"a": spans, "b": TEXT}}, "data")
    assert load(dataset.Config, {"parts": {"a": spans}}, "data").reader == "encoder_decoder"


def test_errors_name_the_part(places, write_corpus):
    write_corpus("t", [{"text": "a", "source": "s"}])
    config = load(dataset.Config, {"parts": {"a": {**TEXT, "corpus": "nowhere"}, "b": TEXT}}, "data")
    with pytest.raises(ConfigError, match=r"^data.parts.a: .*nowhere: no such data set"):
        config.check(places)
    with pytest.raises(
        ConfigError,
        match=r"^data.parts.a.sequence_tokens: 5 tokens \(4 \+ max_new_tokens 1\) are more than .*\ndata.parts.b.seq",
    ):
        config.check_length(4, 1)


def test_a_compiled_model_sees_one_shape():
    """Of 512 inputs, masked at the shares of T5, the targets are 114 tokens; of prefixes too, where 511 and 113 tokens
    have an end each."""
    spans, cut = (
        {"name": "span_corruption", "corpus": "t"},
        {"name": "prefix_lm", "corpus": "t", "sequence_tokens": 624},
    )
    depth = {"name": "depth", "corpus": "t", "input_tokens": 512, "target_tokens": 114, "fixed_length": True}

    def ask(**parts):
        load(dataset.Config, {"parts": {"a": spans, **parts}}, "data").check_compiled()

    ask(
        b={**spans, "corpus": "u"},
        c={**cut, "prefix_tokens": 511},
        d=depth,
        e={"name": "mixture", "parts": {"f": spans}},
    )
    for other in (
        {**spans, "noise_density": 0.3},
        {**spans, "mean_span_tokens": 6.0},
        {**cut, "prefix_tokens": 510},
        {**depth, "target_tokens": 115},
    ):
        with pytest.raises(
            ConfigError,
            match=(
                r"^data.parts: loop.compile needs batches of one shape, .*: parts\.a 512 and 114, parts\.b 51[12] "
                r"and \d+\."
            ),
        ):
            ask(b=other)
    with pytest.raises(
        ConfigError,
        match=(
            r"data.parts.b: loop.compile: needs batches of one length.* Set "
            r"data\.parts\.b\.prefix_tokens"
        ),
    ):
        ask(b=cut)
    decoders = {"parts": {"a": TEXT, "b": {**TEXT, "sequence_tokens": 7}}}
    with pytest.raises(ConfigError, match=r"parts\.a 4, parts\.b 7\."):
        load(dataset.Config, decoders, "data").check_compiled()


def test_missing_sentinels_of_a_part_are_found_before_the_training(make_tokenizer, tmp_path):
    make_tokenizer(["<|endoftext|>", *(f"<extra_id_{n}>" for n in range(100))], None).save_pretrained(tmp_path)
    spans = {"name": "span_corruption", "corpus": "t"}
    config = load(dataset.Config, {"parts": {"a": spans, "b": {**spans, "noise_density": 0.5}}}, "data")
    config.check_tokenizer(Places(tmp_path, tmp_path), None)
    with pytest.raises(ConfigError, match=r"^data.parts.b.input_tokens: masks 128 runs per sequence, .* has 100"):
        config.check_tokenizer(Places(tmp_path, tmp_path), TokenizerSource(tmp_path))


def test_a_mixture_can_be_a_part_of_another():
    inner = {"name": "mixture", "parts": {"a": TEXT, "b": TEXT}}
    part = bind(DATASETS, {"name": "mixture", "parts": {"c": inner, "d": TEXT}, "rates": {"c": 2, "d": 1}})
    assert resolved_dict(part)["parts"]["c"]["parts"]["a"]["corpus"] == "t"


def test_the_loop_logs_the_loss_of_each_part(build):
    from src.training import loader

    assert loader.sources(build(ABC)) == ["large", "small"]
