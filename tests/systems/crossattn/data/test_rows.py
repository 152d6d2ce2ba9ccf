"""Rows of a JSONL file: parsed when asked for, small in memory, and safe to share, pickle and replace."""

import json
import multiprocessing
import os
import pickle
import tracemalloc

import pytest

from src.data import jsonl
from src.errors import DataError
from src.files import new_directory


def write_file(folder, rows):
    with new_directory(folder) as beside:
        (beside / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return folder / "train.jsonl"


@pytest.fixture
def raw_rows():
    """Twelve rows of very different length, several mebibytes in all."""
    return [{"text": f"row {i} " + "xé" * (150_000 if i % 3 else 1), "n": i} for i in range(12)]


@pytest.fixture
def rows(tmp_path, raw_rows):
    """The same, read."""
    return jsonl.read_rows(write_file(tmp_path / "c", raw_rows), {"text": str})


def test_they_are_a_sequence(rows, raw_rows):
    assert len(rows) == 12
    assert rows == raw_rows
    assert list(rows) == raw_rows, "one mebibyte after the other"
    assert [rows[i] for i in (7, 0, 11, 7, -1, -12)] == [raw_rows[i] for i in (7, 0, 11, 7, 11, 0)]
    assert rows[2:7:2] == [raw_rows[2], raw_rows[4], raw_rows[6]]
    assert list(reversed(rows)) == raw_rows[::-1]
    assert rows != raw_rows[:-1]
    assert rows != [*raw_rows[:-1], {}]
    for index in (12, -13):
        with pytest.raises(IndexError, match=rf"row {index} of 12"):
            rows[index]


def test_last_row_is_parsed_once(rows):
    assert rows[3] is rows[3]
    assert rows[3] is not rows[4]


def test_they_cost_a_few_bytes_each(tmp_path):
    path = write_file(tmp_path / "c", [{"text": f"{i} " * 40} for i in range(20_000)])
    tracemalloc.start()
    try:
        rows = jsonl.read_rows(path, {"text": str})
        used_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(rows) == 20_000
    assert used_bytes < 400_000, "eight bytes a row and some slack; as dicts they take ten megabytes"


def test_pickled_copy_reads_the_file_again(rows, raw_rows):
    rows[0]
    data = pickle.dumps(rows)
    assert len(data) < 1000
    assert pickle.loads(data) == raw_rows


def test_a_copy_refuses_other_data(rows, tmp_path, raw_rows):
    copy = pickle.loads(pickle.dumps(rows))
    write_file(tmp_path / "c", raw_rows)
    assert copy[5] == raw_rows[5], "the same data, made again"
    other = pickle.loads(pickle.dumps(rows))
    write_file(tmp_path / "c", [{"text": "x"}])
    with pytest.raises(DataError, match=r"c/train.jsonl: the data set changed during this run"):
        pickle.loads(pickle.dumps(rows))[0]
    assert rows == raw_rows, "what is open is read on as it was"
    assert copy[4] == raw_rows[4]
    with pytest.raises(DataError, match=r"c/train.jsonl: the data set changed during this run"):
        other[0]
    (tmp_path / "c" / "manifest.json").unlink()
    with pytest.raises(DataError, match=r"c/manifest.json: no such file"):
        other[0]


def test_a_file_that_shrinks_is_named(rows):
    os.truncate(rows.path, 1000)
    with pytest.raises(DataError, match=r"train.jsonl: shorter than the \d{7} bytes"):
        rows[11]


def test_a_row_that_was_altered_in_place_is_named(rows):
    with open(rows.path, "r+b") as file:
        file.write(b"#")
    with pytest.raises(DataError, match=r"train.jsonl:1: not valid JSON: Expecting value at column 1."):
        rows[0]


def test_no_read_moves_the_position_that_forked_workers_share(rows):
    before = os.lseek(rows.file, 0, os.SEEK_CUR)
    assert sum(row["n"] for row in rows) == 66
    assert rows[5]["n"] == 5
    assert os.lseek(rows.file, 0, os.SEEK_CUR) == before


def test_forked_workers_read_through_the_descriptor_of_their_parent(rows):
    os.unlink(rows.path)
    here, there = multiprocessing.get_context("fork").Pipe()
    process = multiprocessing.get_context("fork").Process(target=lambda: there.send([row["n"] for row in rows]))
    process.start()
    assert here.poll(30)
    assert here.recv() == [row["n"] for row in rows] == list(range(12))
    process.join(300)
    assert process.exitcode == 0


def test_caller_can_check_rows(tmp_path):
    def check(row, where):
        if row["n"] > 1:
            raise DataError(f"{where}: too many.")

    path = write_file(tmp_path / "c", [{"n": 1}, {"n": 2}])
    with pytest.raises(DataError, match=r"c/train.jsonl:2: too many."):
        jsonl.read_rows(path, {"n": int}, check=check)


def test_unknown_corpus_is_reported_with_the_command_to_prepare_it(places):
    with pytest.raises(
        DataError,
        match=r"With --data_path \S+ --name nq, .* releases \(SQuAD, .*\) by python -m data_prep.crossattn.prepare_qa",
    ):
        jsonl.corpus_folder(places, "nq")
