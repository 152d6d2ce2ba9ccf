"""Prepared folders: what is wrong is named by file, line and field, with what would mend it."""

import json
import re

import pytest

from src.data import jsonl
from src.errors import DataError
from src.experiments.config import Places
from src.files import new_directory

ROW = {"question": "why?", "answer": "so"}
FIELDS = {"question": str, "answer": str}


def read(folder, text, fields=FIELDS, optional=None):
    with new_directory(folder) as beside:
        (beside / "train.jsonl").write_bytes(text if isinstance(text, bytes) else text.encode())
    return jsonl.read_rows(folder / "train.jsonl", fields, optional)


def test_rows_come_back_in_order_with_further_fields(tmp_path):
    rows = [{**ROW, "n": i} for i in range(3)]
    assert read(tmp_path / "c", "".join(json.dumps(r) + "\n" for r in rows)) == rows


def test_last_line_without_a_line_break_is_read(tmp_path):
    assert read(tmp_path / "c", json.dumps(ROW)) == [ROW]


@pytest.mark.parametrize(
    ("second", "message"),
    [
        ('{"question": "why?", "answer": 3}', "field 'answer': expected str, got 3 (int)."),
        ('{"question": "why?", "answer": null}', "field 'answer': expected str, got None (NoneType)."),
        ('{"question": "why?"}', "field 'answer' is missing. Fields: question."),
        ('{"question": "why?", "answer', "not valid JSON: Unterminated string starting at column 22."),
        ("", "not valid JSON: Expecting value at column 1."),
        ("[1, 2]", "expected a JSON object, got [1, 2] (list)."),
        (b'{"question": "\xff", "answer": "so"}', "not UTF-8 text: invalid start byte at byte 14."),
    ],
)
def test_a_bad_line_is_named(tmp_path, second, message):
    second = second if isinstance(second, bytes) else second.encode()
    text = json.dumps(ROW).encode() + b"\n" + second + b"\n"
    with pytest.raises(DataError, match=re.escape(f"{tmp_path}/c/train.jsonl:2: {message}")):
        read(tmp_path / "c", text)


@pytest.mark.parametrize(
    ("kind", "value", "message"),
    [
        (int, True, "expected int, got True (bool)."),
        (list[str], "a", "expected list, got 'a' (str)."),
        (list[str], ["a", 3], "expected str, got 3 (int)."),
        (list[int], [1, None], "expected int, got None (NoneType)."),
    ],
)
def test_types_are_strict_in_optional_fields_too(tmp_path, kind, value, message):
    with pytest.raises(DataError, match=re.escape("train.jsonl:1: field 'x") + r"'(\[1\])?: " + re.escape(message)):
        read(tmp_path / "c", json.dumps({**ROW, "x": value}), optional={"x": kind})


def test_optional_fields_can_be_null(tmp_path):
    assert read(tmp_path / "c", json.dumps({**ROW, "x": None}), optional={"x": int})


def test_empty_file(tmp_path):
    with pytest.raises(DataError, match=re.escape(f"{tmp_path}/c/train.jsonl: empty.")):
        read(tmp_path / "c", "")


def test_missing_folder_is_refused_with_the_command_that_makes_it(places):
    with pytest.raises(
        DataError,
        match=re.escape(
            f"{places.data}/stdlib_qa: no such data set. "
            f"Make it with: python -m data_prep.crossattn.stdlib_qa --data_path {places.data}"
        ),
    ):
        jsonl.corpus_folder(places, "stdlib_qa")
    with pytest.raises(
        DataError, match=r"stdlib_qa: no such folder. Make it with: python -m data_prep.crossattn.stdlib_qa"
    ):
        jsonl.read_rows(places.data / "stdlib_qa" / "train.jsonl", FIELDS)


def test_unknown_corpus_says_which_there_are_and_how_to_add_one(places, write_corpus):
    adds = (
        f" These are prepared in {places.data}; a script of data_prep adds another, "
        "a folder with train.jsonl, val.jsonl, or --data_path names the folder that holds it."
    )
    with pytest.raises(
        DataError, match=re.escape(f"{places.data}/nq: no such data set: unknown corpus 'nq'. Known: none.{adds}")
    ):
        jsonl.corpus_folder(places, "nq")
    write_corpus("squad", [ROW])
    with new_directory(places.data / "squad_tokenizer") as beside:
        (beside / "tokenizer.json").write_text("{}")
    with pytest.raises(
        DataError, match=re.escape(f"unknown corpus 'sqaud'. Did you mean 'squad'? Known: squad.{adds}")
    ):
        jsonl.corpus_folder(places, "sqaud")
    with pytest.raises(DataError, match=r"stdlib_qaa: no such data set: unknown corpus 'stdlib_qaa'"):
        jsonl.corpus_folder(places, "stdlib_qaa")  # no script of ours makes that


def test_folder_without_manifest_is_incomplete(places, write_corpus):
    folder = write_corpus("stdlib_qa", [ROW])
    (folder / "manifest.json").unlink()
    with pytest.raises(DataError, match=r"stdlib_qa: incomplete, it has no manifest.json. Make it with: python -m"):
        jsonl.corpus_folder(places, "stdlib_qa")


def test_a_manifest_that_lists_no_files_is_named(places, write_corpus):
    folder = write_corpus("nq", [ROW])
    (folder / "manifest.json").write_text('{"made_from": {}}')
    for read in (
        lambda: jsonl.corpus_folder(places, "nq"),
        lambda: jsonl.fingerprint(folder),
        lambda: jsonl.require_file(folder, "train.jsonl"),
    ):
        with pytest.raises(DataError, match=r"nq/manifest.json: not a manifest: expected .files."):
            read()


def test_short_or_missing_files_are_refused(places, write_corpus):
    folder = write_corpus("nq", [ROW, ROW])
    size = (folder / "train.jsonl").stat().st_size
    (folder / "train.jsonl").write_text("{}\n")
    with pytest.raises(DataError, match=rf"train.jsonl: 3 bytes, expected {size} bytes. Prepare it again."):
        jsonl.corpus_folder(places, "nq")
    (folder / "train.jsonl").unlink()
    with pytest.raises(DataError, match=r"train.jsonl: missing, expected"):
        jsonl.read_rows(folder / "train.jsonl", FIELDS)


def test_a_file_that_was_never_there(places, write_corpus):
    folder = write_corpus("nq", [ROW])
    with pytest.raises(DataError, match=re.escape(f"{folder}: has no test.jsonl. Files: train.jsonl, val.jsonl.")):
        jsonl.require_file(folder, "test.jsonl")
    with pytest.raises(DataError, match=r"test.jsonl: no such file."):
        jsonl.read_rows(folder / "test.jsonl", FIELDS)


def test_a_data_set_has_both_splits(places, write_corpus):
    write_corpus("nq", [ROW])
    jsonl.require_splits(places, "nq")
    with new_directory(places.data / "half") as beside:
        (beside / "train.jsonl").write_text("{}")
    with pytest.raises(DataError, match=r"half: has no val.jsonl. Files: train.jsonl."):
        jsonl.require_splits(places, "half")


def test_fingerprint_follows_the_data_and_nothing_else(tmp_path):
    def fingerprint_of(name, text, facts):
        with new_directory(tmp_path / name, facts) as beside:
            (beside / "train.jsonl").write_text(text)
        return jsonl.fingerprint(tmp_path / name)

    first = fingerprint_of("a", "x", {"python": "3.11"})
    assert first == fingerprint_of("b", "x", {"python": "3.12"})
    assert first != fingerprint_of("c", "y", {"python": "3.11"})
    assert re.fullmatch(r"[0-9a-f]{64}", first)


def test_validation_choice_is_fixed_and_nested(tmp_path):
    first = jsonl.select_validation_rows(100, 10, tmp_path)
    assert jsonl.select_validation_rows(100, 20, tmp_path)[:10] == first
    assert first != list(range(10))
    assert sorted(jsonl.select_validation_rows(100, 100, tmp_path)) == list(range(100))
    with pytest.raises(DataError, match=r"101 validation samples requested, only 100 available"):
        jsonl.select_validation_rows(100, 101, tmp_path)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            '{"question": "why?", "answer": "a\\ud800b"}',
            r"field 'answer': \ud800 at character 1 is half of a surrogate pair",
        ),
        (
            '{"question": "why?", "answer": "so", "n": %s}' % ("1" * 5000),
            "cannot read a number: Exceeds the limit (4300 digits)",
        ),
        ('{"question": "why?", "answer": "so", "n": %s}' % ("[" * 100_000), "JSON nested deeper than"),
    ],
)
def test_a_line_that_json_allows_and_we_cannot_read_is_named(tmp_path, line, message):
    with pytest.raises(DataError, match=re.escape(f"train.jsonl:2: {message}")):
        read(tmp_path / "c", json.dumps({**ROW, "answer": "é"}) + "\n" + line + "\n")


def test_half_of_a_surrogate_pair_in_a_list_is_named(tmp_path):
    with pytest.raises(DataError, match=re.escape(r"train.jsonl:1: field 'x'[1]: \udfff at character 0")):
        read(tmp_path / "c", '{"x": ["a", "\\udfff"]}', {"x": list[str]})


def test_a_name_that_is_too_long_for_the_file_system_is_no_data_set(tmp_path):
    with pytest.raises(DataError, match=r"a{300}: no such data set"):
        jsonl.corpus_folder(Places(data=tmp_path, runs=tmp_path), "a" * 300)
