"""Documents on disk as token ids, and in memory: the same ids, lengths and packed rows."""

import json
import pickle
import re

import numpy as np
import pytest

from src.data.text import dataset, documents, token_files
from src.data.text.documents import PackedRows, join_documents
from src.data.text.tokenizers import tokenizer_digest
from src.errors import DataError
from src.experiments.config import load
from src.files import new_directory

EOS = 0


def ids(string):
    return [8 + b for b in string.encode()]


@pytest.fixture
def write_tokens(places, tokenizer):
    """Write token files: each split as a list of shards, each a list of texts."""

    def write(name, train, val=(("v",),), dtype="uint16", **changes):
        about = {
            "name": "bytes",
            "fingerprint": tokenizer_digest(tokenizer),
            "eos_id": EOS,
            "vocab_size": len(tokenizer),
        }
        facts = {"format": token_files.FORMAT, "dtype": dtype, "tokenizer": {**about, **changes}, "splits": {}}
        with new_directory(places.data / name, facts) as folder:
            for split, shards in (("train", train), ("val", val)):
                facts["splits"][split] = [
                    write_shard(folder, f"{split}-{n:05d}", texts, dtype) for n, texts in enumerate(shards)
                ]
        return places.data / name

    return write


def write_shard(folder, name, texts, dtype):
    with token_files.Writer(folder, name, dtype) as writer:
        for string in texts:
            writer.append(np.array([*ids(string), EOS]), np.array([len(string.encode()) + 1]))
        return writer.close()


def read_all(text):
    return [text[i].tolist() for i in range(len(text))]


SHARDS = [["abc", ""], ["defgh"], ["i", "jk", "l"]]
TEXTS = [string for shard in SHARDS for string in shard]
FULL = [[string for string in shard if string] for shard in SHARDS]
"""Without the empty document, of which a plain corpus leaves nothing."""


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_documents_come_back_without_their_end_tokens(places, tokenizer, write_tokens, dtype):
    write_tokens("t", SHARDS, dtype=dtype)
    text = documents.read(places, "t", tokenizer, "train")
    assert read_all(text) == [ids(string) for string in TEXTS]
    assert text[0].dtype == np.int32
    assert text.num_tokens == 18
    with pytest.raises(IndexError, match="document 6 of 6"):
        text[6]


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 7, 17])
def test_rows_are_the_documents_joined_with_end_tokens(places, tokenizer, write_tokens, write_corpus, length):
    write_tokens("t", FULL)
    write_corpus("plain", [{"text": string, "source": "s"} for string in TEXTS])
    stream = [token for string in TEXTS if string for token in [*ids(string), EOS]]
    for corpus in ("t", "plain"):
        rows = PackedRows(documents.read(places, corpus, tokenizer, "train"), length)
        assert [rows.row(i).tolist() for i in range(len(rows))] == [
            stream[i * length : (i + 1) * length] for i in range(len(stream) // length)
        ]
        with pytest.raises(IndexError, match=f"sample {len(rows)} of"):
            rows.row(len(rows))


def test_changing_a_returned_row_does_not_change_the_data(places, tokenizer, write_tokens):
    write_tokens("t", SHARDS)
    rows = PackedRows(documents.read(places, "t", tokenizer, "train"), 4)
    rows.row(0)[:] = 7
    assert rows.row(0).tolist() == [*ids("abc"), EOS]


def test_rows_of_in_memory_shards_of_any_kind():
    shards = [join_documents([[1], []], 9), join_documents([], 9), join_documents([[2, 3]], 9)]
    rows = PackedRows(documents.Documents(shards, 9, "f", None), 3)  # pyright: ignore[reportArgumentType]
    assert [rows.row(i).tolist() for i in range(len(rows))] == [[1, 9, 9], [2, 3, 9]]


def test_ids_that_fill_16_bits_stay_themselves(tmp_path):
    with token_files.Writer(tmp_path, "a", "uint16") as writer:
        writer.append(np.array([65535, 0]), np.array([2]))
        writer.close()
    assert np.fromfile(tmp_path / "a.ids", "<u2").tolist() == [65535, 0]
    assert [token_files.id_dtype(n) for n in (65536, 65537)] == ["uint16", "uint32"]


def test_a_shard_without_documents_leaves_no_files(tmp_path):
    with token_files.Writer(tmp_path, "a", "uint16") as writer:
        assert writer.close() is None
    assert not list(tmp_path.iterdir())


def test_text_data_of_token_files_are_those_of_the_plain_corpus(places, tokenizer, write_tokens, write_corpus):
    write_tokens("t", FULL, val=[["abcdefgh", "x"]])
    write_corpus(
        "plain",
        [{"text": string, "source": "s"} for string in TEXTS],
        [{"text": t, "source": "s"} for t in ("abcdefgh", "x")],
    )
    for split in ("train", "val"):
        datasets = []
        for corpus in ("t", "plain"):
            config = load(dataset.Config, {"corpus": corpus, "sequence_tokens": 3, "val_sequences": 2}, "data")
            config.check(places)
            data = config.build(places, tokenizer, split, 0)
            datasets.append([data.sample(0, i) for i in range(len(data))])
        assert datasets[0] == datasets[1]
        assert len(datasets[0]) == {"train": 5, "val": 2}[split]


def test_another_tokenizer_is_refused(places, make_tokenizer, write_tokens):
    write_tokens("t", SHARDS)
    other = make_tokenizer(["<|endoftext|>", "<|pad|>", "<more>"])
    with pytest.raises(
        DataError, match=r"t: tokenised with 'bytes' \(sha256 [0-9a-f]{12}\), but the model has another tokenizer"
    ):
        documents.read(places, "t", other, "train")


def test_another_end_token_is_refused(places, tokenizer, write_tokens):
    write_tokens("t", SHARDS, eos_id=5)
    with pytest.raises(DataError, match="documents end with token 5, but the model's end token is 0"):
        documents.read(places, "t", tokenizer, "train")


def test_missing_splits_and_files_are_found_without_reading(places, write_tokens):
    folder = write_tokens("t", SHARDS)
    dataset.Config(corpus="t", sequence_tokens=2).check(places)
    (folder / "train-00001.ids").write_bytes(b"1")
    with pytest.raises(DataError, match=r"train-00001.ids: 1 bytes, expected 12 bytes"):
        dataset.Config(corpus="t", sequence_tokens=4).check(places)
    write_tokens("u", SHARDS, val=[])
    with pytest.raises(DataError, match=r"u: no documents for the split 'val'. Splits: train, val"):
        dataset.Config(corpus="u", sequence_tokens=4).check(places)
    with pytest.raises(DataError, match=r"no such data set: unknown corpus .nothing.*Known: t, u\."):
        dataset.Config(corpus="nothing", sequence_tokens=4).check(places)


def rewrite(folder, change):
    manifest = json.loads((folder / "manifest.json").read_text())
    change(manifest)
    (folder / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.update(format="token files 9"), "expected the format 'token files 1', got 'token files 9'"),
        (lambda m: m.pop("dtype"), "does not describe token files: KeyError 'dtype'"),
        (lambda m: m["splits"]["train"][0].update(name="x"), "files of shard 'x' are missing in the manifest"),
        (
            lambda m: m["splits"]["train"][0].update(tokens=4),
            "train-00000.ids: 10 bytes, expected 4 numbers of 2 bytes",
        ),
    ],
)
def test_a_manifest_that_does_not_fit_is_refused(places, tokenizer, write_tokens, change, message):
    rewrite(write_tokens("t", SHARDS), change)
    with pytest.raises(DataError, match=re.escape(message)):
        documents.read(places, "t", tokenizer, "train")


def test_ends_that_do_not_fit_are_refused(places, tokenizer, write_tokens):
    folder = write_tokens("t", SHARDS)
    np.array([0, 4, 6], "<i8").tofile(folder / "train-00000.ends")
    with pytest.raises(DataError, match=r"train-00000.ends: damaged: ends at 6, not at 5"):
        documents.read(places, "t", tokenizer, "train")


def test_a_copy_in_another_process_maps_the_same_files_or_refuses(places, tokenizer, write_tokens):
    write_tokens("t", SHARDS)
    text = documents.read(places, "t", tokenizer, "train")
    packed = pickle.dumps(PackedRows(text, 4))
    assert len(packed) < 1000
    assert pickle.loads(packed).row(1).tolist() == [EOS, *ids("def")]
    write_tokens("t", [["other"]])
    assert read_all(text) == [ids(string) for string in TEXTS]
    with pytest.raises(DataError, match="changed during this run"):
        pickle.loads(packed)
