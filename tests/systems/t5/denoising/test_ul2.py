"""UL2's mixture: every token once an epoch, shares met, lengths exact, sentinels counted ahead."""

from collections import Counter

import pytest

from src.data.mixture.interleaving import shares
from src.errors import ConfigError, DataError
from src.experiments.config import Places, load
from src.experiments.kinds import TokenizerSource
from src.systems.t5.denoising import noise, ul2
from src.systems.t5.denoising.denoiser_mixture import BLOCK

CONTROLS = ("<|endoftext|>", "<|pad|>", "[S2S]", *[f"<extra_id_{k}>" for k in range(99, -1, -1)])
FIRST, BYTES = len(CONTROLS) - 1, len(CONTROLS)
TEXTS = [f"Document {i} says {'more and ' * i}no more." for i in range(60)]
ALL_IDS = [token for text in TEXTS for token in [*(BYTES + b for b in text.encode()), 0]]
DENOISERS = [
    {"rate": 1.0, "mode": "R", "mean_span_tokens": 3.0, "noise_density": 0.15},
    {"rate": 2.0, "mode": "[S2S]"},
    {"rate": 1.0, "mean_span_tokens": 4.0, "noise_density": 0.5},
]


@pytest.fixture
def build(places, write_corpus, make_tokenizer):
    """Write documents and build a data set of inputs of 24 tokens on them."""

    def make(documents=TEXTS, split="train", seed=0, **values):
        write_corpus("t", [{"text": d} for d in documents])
        config = load(ul2.Config, {"corpus": "t", "input_tokens": 24, "denoisers": DENOISERS, **values}, "data")
        config.check(places)
        return config.build(places, make_tokenizer(CONTROLS, "<|pad|>"), split, seed)

    return make


def text_of(inputs, targets):
    """The row that inputs without their mode, and targets, were made from."""
    if not any(BYTES > token > 2 for token in inputs):
        return [*inputs[:-1], *targets[:-1]]
    runs, number = {}, 0
    for token in targets[:-1]:
        if token == FIRST - number:
            runs[token], number = [], number + 1
        else:
            runs[FIRST - number + 1].append(token)
    return [token for place in inputs[:-1] for token in runs.get(place, [place])]


def test_every_token_is_read_once_an_epoch_by_denoisers_in_their_shares(build):
    data = build()
    assert len(data) > BLOCK  # a whole block and a part
    for epoch in (0, 1):
        rows, num_samples = {}, Counter()
        for index in range(len(data)):
            number, first = data.locate(epoch, index)
            sample = data.sample(epoch, index)
            inputs, targets = sample["input_ids"].tolist(), sample["labels"].tolist()
            mode = [[BYTES + ord("R")], [2], []][number]
            assert inputs[: len(mode)] == mode
            assert len(inputs) == 24 or (number == 1 and len(inputs) < 24)
            assert inputs[-1] == targets[-1] == 0
            rows[first] = text_of(inputs[len(mode) :], targets)
            num_samples[number] += index < BLOCK
        all_ids = [token for first in sorted(rows) for token in rows[first]]
        assert all_ids == ALL_IDS[: len(all_ids)]
        assert len(ALL_IDS) - len(all_ids) < 40
        assert num_samples == {0: 100, 1: 200, 2: 100}


def test_a_mode_that_leaves_a_length_which_no_row_gives(build):
    """A row of 26 tokens gives inputs of 18, and one of 27, for which T5's helper has 26, would give 19: with a mode of
    5, 23 of 24."""
    assert noise.lengths(19, 0.5, 3.0)[0] == noise.lengths(18, 0.5, 3.0)[0] == 26
    data = build(denoisers=[{"rate": 1.0, "mode": "[NLG]", "mean_span_tokens": 3.0, "noise_density": 0.5}])
    assert {len(data.sample(0, index)["input_ids"]) for index in range(len(data))} == {23}


def test_masks_are_part_of_the_fingerprint(build):
    other = [{**DENOISERS[0], "mean_span_tokens": 4.0}, *DENOISERS[1:]]
    all_values = ({}, {"whole_words": True}, {"denoisers": other}, {"denoisers": DENOISERS[:2]})
    assert len({build(**values).fingerprint for values in all_values}) == 4
    assert build(val_sequences=2).fingerprint == build().fingerprint


def test_batch_is_padded(build):
    data = build()
    samples = [data.sample(0, i) for i in range(16)]
    batch = data.collate(samples)
    assert batch["loss_mask"].sum(1).tolist() == [len(s["labels"]) for s in samples]
    assert len({len(s["labels"]) for s in samples}) > 2


def test_batches_of_all_denoisers_can_have_one_shape(build):
    data, plain = build(fixed_length=True), build()
    assert {
        tuple(data.collate([data.sample(0, i)])[name].shape[1] for name in ("input_ids", "labels")) for i in range(40)
    } == {(24, 24)}
    padded, tight = (some.collate([some.sample(0, 3)]) for some in (data, plain))
    for name, tensor in tight.items():
        assert padded[name][:, : tensor.shape[1]].equal(tensor)
    assert padded["loss_mask"].sum() == tight["loss_mask"].sum()


def test_published_mixture():
    config = load(ul2.Config, {"corpus": "t"}, "data")
    assert shares([d.rate for d in config.denoisers], BLOCK) == [66, 66, 136, 33, 33, 33, 33]
    raw = [d.lengths(512).raw for d in config.denoisers]
    assert raw == [568, 588, 512, 766, 908, 600, 1006]
    extreme = [(3.0, 0.5), (8.0, 0.5), (64.0, 0.15), (64.0, 0.5)]  # table 1 of the paper, and `ul2_configs` of Levanter
    assert [(d.mean_span_tokens, d.noise_density) for d in config.denoisers] == [
        (3.0, 0.15),
        (8.0, 0.15),
        (None, None),
        *extreme,
    ]
    assert [d.mode for d in config.denoisers] == ["[NLU]"] * 2 + ["[S2S]"] + ["[NLG]"] * 4
    with pytest.raises(ConfigError, match=r"compile: needs batches of one length, and those of 'ul2' differ"):
        config.check_compiled()
    fixed_length = load(ul2.Config, {"corpus": "t", "fixed_length": True}, "data")
    fixed_length.check_compiled()
    assert fixed_length.batch_lengths() == (512, 512)
    with pytest.raises(ConfigError, match=r"^data\.denoisers: their targets have up to \d+ tokens"):
        load(ul2.Config, {"corpus": "t", "input_tokens": 10, "denoisers": [_dense()]}, "data").check_length(10)


def _dense():
    return {"rate": 1.0, "mean_span_tokens": 20.0, "noise_density": 0.8}


def test_more_sentinels_than_there_are_is_refused(build):
    span = {"rate": 1.0, "mean_span_tokens": 3.0, "noise_density": 0.5}
    with pytest.raises(
        ConfigError, match=r"^data\.denoisers\[1\]: masks 128 runs per sequence, .* has 100 sentinels\. Use fewer"
    ):
        build(input_tokens=512, denoisers=[DENOISERS[1], span])
    assert len(build(input_tokens=400, denoisers=[span]))


def test_too_few_sentinels_are_found_without_loading_the_tokenizer(make_tokenizer, tmp_path):
    make_tokenizer(CONTROLS, "<|pad|>").save_pretrained(tmp_path)
    config = load(ul2.Config, {"corpus": "t"}, "data")
    config.check_tokenizer(Places(tmp_path, tmp_path), None)
    with pytest.raises(ConfigError, match=r"^data\.denoisers\[3\]: masks 12\d runs per sequence, .* has 100"):
        config.check_tokenizer(Places(tmp_path, tmp_path), TokenizerSource(tmp_path))
    load(ul2.Config, {"corpus": "t", "input_tokens": 400}, "data").check_tokenizer(
        Places(tmp_path, tmp_path), TokenizerSource(tmp_path)
    )


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"denoisers": []}, r"data\.denoisers: expected a list that is not empty"),
        ({"denoisers": [{"rate": 0.0}]}, r"data\.denoisers\[0\]\.rate: "),
        (
            {"denoisers": [{"rate": 1.0, "mean_span_tokens": 3.0}]},
            r"data\.denoisers\[0\]: expected mean_span_tokens and noise_density",
        ),
        (
            {"denoisers": [*DENOISERS, _dense() | {"mean_span_tokens": 1.0}]},
            r"data: denoisers\[3\]: masking \d+ of \d+ tokens in \d+ runs leaves",
        ),
        (
            {"denoisers": [{"rate": 1.0, "mode": "m" * 23}]},
            r"data\.denoisers\[0\]: the 23 tokens of its mode leave no room in 24",
        ),
        (
            {"denoisers": [{**DENOISERS[0], "mode": "m" * 22}]},
            r"data\.denoisers\[0\]: without the 22 tokens of its mode, 2 input tokens",
        ),
    ],
)
def test_refusals(build, values, message):
    with pytest.raises(ConfigError, match=f"^{message}"):
        build(**values)


def test_too_little_text(build):
    with pytest.raises(DataError, match=r"train.jsonl: 6 tokens are too few"):
        build(["short"])
