"""val_bits_per_byte and validation.json: the same bytes for every tokenizer, split and number of processes."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from data_prep.tokenize import Options, tokenise
from src.data.text import tokenizers
from src.data.text.tokenizers import SafeTokenizer
from src.evaluation import validation_record
from src.experiments.config import Places
from src.experiments.dataset_protocols import content_of
from src.experiments.identity import exp_id
from src.experiments.interfaces import load_experiment
from src.runs.context import Run
from tests import toy

TEXTS = {
    split: [f"# {number} naïve 漢字 x{number * 7} says \N{GRINNING FACE} the number\n" * 3 for number in numbers]
    for split, numbers in (("train", range(40)), ("val", range(40, 52)))
}
"""Each document starts with "#", which is one token of every tokenizer here."""
LINES = {"name": "text", "corpus": "lines", "sequence_tokens": 32}


def byte_tokenizer(size: int) -> PreTrainedTokenizerFast:
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=["<|end|>"], initial_alphabet=alphabet)
    inner.train_from_iterator(TEXTS["train"], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|end|>")


def fallback_tokenizer(prefix: bool) -> PreTrainedTokenizerFast:
    """As SentencePiece makes them: letters, blanks as "▁", and bytes for other characters."""
    words = ["<|end|>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", *"aednC", "\u00c4"]
    inner = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, [], byte_fallback=True, unk_token="<0x00>"))
    replace = normalizers.Replace(" ", "\u2581")
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), replace]) if prefix else replace
    inner.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|end|>")


@pytest.mark.parametrize("size", [257, 400])
def test_bytes_of_the_tokens_of_a_text_add_up(size: int):
    tokenizer = byte_tokenizer(size)
    tokenizer.add_tokens(["naïve"])
    sizes = tokenizers.token_bytes(tokenizer)
    assert sizes is not None
    assert sizes[tokenizer.get_vocab()["<|end|>"]] == 0
    for text in (*TEXTS["val"], "naïve \x00\t <|end|> e\u0301"):
        assert sum(sizes[i] for i in SafeTokenizer(tokenizer).encode(text)) == len(text.encode())


def test_tokenizers_with_tokens_that_are_no_bytes_of_the_text():
    """Words; a blank before the text. Bytes for unknown characters are bytes."""
    assert tokenizers.token_bytes(fallback_tokenizer(prefix=True)) is None
    assert tokenizers.token_bytes(fallback_tokenizer(prefix=False)) is not None
    words = Tokenizer(models.WordLevel({"a": 0, "<unk>": 1}, unk_token="<unk>"))
    assert tokenizers.token_bytes(PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<unk>")) is None


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bytes")
    toy.write_data(folder / "data")
    for size in (257, 300):
        byte_tokenizer(size).save_pretrained(folder / "data" / f"bytes{size}")
        manifest = {"files": {"tokenizer.json": {}}}
        (folder / "data" / f"bytes{size}" / "manifest.json").write_text(json.dumps(manifest))
    for name, end in (("lines", ""), ("more_lines", "#")):
        with toy.new_directory(folder / "data" / name) as corpus:
            for split, texts in TEXTS.items():
                rows = [json.dumps({"text": text + end}) + "\n" for text in texts]
                (corpus / f"{split}.jsonl").write_text("".join(rows))
    return folder


def experiment(tokenizer: str, data: dict[str, Any]) -> dict[str, Any]:
    loop = {"steps": 2, "sequences_per_step": 4, "micro_batch": 2, "learning_rate": 1e-2, "eval_every": 1}
    return {
        **toy.BASE,
        "model": {**toy.BASE["model"], "tokenizer": tokenizer, "max_positions": 512},
        "data": data,
        "loop": loop,
    }


def train(folder: Path, exp: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The last row of scores, and validation.json."""
    assert toy.main(["-e", "g"], {"g": [exp]}, folder) == 0
    run = folder / "runs" / exp_id(exp)
    return toy.rows(folder, run.name)[-1], json.loads((run / "validation.json").read_text())


def test_two_tokenizers_have_the_same_denominator(folder: Path):
    documents = {"name": "documents", "corpus": "lines", "sequence_tokens": 512}
    expected = [len(text.encode()) - 1 for text in TEXTS["val"]]  # the first token is not scored
    for size in (257, 300):
        row, record = train(folder, experiment(f"bytes{size}", documents))
        assert record["bytes"] == expected
        assert (record["step"], record["samples"]) == (2, len(expected))
        assert row["val_loss"] == pytest.approx(sum(record["nats"]) / sum(record["tokens"]), rel=1e-5)
        bits = row["val_loss"] * sum(record["tokens"]) / math.log(2)
        assert row["val_bits_per_byte"] == pytest.approx(bits / sum(expected), rel=1e-6)


@pytest.mark.parametrize(
    "data",
    [
        LINES,
        {"name": "text", "corpus": "ids", "sequence_tokens": 32},
        {"name": "packed", "documents": {"name": "documents", "corpus": "lines"}, "sequence_tokens": 256},
        {
            "name": "mixture",
            "parts": {name: {"name": "text", "corpus": "lines", "sequence_tokens": 32} for name in "ab"},
        },
    ],
    ids=["text", "ids", "packed", "mixture"],
)
def test_data_with_the_score(folder: Path, data: dict[str, Any]):
    if not (folder / "data" / "ids").exists():
        tokenise(folder / "data", Options("ids", "bytes300", corpus="lines"))
    row, record = train(folder, experiment("bytes300", data))
    bits = sum(record["nats"]) / math.log(2)
    assert row["val_bits_per_byte"] == pytest.approx(bits / sum(record["bytes"]), rel=1e-5)
    text = sum(len(text.encode()) for text in TEXTS["val"])
    assert 0.7 * text < sum(record["bytes"]) / len(data.get("parts", "a")) < text


def test_validation_data_are_equal_if_the_text_is(folder: Path):
    """With other lengths, packing and tokenizers, of token files too; not with another text."""
    for size in (257, 300):
        for name, corpus in (("files", "lines"), ("others", "more_lines")):
            if not (folder / "data" / f"{name}{size}").exists():
                tokenise(folder / "data", Options(f"{name}{size}", f"bytes{size}", corpus=corpus))
    packed = {"name": "packed", "documents": {"name": "documents", "corpus": "lines"}, "sequence_tokens": 256}

    def content(tokenizer: str, data: dict[str, Any]) -> str:
        places = Places(folder / "data", folder / "runs")
        recipe = load_experiment(experiment(tokenizer, data), "here")
        return content_of(recipe.data.build(places, tokenizers.load(places.data / tokenizer), "val", 0))

    rows = content("bytes300", LINES)
    assert rows == content("bytes257", {**LINES, "sequence_tokens": 64}) == content("bytes257", packed)
    assert rows != content("bytes300", {**LINES, "corpus": "more_lines"})
    files = [content(f"bytes{size}", {**LINES, "corpus": f"files{size}"}) for size in (257, 300)]
    others = [content(f"bytes{size}", {**LINES, "corpus": f"others{size}"}) for size in (257, 300)]
    assert files[0] == files[1] != others[0] == others[1]


def test_word_tokenizers_have_no_score(folder: Path):
    row, record = train(
        folder, experiment("toy_tokenizer", {"name": "text", "corpus": "toy_text", "sequence_tokens": 16})
    )
    assert "val_bits_per_byte" not in row
    assert "bytes" not in record


@pytest.mark.slow
def test_the_score_is_equal_at_any_number_of_processes(folder: Path, tmp_path: Path):
    exp = experiment("bytes300", LINES)
    row, record = train(folder, exp)
    (tmp_path / "data").symlink_to(folder / "data")
    root = toy.project(tmp_path, f"EXP_GROUPS = {{'g': [{exp!r}]}}")
    done = toy.run(root, ["-e", "g"], tmp_path, processes=2)
    assert done.returncode == 0, done.stderr
    run = tmp_path / "runs" / exp_id(exp)
    score = toy.rows(tmp_path, run.name)[-1]["val_bits_per_byte"]
    assert score == pytest.approx(row["val_bits_per_byte"], rel=1e-6)
    shared_record = json.loads((run / "validation.json").read_text())
    assert [shared_record[name] for name in ("bytes", "tokens")] == [record[name] for name in ("bytes", "tokens")]


def test_many_samples_are_joined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from src.runs.run_dir import RunDir
    from src.training.validation import SampleSums

    monkeypatch.setattr(validation_record, "MAX_ROWS", 3)
    samples = [SampleSums(i, 1.0, 2, 3) for i in range(10)]
    exp = {"recipe": "toy"}
    with RunDir.open(tmp_path, exp, exp, facts={}) as run_dir:
        validation_record.write(Run(run_dir, None), 5, {}, samples)  # type: ignore[arg-type]  no place is used
        record = json.loads((run_dir.path / "validation.json").read_text())
    assert (record["nats"], record["tokens"], record["samples"]) == ([3, 3, 4], [6, 6, 8], 10)
