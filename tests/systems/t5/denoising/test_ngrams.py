"""Masks of whole n-grams: exact lengths, any unit as likely as another, words where the tokenizer says."""

import re

import numpy as np
import pytest

from src.errors import ConfigError, DataError, UserError
from src.experiments.config import Places, load
from src.experiments.kinds import TokenizerSource
from src.systems.t5.denoising import ngrams, noise, span_corruption, ul2
from src.systems.t5.denoising.words import Words

EOS, SENTINELS = 0, np.arange(10_000, 9_900, -1)
TOKENS = ["</s>", "<pad>", *[f"▁w{i}" for i in range(100)], "▁new", "▁york", "ing", ",", "▁", "Y", "<0xC3>", "<0x89>"]
ID = {token: number for number, token in enumerate(TOKENS)}


def ids(text):
    return np.array([ID[token] for token in text.split()])


@pytest.fixture(scope="module")
def sentence_piece():
    """A tokenizer with SentencePiece's marks."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel(vocab=ID, unk_token="▁"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.add_special_tokens(["</s>", "<pad>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", pad_token="<pad>")


@pytest.fixture
def make(sentence_piece, tmp_path):
    def make_masker(lines, density=0.15, mean_span=3.0):
        (tmp_path / "ngrams.txt").write_text("".join(f"{line}\n" for line in lines))
        vocabulary = ngrams.read_vocabulary(tmp_path / "ngrams.txt")
        return ngrams.Ngrams(Words(sentence_piece), vocabulary, (density, mean_span), SENTINELS, EOS)

    return make_masker


def words_of(tokenizer, row):
    words = Words(tokenizer)
    return words.word_texts(row, np.append(words.starts(row).nonzero()[0], len(row)))


def test_words_by_the_marks_of_sentence_piece(sentence_piece):
    row = ids("▁new ing , ▁york </s> ing ▁ Y ing , , <0xC3> <0x89> <pad> ▁w5")
    assert words_of(sentence_piece, row) == [" newing", ",", " york", "", "ing", " ying", ",", ",", "é", "", " w5"]


def test_words_by_the_marks_of_byte_level_bpe(tokenizer):
    row = np.array([0, *(8 + b for b in "Don't  stop_it, ÉTÉ\n2 go".encode()), 0])
    assert words_of(tokenizer, row) == ["", "don", "'", "t", " ", " stop_it", ",", " été", "\n", "2", " go", ""]


def test_a_tokenizer_without_marks_is_refused(make_tokenizer):
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    plain = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(vocab={"a": 0, "ByteLevel": 1}, unk_token="a"))
    )
    with pytest.raises(DataError, match="does not mark spaces"):
        Words(plain)


@pytest.mark.parametrize(
    ("module", "values"),
    [(span_corruption, {"whole_words": True}), (span_corruption, {"ngrams": "a.txt"}), (ul2, {"whole_words": True})],
)
def test_a_tokenizer_without_marks_is_refused_before_the_start(tmp_path, module, values):
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordPiece(vocab={"[UNK]": 0, "a": 1, "##b": 2}, unk_token="[UNK]"))
    tokenizer.add_special_tokens([f"<extra_id_{k}>" for k in range(100)])
    config = load(module.Config, {"corpus": "t", "input_tokens": 64, **values}, "data")
    plain = load(module.Config, {"corpus": "t", "input_tokens": 64}, "data")
    source = TokenizerSource(tmp_path)
    for marks in (pre_tokenizers.BertPreTokenizer(), pre_tokenizers.Metaspace(), pre_tokenizers.ByteLevel()):
        tokenizer.pre_tokenizer = marks
        tokenizer.save(str(tmp_path / "tokenizer.json"))
        plain.check_tokenizer(Places(tmp_path, tmp_path), source)
        if isinstance(marks, pre_tokenizers.BertPreTokenizer):
            with pytest.raises(UserError, match=re.escape(str(tmp_path))):
                config.check_tokenizer(Places(tmp_path, tmp_path), source)
        else:
            config.check_tokenizer(Places(tmp_path, tmp_path), source)


def units(masker, row, seed=0):
    first, sizes = masker.units(row, np.random.default_rng(seed))
    return [" ".join(TOKENS[i] for i in row[a : a + n]) for a, n in zip(first, sizes, strict=True)]


def test_units(make):
    masker = make(["new york", "NEW  york, w1", "w3 w4 w5", "w2 w3"])
    row = ids("▁new ▁york ▁w9 </s> ▁new ▁york , ▁w1 ▁w3 ▁w4 ▁w5 ▁new </s> ▁york ing ▁new ▁york ing")
    assert units(masker, row) == [
        "▁new ▁york",
        "▁w9",
        "▁new ▁york , ▁w1",
        "▁w3 ▁w4 ▁w5",
        "▁new",
        "▁york ing",
        "▁new",
        "▁york ing",
    ]
    assert units(masker, ids("▁new </s> ▁york </s> ▁new ▁york </s> ▁w1")) == ["▁new", "▁york", "▁new ▁york", "▁w1"]
    assert units(masker, ids("ing ▁w1")) == ["ing", "▁w1"]  # a row begins in the middle of a word


def test_of_overlapping_ngrams_the_longest_and_of_equals_any(make):
    masker = make(["w1 w2", "w2 w3", "w4 w5", "w5 w6 w7"])
    assert {tuple(units(masker, ids("▁w1 ▁w2 ▁w3"), seed)) for seed in range(20)} == {
        ("▁w1 ▁w2", "▁w3"),
        ("▁w1", "▁w2 ▁w3"),
    }
    assert {tuple(units(masker, ids("▁w4 ▁w5 ▁w6 ▁w7"), seed)) for seed in range(20)} == {("▁w4", "▁w5 ▁w6 ▁w7")}


def check(masker, row, seed, density=0.15, mean_span=3.0):
    """Lengths are exact. Returns the mask."""
    counts = noise.counts(len(row), density, mean_span)
    mask, starts = masker.draw_mask(row, np.random.default_rng(seed))
    assert mask.sum() == counts.noise
    assert starts.sum() == counts.spans
    assert not (starts & ~mask).any()
    assert not (mask[1:] & ~mask[:-1] & ~starts[1:]).any()  # every run begins with a start
    assert not mask[0] or starts[0]
    inputs, targets = masker(row, np.random.default_rng(seed))
    assert (len(inputs), len(targets)) == (counts.input_tokens, counts.target_tokens)
    return mask


def row_of_words(length=141):
    """Every fourth word begins "new york"; an end token in between."""
    rng = np.random.default_rng(5)
    row = []
    while len(row) < length:
        row += [ID["▁new"], ID["▁york"], *rng.integers(2, 102, 3).tolist()]
    row[70] = EOS
    return np.array(row[:length])


@pytest.mark.parametrize(("density", "mean_span"), [(0.15, 3.0), (0.3, 2.0), (0.15, 1.5), (0.5, 8.0)])
def test_ngrams_are_masked_completely_with_exact_lengths(make, density, mean_span):
    masker, row = make(["new york"], density, mean_span), row_of_words()
    begins = np.flatnonzero((row[:-1] == ID["▁new"]) & (row[1:] == ID["▁york"]))
    for seed in range(200):
        mask = check(masker, row, seed, density, mean_span)
        assert (mask[begins] == mask[begins + 1]).all()
        assert not mask[70]


def test_long_and_short_units_are_masked_as_often(make):
    """And none always: the choice is random, where the seed's took the longest first."""
    masker, row = make(["new york", "w1 w2 w3 w4 w5"]), row_of_words()
    row[20:25] = ids("▁w1 ▁w2 ▁w3 ▁w4 ▁w5")
    share = np.mean([check(masker, row, seed) for seed in range(3000)], axis=0)
    assert share[70] == 0
    assert share.mean() == pytest.approx(21 / 141)
    assert 0.08 < share[20] < 0.22
    inside = np.delete(share, [0, 70, 71])
    assert inside.min() > 0.06
    assert inside.max() < 0.25


def test_a_continuation_right_after_an_end_token(make):
    masker = make(["new york"])
    row = np.concatenate([ids("ing ▁new </s> ing ing ▁york </s>"), row_of_words()])[:141]
    for seed in range(20):
        check(masker, row, seed)


@pytest.mark.parametrize(
    "row",
    [
        np.array([ID["Y"]] * 141),  # one word
        np.array([EOS] * 141),
        np.array([EOS] * 130 + [ID["▁w1"]] * 11),
        np.array([ID["▁w1"], EOS] * 70 + [ID["▁w2"]]),
        np.array([ID["▁new"], *[ID["ing"]] * 45] * 3 + [EOS] * 3),
        np.array([EOS] * 100 + [ID["Y"]] * 41),
        np.array([EOS] * 120 + [ID["▁w1"]] * 21),
    ],
)
def test_lengths_are_exact_where_units_cannot_make_them(make, row):
    masker = make(["new york"])
    for seed in range(20):
        check(masker, row, seed)


def test_a_run_that_can_only_grow_backwards_into_a_long_word(make):
    masker = make(["new york"], mean_span=21.0)
    row = np.array([ID["Y"]] * 130 + [ID["▁w1"]] * 11)
    for seed in range(20):
        assert check(masker, row, seed, mean_span=21.0)[-21:].all()


def test_draws_are_functions_of_the_generator(make):
    masker, row = make(["new york"]), row_of_words()
    first = masker(row, np.random.default_rng(1))[0].tolist()
    assert (
        first == masker(row, np.random.default_rng(1))[0].tolist() != masker(row, np.random.default_rng(2))[0].tolist()
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "empty. Expected one n-gram"),
        (b"new york\nword\n", ":2: expected an n-gram of two or more words, got 'word'"),
        (b"new york\n\n", ":2: expected an n-gram of two or more words, got ''"),
        (b"new york\n\xff\xff\n", ":2: not UTF-8"),
    ],
)
def test_vocabularies_that_are_refused(tmp_path, content, message):
    (tmp_path / "ngrams.txt").write_bytes(content)
    with pytest.raises(DataError, match=re.escape(f"ngrams.txt{message}" if message[0] == ":" else message)):
        ngrams.read_vocabulary(tmp_path / "ngrams.txt")


def test_as_an_option_of_span_corruption(places, write_corpus, make_tokenizer):
    write_corpus("t", [{"text": f"The New York {'times ' * i}of new york"} for i in range(30)])
    controls = ("<|endoftext|>", "<|pad|>", *[f"<extra_id_{k}>" for k in range(100)])
    tokenizer = make_tokenizer(controls, "<|pad|>")
    values = {"corpus": "t", "input_tokens": 128, "mean_span_tokens": 8.0, "ngrams": "lists/ngrams.txt"}
    config = load(span_corruption.Config, values, "data")
    with pytest.raises(DataError, match=r"lists/ngrams.txt: no such file. data.ngrams must be a text file"):
        config.check(places)
    path = places.data / "lists" / "ngrams.txt"
    path.parent.mkdir()
    path.write_text("new york\n")
    config.check(places)
    data = config.build(places, tokenizer, "train", 0)
    raw, targets = noise.lengths(128, 0.15, 8.0)
    batch = data.collate([data.sample(0, i) for i in range(len(data))])
    assert raw > 128
    assert (batch["input_ids"].shape[1], batch["labels"].shape[1]) == (128, targets)
    assert batch["attention_mask"].all()
    plain = load(span_corruption.Config, {**values, "ngrams": None}, "data").build(places, tokenizer, "train", 0)
    path.write_text("new jersey\n")
    other = config.build(places, tokenizer, "train", 0)
    assert len({data.fingerprint, other.fingerprint, plain.fingerprint}) == 3


@pytest.mark.parametrize(("density", "mean_span"), [(0.15, 3.0), (0.3, 2.0), (0.5, 8.0)])
def test_words_are_masked_completely_with_exact_lengths(sentence_piece, density, mean_span):
    masker = ngrams.Ngrams(Words(sentence_piece), ngrams.NO_NGRAMS, (density, mean_span), SENTINELS, EOS)
    row = row_of_words()
    row[1::5] = ID["ing"]  # "newing", a word of two tokens; "new york" is no unit
    pairs = np.flatnonzero((row[:-1] == ID["▁new"]) & (row[1:] == ID["ing"]))
    assert len(pairs) > 20
    plain = [noise.noise_mask(len(row), density, mean_span, np.random.default_rng(seed)) for seed in range(50)]
    assert any((mask[pairs] != mask[pairs + 1]).any() for mask in plain)
    masks = [check(masker, row, seed, density, mean_span) for seed in range(50)]
    for mask in masks:
        assert (mask[pairs] == mask[pairs + 1]).all()
    assert 0.5 * density < np.mean([mask[pairs] for mask in masks]) < 1.7 * density


@pytest.mark.parametrize(
    ("module", "values"),
    [
        (span_corruption, {"input_tokens": 64}),
        (ul2, {"input_tokens": 64, "denoisers": [{"rate": 1.0, "mean_span_tokens": 3.0, "noise_density": 0.15}]}),
    ],
)
def test_masking_of_words_as_an_option(places, write_corpus, make_tokenizer, module, values):
    write_corpus("t", [{"text": " ".join(f"{chr(97 + (i + j) % 26)}x" for j in range(40))} for i in range(20)])
    controls = ("<|endoftext|>", "<|pad|>", *[f"<extra_id_{k}>" for k in range(100)])
    tokenizer = make_tokenizer(controls, "<|pad|>")

    def cut_words(whole_words: bool) -> int:
        """Number of inputs with a sentinel after the first letter of a word."""
        config = load(module.Config, {"corpus": "t", **values, "whole_words": whole_words}, "data")
        data = config.build(places, tokenizer, "train", 0)
        texts = [tokenizer.decode(data.sample(0, i)["input_ids"]) for i in range(len(data))]
        return sum(len(re.findall(r"\b[a-z]<extra_id", text)) for text in texts)

    assert cut_words(whole_words=False) > 20
    assert cut_words(whole_words=True) <= 3, "a word is split only where the lengths need it"


def test_masking_of_words_is_part_of_ngrams():
    with pytest.raises(ConfigError, match="whole_words"):
        load(
            span_corruption.Config, {"corpus": "t", "ngrams": "a.txt", "whole_words": True, "input_tokens": 64}, "data"
        )
