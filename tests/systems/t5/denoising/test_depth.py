"""DEPTH: exact inputs, targets and masks; no text lost, nothing cut off, nothing that tells the order of shuffled
sentences."""

import re

import numpy as np
import pytest

from src.errors import ConfigError, DataError
from src.experiments.config import load
from src.systems.t5.denoising.depth import dataset
from src.systems.t5.denoising.depth.sentence_groups import Room
from src.systems.t5.denoising.depth.sentences import split

NAMES = 4
CONTROLS = (
    "<|endoftext|>",
    "<|pad|>",
    *[f"<extra_id_{k}>" for k in range(99, -1, -1)],  # <extra_id_0> is 101
    "<eosen>",
    *[f"<sent_{k}>" for k in range(NAMES)],  # 103..106; byte b is 107 + b
)
EOS, PAD, FIRST, EOSEN, SENT = 0, 1, 101, 102, 103
TEXTS = [
    f"Number {i} is here. Then {'it grows and ' * (i % 5)}it goes on! Does it? It does. At last it ends."
    for i in range(12)
]
E0, E1, E2 = FIRST, FIRST - 1, FIRST - 2


def byte_ids(text):
    return [len(CONTROLS) + b for b in text.encode()]


@pytest.fixture
def build(places, write_corpus, make_tokenizer):
    def make(documents=TEXTS, split="train", seed=0, controls=CONTROLS, **values):
        write_corpus("t", [{"text": d} for d in documents])
        sizes = {"input_tokens": 96, "target_tokens": 64, "num_sentences": NAMES}
        config = load(dataset.Config, {"corpus": "t", **sizes, **values}, "data")
        config.check(places)
        return config.build(places, make_tokenizer(controls, "<|pad|>"), split, seed)

    return make


def everything(data, epochs=(0,)):
    return [data.sample(epoch, i) for epoch in epochs for i in range(len(data))]


def parts(ids):
    """Sentences of an input or a target: [(name, words)]."""
    ids = list(ids)
    assert ids[0] == EOSEN
    assert ids[-2:] == [EOSEN, EOS]
    cut = "".join(chr(i) for i in ids[:-1]).split(chr(EOSEN))
    assert cut[0] == cut[-1] == ""
    found = [[ord(c) for c in piece] for piece in cut[1:-1]]
    assert all(SENT <= piece[0] < SENT + NAMES for piece in found)
    return [(piece[0], piece[1:]) for piece in found]


def is_sentinel(token):
    return 1 < token <= FIRST


def restored(sample):
    """The text of a sample: runs go back where their sentinels stand, and sentences into the order of the target."""
    inputs, targets = dict(parts(sample["input_ids"])), parts(sample["labels"])
    assert len(inputs) == len(parts(sample["input_ids"])), "a name stands for one sentence"
    text = []
    for name, written in targets:
        runs = []
        for token in written:
            if is_sentinel(token):
                runs.append((token, []))
            else:
                runs[-1][1].append(token)
        assert [s for s, _ in runs] == [t for t in inputs[name] if is_sentinel(t)], (
            "the runs of a sentence are written within it"
        )
        runs = dict(runs)
        assert all(runs.values())
        for token in inputs.pop(name):
            text += runs[token] if is_sentinel(token) else [token]
    assert not inputs
    return text


def test_what_is_masked_and_shuffled():
    ids, bounds = np.arange(50, 60, dtype=np.int32), np.array([0, 4, 7, 10])
    mask = np.array([0, 1, 1, 1, 1, 0, 0, 1, 0, 1], bool)  # the first run goes on in the second sentence: two runs
    inputs, targets = dataset.corrupt(ids, bounds, mask, [2, 0, 1], np.array([9, 8, 7, 6, 5], np.int32))
    assert [part.tolist() for part in inputs] == [[50, 7], [6, 55, 56], [9, 58, 8]]
    assert [part.tolist() for part in targets] == [[7, 51, 52, 53], [6, 54], [9, 57, 8, 59]]
    inputs, targets = dataset.corrupt(ids, bounds, mask, range(3), np.array([9, 8, 7, 6], np.int32))
    assert [part.tolist() for part in inputs] == [[50, 9], [8, 55, 56], [7, 58, 6]]
    assert [part.tolist() for part in targets] == [[9, 51, 52, 53], [8, 54], [7, 57, 6, 59]]
    inputs, targets = dataset.corrupt(ids, bounds, np.zeros(10, bool), range(3), np.array([], np.int32))
    assert [part.tolist() for part in inputs] == [[50, 51, 52, 53], [54, 55, 56], [57, 58, 59]]
    assert [len(part) for part in targets] == [0, 0, 0]


def test_all_text_comes_back_in_its_order(build):
    texts = [*TEXTS, "x" * 500 + ". Short one. " + "y" * 70 + ".", "A.", " \n\n ", "é漢. " * 30]
    data = build(texts)
    expected = [token for text in texts if text.strip() for token in byte_ids(text)]
    for epoch in (0, 1):
        assert [token for sample in everything(data, [epoch]) for token in restored(sample)] == expected


def test_no_sample_is_longer_than_allowed_whatever_is_masked(build):
    rng = np.random.default_rng(0)
    texts = [" ".join("w" * int(n) + "." * int(n % 3 == 0) for n in rng.integers(1, 9, 80)) for _ in range(20)]
    dense, denser = {"noise_density": 0.5, "mean_span_tokens": 1.5}, {"noise_density": 0.7, "mean_span_tokens": 4.0}
    for values in ({}, dense, denser, {"input_tokens": 40}):
        samples = everything(build(texts, **values), range(4))
        longest = max(len(sample["input_ids"]) for sample in samples), max(len(sample["labels"]) for sample in samples)
        assert longest[0] <= values.get("input_tokens", 96)
        assert longest[1] <= 64


def test_more_sentences_than_names_are_further_samples(build):
    data = build(["Aa bb. Cc dd. Ee ff. Gg hh. Ii jj. Kk ll."])
    assert [len(parts(sample["labels"])) for sample in everything(data)] == [4, 2]
    assert len({name for name, _ in parts(data.sample(0, 0)["labels"])}) == 4


def test_sentences_of_two_documents_are_never_in_one_sample(build):
    assert len(build(["Ab cd.", "Ef gh."])) == 2


def test_few_sentinels_make_shorter_samples(build):
    few = [name for name in CONTROLS if not re.fullmatch(r"<extra_id_([6-9]|\d\d)>", name)]
    data = build(TEXTS, controls=few)
    lowest, first = few.index("<extra_id_5>"), few.index("<extra_id_0>")
    runs = [
        int(((ids >= lowest) & (ids <= first)).sum())
        for ids in (sample["labels"] for sample in everything(data, range(3)))
    ]
    assert max(runs) == 6
    assert len(data) > len(build(TEXTS))
    with pytest.raises(ConfigError, match=r"with 0 sentinels at most, leave no room"):
        Room(96, 64, 0.3, 3.0, 0)


def test_the_share_that_is_masked_and_shuffled(build):
    data = build([TEXTS[4]] * 50, noise_density=0.3, shuffle_rate=0.25, input_tokens=256, target_tokens=128)
    masked = words = moved = 0
    for sample in everything(data, range(20)):
        targets = parts(sample["labels"])
        written = [token for _, part in targets for token in part]
        masked += sum(not is_sentinel(token) for token in written)
        words += len(restored(sample))
        moved += [name for name, _ in parts(sample["input_ids"])] != [name for name, _ in targets]
    assert abs(masked / words - 0.3) < 0.005
    assert len(data) == 100, "four sentences and one"
    assert (
        195 < moved < 285
    )  # 1000 samples of four sentences, a quarter of them in random order, of which one in 24 is the right one
    for sample in everything(build(noise_density=0.0, shuffle_rate=0.0)):
        assert restored(sample) == [token for _, part in parts(sample["input_ids"]) for token in part]


def test_neither_names_nor_sentinels_tell_the_order(build):
    data = build([TEXTS[0]] * 400, shuffle_rate=1.0, num_sentences=NAMES)
    first_names, places = [], []
    for sample in everything(data):
        inputs, targets = parts(sample["input_ids"]), parts(sample["labels"])
        read = [token for _, part in inputs for token in part if is_sentinel(token)]
        assert read == list(range(FIRST, FIRST - len(read), -1)), (
            "the encoder reads them in their order, whatever the order of the text"
        )
        if len(targets) == NAMES:
            first_names.append(targets[0][0])
            places.append([name for name, _ in inputs].index(targets[0][0]))
    for found in (first_names, places):
        counts = np.bincount(np.array(found) - min(found), minlength=NAMES)
        assert (abs(counts - len(found) / NAMES) < 5 * (len(found) * 3 / 16) ** 0.5).all()


def test_the_last_word_is_masked_no_more_often_than_others(build):
    """A mask that always ended with the last word would tell which sentence is the last."""
    samples = everything(build(["Abc def. Ghi jkl. Mno pqr. Stu vwx."] * 300))
    ended = sum(bool(parts(s["labels"])[-1][1]) and restored(s)[-1] == parts(s["labels"])[-1][1][-1] for s in samples)
    assert ended / len(samples) < 0.5


def test_batches_and_masks(build):
    data = build(["A. B."], num_sentences=2, noise_density=0.0)
    one = {
        "input_ids": np.array([EOSEN, SENT + 1, 201, EOSEN, SENT, 202, E0, EOSEN, EOS], np.int32),
        "labels": np.array([EOSEN, SENT, E0, 203, EOSEN, SENT + 1, EOSEN, EOS], np.int32),
    }
    two = {"input_ids": np.array([EOSEN, SENT, 204, EOSEN, EOS]), "labels": np.array([EOSEN, SENT, EOSEN, EOS])}
    batch = data.collate([one, two])
    assert batch["input_ids"].tolist()[1] == [EOSEN, SENT, 204, EOSEN, EOS, PAD, PAD, PAD, PAD]
    assert batch["attention_mask"].int().tolist()[1] == [1, 1, 1, 1, 1, 0, 0, 0, 0]
    assert batch["decoder_input_ids"].tolist() == [
        [PAD, EOSEN, SENT, E0, 203, EOSEN, SENT + 1, EOSEN],
        [PAD, EOSEN, SENT, EOSEN, EOS, *[PAD] * 3],
    ]
    assert batch["labels"].tolist() == [one["labels"].tolist(), [*two["labels"].tolist(), *[-100] * 4]]
    assert batch["loss_mask"].equal(batch["labels"] != -100)
    assert batch["encoder_mask"].int().tolist()[0] == [
        [1, 1, 1, 1, 1, 1, 1, 1, 1],
        [1, 1, 1, 1, 0, 0, 0, 0, 0],  # the first sentence's token: what is before it, itself, its words, its end
        [1, 1, 1, 1, 1, 1, 1, 1, 1],
        [1, 1, 1, 1, 1, 1, 1, 1, 1],
        [0, 0, 0, 0, 1, 1, 1, 1, 1],  # the last one's: also the end token
        *[[1] * 9] * 4,
    ]
    assert batch["encoder_mask"].int().tolist()[1] == [[1] * 5 + [0] * 4] * 9
    assert batch["decoder_mask"].int().tolist()[0] == [
        [1, 0, 0, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 0, 0],
        [0, 0, 1, 0, 0, 0, 0, 0],  # a sentence token: itself
        [1, 1, 1, 1, 0, 0, 0, 0],
        [1, 1, 1, 1, 1, 0, 0, 0],
        [1, 1, 1, 1, 1, 1, 0, 0],
        [0, 0, 1, 0, 0, 0, 1, 0],  # the next: itself and the one before
        [1, 1, 1, 1, 1, 1, 1, 1],
    ]
    assert batch["decoder_mask"].int().tolist()[1][4:] == [[1, 1, 1, 1, 0, 0, 0, 0]] * 4
    read = [0, 1, 0, 0, 1, 0, 0, 0, 0]
    assert batch["cross_mask"].int().tolist()[0] == [[1] * 9] * 2 + [read] + [[1] * 9] * 3 + [read] + [[1] * 9]
    assert (
        batch["cross_mask"].int().tolist()[1] == [[1] * 5 + [0] * 4] * 2 + [[0, 1] + [0] * 7] + [[1] * 5 + [0] * 4] * 5
    )
    assert "loss_weights" not in batch


def test_the_encoder_sees_what_the_reference_lets_it_see(build):
    """Golden: the masks that the DEPTH authors' collator gives two sentences of three words and of three, <eosen> and
    </s>."""
    ids = np.array([EOSEN, SENT, 201, 202, 203, EOSEN, SENT + 1, 204, 205, EOSEN, EOS], np.int32)[
        [0, 1, 2, 3, 5, 6, 7, 8, 4, 9, 10]
    ]
    mask = build(["A. B."], num_sentences=2).collate([{"input_ids": ids, "labels": np.array([EOSEN, EOS], np.int32)}])[
        "encoder_mask"
    ]
    found = ["".join(map(str, row.int().tolist())) for row in mask[0][[1, 5]]]
    assert found == ["11111000000", "00000111111"]


def test_batches_of_one_length(build):
    data = build(fixed_length=True)
    batch, other = (data.collate([data.sample(0, i) for i in some]) for some in ((0, 1), (2, 3)))
    assert {name: tensor.shape for name, tensor in batch.items()} == {
        name: tensor.shape for name, tensor in other.items()
    }
    assert batch["input_ids"].shape == (2, 96)
    assert batch["cross_mask"].shape == (2, 64, 96)
    plain = build().collate([data.sample(0, 0), data.sample(0, 1)])
    S, T = plain["cross_mask"].shape[2], plain["cross_mask"].shape[1]
    for name, tensor in plain.items():
        cut = {
            "cross_mask": (slice(T), slice(S)),
            "encoder_mask": (slice(S), slice(S)),
            "decoder_mask": (slice(T), slice(T)),
        }.get(name)
        length = S if name in ("input_ids", "attention_mask") else T
        assert tensor.equal(batch[name][:, *(cut or (slice(length),))])
    with pytest.raises(ConfigError, match=r"loop\.compile: needs batches of one length.*data\.fixed_length: true"):
        load(dataset.Config, {"corpus": "t"}, "data").check_compiled()
    load(dataset.Config, {"corpus": "t", "fixed_length": True}, "data").check_compiled()


def test_sentence_tokens_are_weighed_in_training_alone(build):
    data = build(sentence_weight=2.5)
    batch = data.collate([data.sample(0, 0)])
    named = (batch["labels"] >= SENT) & (batch["labels"] < SENT + NAMES)
    assert named.sum() > 1
    assert batch["loss_weights"].equal(named.float() * 1.5 + 1)
    assert "loss_weights" not in build(split="val", sentence_weight=2.5).collate([data.sample(0, 0)])
    view = data.sentence_targets().collate([data.sample(0, 0)])
    assert view["loss_mask"].equal(named)
    assert view["labels"].equal(batch["labels"].where(named, -100))
    assert view["decoder_mask"].equal(batch["decoder_mask"])


def test_validation_may_be_some_samples(build):
    whole, some = build(split="val"), build(split="val", val_sequences=5)
    assert len(some) == 5 < len(whole)
    assert {tuple(restored(s)) for s in everything(some)} < {tuple(restored(s)) for s in everything(whole)}
    with pytest.raises(DataError, match=r"val\.jsonl: 999 validation samples requested"):
        build(split="val", val_sequences=999)


def test_control_tokens_in_text_stay_text(build):
    text = "Say <eosen><sent_0> or <extra_id_0>. Then <|endoftext|>."
    assert len(split(text)) == 2
    (sample,) = everything(build([text], input_tokens=128))
    assert restored(sample) == byte_ids(text)


def test_what_is_refused(build):
    with pytest.raises(
        DataError,
        match=r"no special token <sent_3>; .*needs <eosen> and <sent_0> to <sent_3>\. Add them: .*--sentences 4",
    ):
        build(controls=[name for name in CONTROLS if name != "<sent_3>"])
    with pytest.raises(DataError, match=r"no special token <eosen>"):
        build(controls=[name for name in CONTROLS if name != "<eosen>"])
    with pytest.raises(DataError, match=r"has no sentinels"):
        build(controls=[name for name in CONTROLS if "extra" not in name])
    with pytest.raises(DataError, match=r"train\.jsonl: no text but white space"):
        build([" \n"])
