"""Tokenising once: the same shards whatever the processes, and whole ones kept when a run is killed."""

import functools
import gzip
import json
import os
import re
import signal
import subprocess
import sys
import time

import psutil
import pyarrow
import pytest
from pyarrow import parquet

from data_prep import shards, token_workers
from data_prep.sources import parquet_rows, read_rows
from data_prep.tokenize import Options, main, tokenise
from src.data import jsonl
from src.data.text import documents, token_files, tokenizers
from src.errors import ConfigError, DataError, RunError
from src.experiments.config import Places
from src.files import new_directory, read_manifest, sha256
from tests.conftest import ROOT
from tests.core.data.conftest import CONTROLS, make_tokenizer  # noqa: F401  a fixture

TEXTS = [f"Document {n} says {'so ' * (n % 13)}é." for n in range(600)]


@pytest.fixture(scope="module")
def shared_folder(tmp_path_factory, make_tokenizer):  # noqa: F811
    """A data path with a byte tokenizer."""
    folder = tmp_path_factory.mktemp("data")
    make_tokenizer().save_pretrained(folder / "bytes")
    return folder


@pytest.fixture
def data(shared_folder, tmp_path):
    (tmp_path / "bytes").symlink_to(shared_folder / "bytes")
    return tmp_path


def write_lines(path, texts, field="text"):
    lines = "".join(json.dumps({field: string, "source": "s"}) + "\n" for string in texts).encode()
    path.write_bytes(gzip.compress(lines, mtime=0) if path.suffix == ".gz" else lines)
    return str(path)


def run(data, **changes):
    options = {"name": "made", "tokenizer": "bytes", "val_rate": 0.1, "shard_tokens": 10**6, **changes}
    return tokenise(data, Options(**options))


def read(data, split, name="made"):
    """Texts of all documents of a split."""
    corpus = documents.read(Places(data, data), name, tokenizers.load(data / "bytes"), split)
    shift = len(CONTROLS)
    return [bytes(int(i) - shift for i in corpus[n]).decode() for n in range(len(corpus))]


def hashes(folder):
    return {path.name: sha256(path) for path in folder.iterdir() if path.name != "manifest.json"}


def test_documents_are_parted_by_their_text(data):
    source = write_lines(data / "a.jsonl", TEXTS + TEXTS[:50])
    assert run(data, train=[source])
    train, val = read(data, "train"), read(data, "val")
    assert sorted(train + val) == sorted(TEXTS + TEXTS[:50])
    assert not set(train) & set(val)
    assert 0.05 < len(val) / 650 < 0.15
    assert train == [string for string in TEXTS + TEXTS[:50] if string in set(train)]


def test_the_share_of_validation_documents():
    assert abs(sum(token_workers.is_validation(f"text {n}", 0.02) for n in range(20_000)) - 400) < 80
    assert not any(token_workers.is_validation(f"text {n}", 0.0) for n in range(100))


def test_the_same_bytes_whatever_the_number_of_processes(data):
    sources = [
        write_lines(data / "a.jsonl", TEXTS),
        write_lines(data / "b.jsonl.gz", [f"More: {string}" for string in TEXTS]),
    ]
    for processes, name in ((1, "one"), (2, "two")):
        run(data, name=name, train=sources, shard_tokens=4000, processes=processes)
    expected = hashes(data / "one")
    assert len(expected) > 12
    assert expected == hashes(data / "two")
    manifests = [json.loads((data / name / "manifest.json").read_text()) for name in ("one", "two")]
    assert manifests[0] == manifests[1]


def test_sources_of_every_kind_give_the_same_documents(data):
    import datasets

    rows = {"text": TEXTS[:30]}
    parquet.write_table(pyarrow.table(rows), data / "b.parquet")
    dataset = datasets.Dataset.from_dict(rows)
    dataset.save_to_disk(data / "saved")
    datasets.DatasetDict({"train": dataset, "validation": dataset}).save_to_disk(data / "splits")
    (data / "d.json").write_text(json.dumps([{"text": string} for string in rows["text"]]))
    (data / "e.txt").write_text("\n\n" + "\n".join(rows["text"]) + "\n")
    (data / "hub").mkdir()
    write_lines(data / "hub" / "train.jsonl", rows["text"])
    (data / "f.txt").write_text("\n \n".join(string.replace(" ", "\n") for string in rows["text"]))
    val = write_lines(data / "val.jsonl", ["v"])
    names = ["b.parquet", "saved", "splits", "d.json", "e.txt", f"hub:{data / 'hub'}", "f.txt"]
    for number, name in enumerate(names):
        source = name if name.startswith("hub:") else str(data / name)
        by, streaming = "paragraph" if name == "f.txt" else "line", name.startswith("hub:")
        run(data, name=f"m{number}", train=[source], val=[val], val_rate=0.0, documents_by=by, streaming=streaming)
        expected = [string.replace(" ", "\n") for string in rows["text"]] if name == "f.txt" else rows["text"]
        assert read(data, "train", f"m{number}") == expected, name
        assert read(data, "val", f"m{number}") == ["v"]


def test_a_row_that_datasets_cannot_decode_is_refused(data):
    import datasets

    rows = datasets.Dataset.from_dict({"image": [{"bytes": b"no image", "path": None}]})
    rows = rows.cast_column("image", datasets.Image())
    with pytest.raises(DataError, match=re.escape(f"{data}: ")):
        list(read_rows(str(data), rows))


def test_a_text_file_is_one_document_by_default(data):
    (data / "a.txt").write_text("\n one\n\ntwo \n\n")
    run(data, train=[str(data / "a.txt")], val=[write_lines(data / "v.jsonl", ["v"])], val_rate=0.0)
    assert read(data, "train") == [" one\n\ntwo "]


def test_a_prepared_corpus_has_its_splits_and_drops_empty_documents(data):
    with new_directory(data / "plain") as folder:
        write_lines(folder / "train.jsonl", ["a", "", "b"])
        write_lines(folder / "val.jsonl", ["c"])
    run(data, corpus="plain", val_rate=0.0)
    assert read(data, "train") == ["a", "b"]
    assert read(data, "val") == ["c"]
    assert read_manifest(data / "made", DataError)["empty_documents"] == 1


def test_a_byte_order_mark_is_no_text(data):
    (data / "a.txt").write_bytes(b"\xef\xbb\xbfone\n\n\xef\xbb\xbftwo")
    run(data, train=[str(data / "a.txt")], val=[write_lines(data / "v.jsonl", ["v"])], val_rate=0.0)
    assert read(data, "train") == ["one\n\n\ufefftwo"]


@pytest.mark.parametrize(
    ("column", "value"),
    [("text", [b"good", b"\xff"]), ("other", [0, 2**50])],
)
def test_a_column_that_python_cannot_hold_is_refused(data, column, value):
    path = data / "a.parquet"
    kind = pyarrow.utf8() if column == "text" else pyarrow.timestamp("s")
    array = pyarrow.array(value, pyarrow.binary() if column == "text" else pyarrow.int64()).view(kind)
    parquet.write_table(pyarrow.table({column: array}), path)
    with pytest.raises(DataError, match=re.escape(f"{path}: row 1 or ")):
        list(parquet_rows(path, list))


def test_only_changed_options_or_sources_are_tokenised_again(data, capsys):
    source = write_lines(data / "a.jsonl", TEXTS)
    assert run(data, train=[source])
    assert not run(data, train=[source], processes=2)
    assert "nothing to do" in capsys.readouterr().out
    write_lines(data / "a.jsonl", TEXTS[1:])
    assert run(data, train=[source])
    assert len(read(data, "train") + read(data, "val")) == 599
    assert run(data, train=[source], val_rate=0.2)


def tokenised_sources(monkeypatch):
    """Counts the batches that are tokenised."""
    batches = []
    original = token_workers.tokenise_batch
    monkeypatch.setattr(
        token_workers, "tokenise_batch", lambda job, batch: batches.append(batch) or original(job, batch)
    )
    return batches


def test_finished_shards_survive_an_error(data, monkeypatch):
    lines = write_lines(data / "a.jsonl", TEXTS)
    second = write_lines(data / "b.jsonl", ["x"] * 300)
    with open(second, "a") as file:
        file.write('{"text": 5}\n')
    with pytest.raises(DataError, match=re.escape("b.jsonl:301: field 'text': expected str, got 5 (int).")):
        run(data, train=[lines, second], shard_tokens=4000)
    partial_folder = data / ".made.partial"
    finished_hashes = hashes(partial_folder)
    assert sum(name.endswith(".done.json") for name in finished_hashes) >= 3
    batches = tokenised_sources(monkeypatch)
    with pytest.raises(DataError, match=r"b.jsonl:301"):
        run(data, train=[lines, second], shard_tokens=4000)
    assert {batch.source for batch in batches} == {second}
    assert {
        name: digest for name, digest in hashes(partial_folder).items() if name in finished_hashes
    } == finished_hashes
    write_lines(data / "b.jsonl", ["x"] * 300)
    assert run(data, train=[lines, second], shard_tokens=4000)
    assert not partial_folder.exists()
    assert len(read(data, "train") + read(data, "val")) == 900


def test_a_streamed_set_resumes_without_reading_its_finished_rows(data, monkeypatch):
    """Counts the rows that the library hands out."""
    import datasets

    (data / "set").mkdir()
    for part in range(3):
        write_lines(data / "set" / f"train-{part}.jsonl", [f"{part} {string}" for string in TEXTS[:512]])
    options = {"train": [f"hub:{data / 'set'}"], "streaming": True, "shard_tokens": 12_000}
    run(data, name="whole", **options)
    original, read, most = datasets.IterableDataset.__iter__, [0], [1100]

    def fail_in_middle(self):
        for row in original(self):
            if read[0] == most[0]:
                raise RunError("the network is gone")
            read[0] += 1
            yield row

    monkeypatch.setattr(datasets.IterableDataset, "__iter__", fail_in_middle)
    with pytest.raises(RunError, match="the network is gone"):
        run(data, **options)
    batches = max(json.loads(path.read_text())["batches"] for path in (data / ".made.partial").glob("*.done.json"))
    read[0], most[0] = 0, 3 * 512
    run(data, **options)
    assert read[0] == 3 * 512 - batches * 256 < 3 * 512
    assert hashes(data / "made") == hashes(data / "whole")


def test_damaged_shards_are_written_again(data):
    lines = write_lines(data / "a.jsonl", TEXTS)
    run(data, name="whole", train=[lines], shard_tokens=4000)
    with open(lines, "a") as file:
        file.write("{")
    with pytest.raises(DataError, match=r"a.jsonl:601: not valid JSON"):
        run(data, train=[lines], shard_tokens=4000)
    write_lines(data / "a.jsonl", TEXTS)
    run(data, train=[lines], shard_tokens=4000)
    assert hashes(data / "made") == hashes(data / "whole")


@pytest.mark.slow
def test_a_killed_run_resumes_after_the_last_complete_shard(data):
    """kill -9 of the command, whose processes end with it; and one of the finished shards is torn before it goes on."""
    lines = write_lines(data / "a.jsonl", TEXTS * 12)
    run(data, name="whole", train=[lines], shard_tokens=12_000)
    command = [
        sys.executable,
        "-m",
        "data_prep.tokenize",
        "--data_path",
        str(data),
        "--name",
        "made",
        "--tokenizer",
        "bytes",
    ]
    command += ["--train", lines, "--val_rate", "0.1", "--shard_tokens", "12000", "--processes", "2"]
    process = subprocess.Popen(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, stderr=subprocess.DEVNULL
    )
    partial_folder, deadline = data / ".made.partial", time.monotonic() + 300
    while not (partial_folder / "00002.done.json").exists():
        assert process.poll() is None, "it ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.001)
    children = psutil.Process(process.pid).children(recursive=True)
    assert len(children) >= 2
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert not psutil.wait_procs(children, timeout=300)[1]
    done = len(list(partial_folder.glob("*.done.json")))
    before = {
        path.name: path.stat().st_mtime_ns
        for path in partial_folder.glob("*.ids")
        if int(path.stem.split("-")[1]) < done - 1
    }
    truncated = partial_folder / f"train-{done - 1:05d}.ids"
    os.truncate(truncated, truncated.stat().st_size - 2)
    seen = {}

    def publish(new, facts, publish=shards.Shards.publish):
        seen.update({path.name: path.stat().st_mtime_ns for path in partial_folder.glob("*.ids")})
        publish(new, facts)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards.Shards, "publish", publish)
        run(data, train=[lines], shard_tokens=12_000)
    assert before
    assert before.items() <= seen.items()
    assert hashes(data / "made") == hashes(data / "whole")


def test_shards_of_other_options_are_not_mixed_in(data, caplog):
    lines = write_lines(data / "a.jsonl", TEXTS)
    with open(lines, "a") as file:
        file.write("{")
    with pytest.raises(DataError):
        run(data, train=[lines], shard_tokens=4000)
    write_lines(data / "a.jsonl", TEXTS[:-1])
    run(data, train=[lines], shard_tokens=4000)
    assert "made from other sources" in caplog.text
    run(data, name="whole", train=[lines], shard_tokens=4000)
    assert hashes(data / "made") == hashes(data / "whole")


def test_two_at_once_are_refused(data):
    with (
        shards.partial(data / "made", {}, functools.partial(token_files.Writer, dtype="uint16")),
        pytest.raises(RunError, match="another process is making it"),
    ):
        run(data, train=[write_lines(data / "a.jsonl", TEXTS)])


@pytest.mark.parametrize(
    ("content", "name", "message"),
    [
        (
            b'{"text": "a"}\n{"txt": "b"}\n',
            "a.jsonl",
            "a.jsonl:2: field 'text' is missing. Did you mean 'txt'? Fields: txt. Choose one with --text_field.",
        ),
        (b'{"text": "a"}\n\xff\n', "a.jsonl", "a.jsonl:2: not UTF-8 text"),
        (b'{"text": "a"}\n\n', "a.jsonl", "a.jsonl:2: not valid JSON"),
        (b"a\n\xff\n", "a.txt", "a.txt:2: not UTF-8 text: invalid start byte at byte 0."),
        (gzip.compress(b'{"text": "a"}\n' * 99, mtime=0)[:-9], "a.jsonl.gz", "a.jsonl.gz: the gzip file is truncated"),
        (b"nothing", "a.jsonl.gz", "a.jsonl.gz: damaged gzip file"),
        (b"PAR1", "a.parquet", "a.parquet: not a parquet file, or damaged"),
        (b"", "a.bin", "a.bin: unknown file type."),
        (b'{"text": "a"}\n', "a.jsonl", "--val: no document is left for this split."),
    ],
)
def test_source_errors_name_their_place(data, content, name, message):
    (data / name).write_bytes(content)
    with pytest.raises(DataError, match=re.escape(message)):
        run(data, train=[str(data / name)], val_rate=1e-9)
    assert not (data / "made").exists()


def test_missing_sources(data):
    for name, message in (
        ("nowhere.jsonl", "no such file."),
        ("owner/set", 'Use "hub:owner/set"'),
    ):
        with pytest.raises(DataError, match=re.escape(message)):
            run(data, train=[name])
    (data / "empty").mkdir()
    with pytest.raises(DataError, match="expected a folder that `datasets` saved"):
        run(data, train=[str(data / "empty")])
    with pytest.raises(DataError, match="hub:owner/none: cannot be loaded from the hub or its cache"):
        run(data, train=["hub:owner/none"])
    lines = write_lines(data / "a.jsonl", TEXTS)
    with pytest.raises(DataError, match="same data as --train"):
        run(data, train=[lines], val=[lines], val_rate=0.0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"val_rate": 1.0}, "--val_rate: expected a share"),
        ({"val_rate": 0.0}, "--val, --val_rate: set exactly one of them"),
        ({"val": ["x"]}, "--val, --val_rate: set exactly one of them"),
        ({"corpus": "x", "train": ()}, "--corpus: has its own validation split"),
        ({"processes": 0}, "--processes: expected at least 1, got 0"),
        ({"streaming": True}, "--streaming: only for data sets of the hub"),
    ],
)
def test_options_that_do_not_go_together(data, changes, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        run(data, **{"train": ["x.jsonl"], **changes})


def test_the_command_prints_a_summary(data, capsys):
    lines = write_lines(data / "a.jsonl", TEXTS)
    arguments = [
        "--data_path",
        str(data),
        "--name",
        "made",
        "--tokenizer",
        "bytes",
        "--train",
        lines,
        "--processes",
        "1",
    ]
    main([*arguments, "--val_rate", "0.1"])
    assert re.search(
        r"train +\d+ documents, [\d,]+ tokens with their end tokens, 1 shard\nval ", capsys.readouterr().out
    )
    assert jsonl.SPLITS == ("train", "val")


def test_other_files_in_the_folder_are_not_replaced(data):
    (data / "made").mkdir()
    (data / "made" / "notes.txt").touch()
    with pytest.raises(DataError, match=re.escape(str(data / "made" / "notes.txt"))):
        run(data, train=[write_lines(data / "a.jsonl", TEXTS)])
    assert (data / "made" / "notes.txt").exists()
