"""Tokenizers with T5's sentinels: where their ids are, and what no text can become."""

import json
import re

import pytest

from data_prep import training_text
from data_prep.t5.t5_tokenizer import from_sentencepiece, main, prepare
from src.data.text import tokenizers
from src.errors import DataError
from tests.conftest import ROOT
from tests.core.data.conftest import make_tokenizer  # noqa: F401  a fixture

CONTROL_TEXTS = ["</s>", "a <extra_id_0> b</s>c", "<pad><unk>", "<extra_id_99>", "</s></s> <pad>", "<unk>"]


@pytest.fixture
def with_bytes(tmp_path, make_tokenizer):  # noqa: F811
    """A data path with byte tokenizers, one of them without padding of its own."""
    make_tokenizer().save_pretrained(tmp_path / "bytes")
    make_tokenizer(["<|endoftext|>", "<more>"], pad=None).save_pretrained(tmp_path / "unpadded")
    return tmp_path


@pytest.fixture(scope="module")
def spiece(tmp_path_factory):
    """A small SentencePiece model of T5's kind: <pad> 0, </s> 1, <unk> 2, no start."""
    import sentencepiece

    folder = tmp_path_factory.mktemp("spiece")
    lines = [f"The house number {n} is wonderful, said <{n % 7}> of {n * 7919 % 101}/s." for n in range(300)]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_prefix=str(folder / "small"),
        vocab_size=90,
        pad_id=0,
        eos_id=1,
        unk_id=2,
        bos_id=-1,
        minloglevel=2,
    )
    return folder / "small.model"


@pytest.fixture(scope="session")
def t5(shared_data):
    """T5's own model."""
    path = shared_data / "tokenizer" / "t5" / "spiece.model"
    if not path.is_file():
        pytest.skip(f"{path} is not there: T5's SentencePiece model")
    return path


@pytest.mark.parametrize(("name", "pad", "tokens"), [("bytes", 7, 264), ("unpadded", 258, 258 + 1)])
def test_sentinels_have_the_highest_ids(with_bytes, name, pad, tokens):
    assert prepare(with_bytes, "made", name)
    tokenizer = tokenizers.load(with_bytes / "made")
    assert len(tokenizer) == tokens + 100
    assert tokenizer.convert_tokens_to_ids([f"<extra_id_{n}>" for n in (99, 98, 1, 0)]) == [
        tokens,
        tokens + 1,
        tokens + 98,
        tokens + 99,
    ]
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (0, pad)


def test_text_is_cut_as_before(with_bytes):
    prepare(with_bytes, "made", "bytes")
    before, after = (tokenizers.SafeTokenizer(tokenizers.load(with_bytes / name)) for name in ("bytes", "made"))
    for string in [*CONTROL_TEXTS, "plain text", "<|endoftext|><|user|>"]:
        assert after.encode(string) == before.encode(string)
    assert after.start == []
    assert after.control_id("<|user|>") == before.control_id("<|user|>")
    assert after.control_id("<extra_id_0>") == 363


def test_an_export_ends_texts_as_it_was_trained(with_bytes, tmp_path):
    """Plain transformers, which knows nothing of our data sets, gives the ids that these give, and the end token."""
    from transformers import AutoTokenizer

    prepare(with_bytes, "made", "bytes")
    plain = AutoTokenizer.from_pretrained(with_bytes / "made")
    ours = tokenizers.SafeTokenizer(tokenizers.load(with_bytes / "made"))
    assert plain("plain text")["input_ids"] == [*ours.encode("plain text"), ours.eos_id]
    assert ours.start == []


def test_as_many_sentinels_as_wanted(with_bytes, spiece, capsys):
    assert main(["--data_path", str(with_bytes), "--from", "bytes", "--name", "many", "--sentinels", "128"]) == 0
    tokenizer = tokenizers.load(with_bytes / "many")
    assert tokenizer.convert_tokens_to_ids(["<extra_id_127>", "<extra_id_0>"]) == [264, 391]
    assert len(from_sentencepiece(spiece, 3)) == 93
    assert main(["--data_path", str(with_bytes), "--from", "bytes", "--name", "none", "--sentinels", "0"]) == 1
    assert "--sentinels: expected at least 1, got 0" in capsys.readouterr().err


def test_made_once(with_bytes, capsys):
    main(["--data_path", str(with_bytes), "--from", "bytes", "--name", "made"])
    main(["--data_path", str(with_bytes), "--from", "bytes", "--name", "made"])
    assert re.search(
        r"made: made in [\d.]+ s\n.*made: complete and made from these .*: nothing to do", capsys.readouterr().out
    )
    assert prepare(with_bytes, "made", "unpadded")
    manifest = json.loads((with_bytes / "made" / "manifest.json").read_text())
    assert manifest["tokens"] == 359


def test_impossible_tokenizers_are_refused(with_bytes, spiece):
    prepare(with_bytes, "made", "bytes")
    with pytest.raises(DataError, match=r"made: already has 100 sentinels, such as '<extra_id_0>'. Use it as it is."):
        prepare(with_bytes, "again", "made")
    with pytest.raises(DataError, match=r"--name: .*bytes is also the source"):
        prepare(with_bytes, "bytes", "bytes")
    for content, message in (
        (None, "no such file"),
        (b"\xff" * 9, "not a SentencePiece model"),
        (b"", "not a unigram model of SentencePiece"),
    ):
        path = with_bytes / "bad.model"
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(DataError, match=f"bad.model: {message}"):
            prepare(with_bytes, "x", spiece=path)


def compare(model, tokenizer, texts):
    import sentencepiece

    reference = sentencepiece.SentencePieceProcessor(model_file=str(model))
    encoder = tokenizers.SafeTokenizer(tokenizer)
    for string in texts:
        assert encoder.encode(string) == reference.encode(string), string


def test_a_sentencepiece_model_cuts_text_as_sentencepiece_does(spiece, tmp_path):
    assert prepare(tmp_path, "made", spiece=spiece)
    tokenizer = tokenizers.load(tmp_path / "made")
    assert len(tokenizer) == 190
    assert tokenizer.convert_tokens_to_ids(["<pad>", "</s>", "<unk>", "<extra_id_99>", "<extra_id_0>"]) == [
        0,
        1,
        2,
        90,
        189,
    ]
    texts = [
        "The house is wonderful.",
        "",
        "  two  spaces \n and\ta tab",
        "ünknown 日本 letters",
        "ﬁne ½ Ⅷ",
        *CONTROL_TEXTS,
    ]
    compare(spiece, tokenizer, texts)


def test_ids_of_t5(t5, tmp_path):
    """Those that T5's paper repository and transformers' documentation give."""
    prepare(tmp_path, "t5", spiece=t5)
    tokenizer = tokenizers.load(tmp_path / "t5")
    assert len(tokenizer) == 32_100
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<extra_id_0>")) == (
        0,
        1,
        32_099,
    )
    text = "translate English to German: The house is wonderful."
    assert tokenizer(text)["input_ids"] == [13959, 1566, 12, 2968, 10, 37, 629, 19, 1627, 5, 1]
    assert tokenizer.decode(tokenizers.SafeTokenizer(tokenizer).encode(text)) == text
    assert tokenizers.SafeTokenizer(tokenizer).eos_id == 1
    assert tokenizers.SafeTokenizer(tokenizer).start == []


def test_t5_cuts_real_text_as_sentencepiece_does(t5):
    """A source of ours by paragraphs, and what is special. Long runs of one sign, which have many best cuts, are left
    out."""
    source = (ROOT / "src" / "files.py").read_text(encoding="utf-8")
    texts = [
        *CONTROL_TEXTS,
        *source.split("\n\n"),
        "naïve café ﬁne ½ Ⅷ \u3000 x\u200bz",
        "emoji 😀😀 x",
        "{curly} ~tilde~",
        "日本語",
    ]
    compare(t5, from_sentencepiece(t5), texts)


def test_sentence_tokens_follow_the_sentinels(with_bytes, t5, capsys):
    main(["--data_path", str(with_bytes), "--name", "named", "--from", "bytes", "--sentences", "3"])
    main(["--data_path", str(with_bytes), "--name", "plain", "--from", "bytes"])
    assert prepare(with_bytes, "later", "plain", sentences=3)
    for name in ("named", "later"):
        tokenizer = tokenizers.load(with_bytes / name)
        assert tokenizer.convert_tokens_to_ids(
            ["<extra_id_99>", "<extra_id_0>", "<eosen>", "<sent_0>", "<sent_2>"]
        ) == [
            264,
            363,
            364,
            365,
            367,
        ]
        assert len(tokenizer) == 368
        text = "a <eosen><sent_1> b"
        assert tokenizer.decode(tokenizers.SafeTokenizer(tokenizer).encode(text)) == text
        assert max(tokenizers.SafeTokenizer(tokenizer).encode(text)) < 264
        assert tokenizers.SafeTokenizer(tokenizer).control_id("<sent_1>") == 366
    assert not prepare(with_bytes, "later", "plain", sentences=3)
    assert prepare(with_bytes, "t5", spiece=t5, sentences=20)
    tokenizer = tokenizers.load(with_bytes / "t5")
    assert tokenizer.convert_tokens_to_ids(["<extra_id_0>", "<eosen>", "<sent_19>"]) == [32099, 32100, 32120]
    with pytest.raises(DataError, match=r"named: already has the token '<eosen>'"):
        prepare(with_bytes, "again", "named", sentences=4)
    assert main(["--data_path", str(with_bytes), "--name", "x", "--from", "bytes", "--sentences", "-1"]) == 1
    assert "--sentences: expected at least 0, got -1" in capsys.readouterr().err


@pytest.fixture
def text(tmp_path):
    """A .txt and a .jsonl file of our own documentation."""
    pages = [path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs").glob("*.md"))]
    (tmp_path / "a.txt").write_text(pages[0])
    (tmp_path / "b.jsonl").write_text("".join(json.dumps({"text": page}) + "\n" for page in pages[1:]))
    return tmp_path


def train(folder, name, *options):
    sources = [str(folder / "a.txt"), str(folder / "b.jsonl")]
    return main(["--data_path", str(folder), "--name", name, "--train", *sources, "--vocab_size", "600", *options])


@pytest.mark.parametrize("model", ["unigram", "bpe"])
def test_trained_on_text_it_has_the_ids_of_t5(text, model, capsys):
    """And two trainings give the same bytes."""
    for name in ("one", "two"):
        assert train(text, name, "--model", model, "--sentinels", "128", "--sentences", "2") == 0
    assert (text / "one" / "tokenizer.json").read_bytes() == (text / "two" / "tokenizer.json").read_bytes()
    tokenizer = tokenizers.load(text / "one")
    names = ["<pad>", "</s>", "<unk>", "<extra_id_127>", "<extra_id_0>", "<eosen>", "<sent_1>"]
    assert tokenizer.convert_tokens_to_ids(names) == [0, 1, 2, 600, 727, 728, 730]
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id, len(tokenizer)) == (0, 1, 2, 731)
    encoder = tokenizers.SafeTokenizer(tokenizer)
    words = "A tokenizer trained on text"
    assert tokenizer.decode(encoder.encode(words)) == words
    assert tokenizer(words)["input_ids"] == [*encoder.encode(words), 1]
    assert len(encoder.encode(words)) < 14  # of 27 characters
    assert max(encoder.encode(" ".join(CONTROL_TEXTS))) < 600
    assert (tokenizer.decode(encoder.encode("a\n  b")) == "a\n  b") == (model == "bpe")
    assert train(text, "one", "--model", model, "--sentinels", "128", "--sentences", "2") == 0
    assert "nothing to do" in capsys.readouterr().out
    assert train(text, "one", "--model", model, "--sentinels", "127") == 0
    assert len(tokenizers.load(text / "one")) == 727


def test_untrainable_text_is_refused(text, capsys):
    for options, message in (
        (
            ["--vocab_size", "90000"],
            r"--vocab_size: Vocabulary size too high \(90000\). Please set it to a value <= \d+\.\n",
        ),
        (
            ["--vocab_size", "90000", "--model", "bpe"],
            r"--vocab_size: Vocabulary size too high \(90000\). Please set it to a value <= \d+\.",
        ),
        (["--vocab_size", "20"], r"--vocab_size: Vocabulary size is smaller than required_chars. 20 vs \d+\.\n"),
        (["--vocab_size", "200", "--model", "bpe"], "--vocab_size: expected at least 259, got 200"),
        (["--text_field", "body"], "b.jsonl:1: field 'body' is missing"),
    ):
        assert train(text, "none", *options) == 1
        assert re.search(message, capsys.readouterr().err)
        assert not (text / "none").exists()
    assert main(["--data_path", str(text), "--name", "none", "--from", "bytes", "--vocab_size", "90"]) == 1
    assert "--vocab_size: only for --train" in capsys.readouterr().err
    (text / "blank.txt").write_text("\n \n")
    assert main(["--data_path", str(text), "--name", "none", "--train", str(text / "blank.txt")]) == 1
    assert "--train: the sources contain no text." in capsys.readouterr().err


def test_lines_of_a_large_text_are_a_sample_of_all_of_it():
    text = "\n".join(f"line {i:04}" for i in range(1000))
    assert training_text.sample_lines([text]) == text.split("\n")
    more = text.replace("line", "more")
    assert training_text.sample_lines([text, more], most=2_000) == f"{text}\n{more}".split("\n")[::16]
    long = training_text.sample_lines(["é" * 3000 + " word" * 500])
    assert max(map(len, long)) <= 1024
    assert "".join("".join(long).split()) == "é" * 3000 + "word" * 500
    assert all(line.startswith("word") for line in long[3:])
