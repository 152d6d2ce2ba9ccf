"""Records of large JSON files: whatever the form, one at a time, and none from a file that is cut off or damaged."""

import gzip
import json
import re
import tracemalloc

import pytest

from data_prep.crossattn.qa_releases import json_stream
from src.errors import DataError

RECORDS = [
    {"question": "é \U0001f600?", "answer": ["a", "b\n"], "n": 12345},
    {"question": "", "n": [-1.5e3, None, True]},
    {"n": {"m": {}}},
]
COLUMNS = ("n", "q")

FORMS = {
    "lines": "".join(json.dumps(record) + "\n" for record in RECORDS),
    "pretty list": json.dumps(RECORDS, indent=2),
    "list": json.dumps(RECORDS, ensure_ascii=False),
    "list in an object": json.dumps({"version": "1.1", "data": RECORDS, "n": [1, {"x": 2}]}),
    "list in an object after other objects": json.dumps(
        {"info": {"by": {"x": [1]}}, "none": {}, "data": RECORDS}, indent=1
    ),
    "list in an object that comes first": json.dumps({"Data": RECORDS, "Domain": "Web", "Version": 1.0}),
}
COLUMN_TEXT = '{"other": {"0": [1], "1": [2]}, "n": {"0": 10, "1": 234}, "q": {"0": "a", "1": "b"}, "last": {"0": 1}}'


def read(folder, text, columns=()):
    path = folder / "file.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return list(json_stream.records(path, columns))


@pytest.fixture
def small_pieces(monkeypatch):
    """Files come in pieces of three bytes, which end within characters, numbers, names and escapes."""
    monkeypatch.setattr(json_stream, "_PIECE", 3)


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_its_records(tmp_path, form):
    assert [record for _, record in read(tmp_path, FORMS[form])] == RECORDS
    assert [record for _, record in read(tmp_path, gzip.compress(FORMS[form].encode()))] == RECORDS


@pytest.mark.parametrize("form", FORMS)
def test_pieces_can_end_anywhere(tmp_path, form, small_pieces):
    assert [record for _, record in read(tmp_path, FORMS[form])] == RECORDS


def test_columns_are_joined_into_records(tmp_path, small_pieces):
    assert read(tmp_path, COLUMN_TEXT, COLUMNS) == [
        (f"{tmp_path}/file.json: row '0'", {"n": 10, "q": "a"}),
        (f"{tmp_path}/file.json: row '1'", {"n": 234, "q": "b"}),
    ]


def test_places_are_lines_and_items(tmp_path):
    path = tmp_path / "file.json"
    assert [where for where, _ in read(tmp_path, '{"a": 1}\n\n{"a": 2}')] == [f"{path}:1", f"{path}:3"]
    assert [where for where, _ in read(tmp_path, '[{"a": 1}, {"a": 2}]')] == [f"{path}: item 1", f"{path}: item 2"]


@pytest.mark.parametrize(
    "text", [FORMS["list"], FORMS["list in an object"], FORMS["list in an object that comes first"], COLUMN_TEXT]
)
def test_a_file_that_is_cut_off_anywhere_is_refused(tmp_path, text):
    data = text.encode()
    for end in range(1, len(data)):
        with pytest.raises(DataError, match=r"file\.json"):
            read(tmp_path, data[:end], COLUMNS)


def test_a_gzip_file_that_is_cut_off_or_damaged_is_refused(tmp_path):
    data = gzip.compress(json.dumps([{"n": i} for i in range(500)]).encode())
    for end in (3, 12, 300, len(data) - 1):
        with pytest.raises(DataError, match=r"file.json: the gzip file is truncated"):
            read(tmp_path, data[:end])
    with pytest.raises(DataError, match=r"file.json: damaged gzip file \(.*\)\. Download it again"):
        read(tmp_path, data[:100] + b"\0\0\0\0" + data[104:])
    with pytest.raises(DataError, match=r"file.json: damaged gzip file \(CRC check failed"):
        read(tmp_path, data[:-8] + b"\0\0\0\0" + data[-4:])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "file.json: expected JSON (a list, an object, or one object per line), got an empty file."),
        ("question,answer", "object per line), got a file that starts with 'q'."),
        ('[{"a": 1}, {"a" 2}]' + " " * 40, "file.json: not valid JSON at character 17 (Expecting ':' delimiter)."),
        ('[{"a": 1} {"a": 2}]', "file.json: not valid JSON at character 11: expected ',', got '{'."),
        ('[{"a": 1}, {"a": 2', "file.json: ends within a value at character 19, so it is truncated."),
        ('[{"a": 1}', "file.json: ends at character 10, where ',' should follow, so it is truncated."),
        ('[{"a": 1}] []', "file.json: not valid JSON at character 12: expected the end of the file, got '['."),
        ('[{"a": 1}, 2]', "file.json: item 2: expected a JSON object, got 2."),
        (
            '{"data": [{"a": 1}], 3: 4}',
            "file.json: not valid JSON at character 22: expected a name in double quotes, got '3'.",
        ),
        ('{"a": 1}\n{"a": \n', "file.json:2: not valid JSON: Expecting value at column 7."),
        (b'[{"a": "\xff"}]', "file.json: not UTF-8 text after character 0 (invalid start byte)."),
        ('[{"a": %s}]' % ("[" * 100_000), "file.json: nested too deeply at character 2."),
        ('[{"a": %s}]' % ("1" * 5000), "file.json: a number cannot be read at character 2 (Exceeds the limit"),
    ],
)
def test_wrong_files_are_refused_with_the_place(tmp_path, text, message):
    with pytest.raises(DataError, match=re.escape(message)):
        read(tmp_path, text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            '{"n": {"0": 1, "1": 2}, "q": {"1": "b", "0": "a"}}',
            "the columns n, q must list the same rows, but continue",
        ),
        ('{"n": {"0": 1, "1": 2}, "q": {"0": "a"}}', "continue with the rows 1, nothing."),
        ('{"n": {"0": 1}, "q": {"0": "a", "1": "b"}}', "continue with the rows nothing, 1."),
        ('{"n": {"0": 1}}', "column 'q' is missing. Columns: n."),
        (COLUMN_TEXT + "]", "not valid JSON at character 103: expected the end of the file, got ']'."),
    ],
)
def test_columns_that_do_not_agree_are_refused(tmp_path, text, message):
    with pytest.raises(DataError, match=re.escape(message)):
        read(tmp_path, text, COLUMNS)


def test_a_missing_file_and_a_folder_are_named(tmp_path):
    with pytest.raises(DataError, match=r"none.json: no such file."):
        list(json_stream.records(tmp_path / "none.json"))
    with pytest.raises(DataError, match=r"cannot read: Is a directory"):
        list(json_stream.records(tmp_path))


def test_a_byte_order_mark_is_no_character(tmp_path):
    assert [record for _, record in read(tmp_path, b'\xef\xbb\xbf[{"a": 1}]')] == [{"a": 1}]
    assert [record for _, record in read(tmp_path, b'\xef\xbb\xbf{"a": 1}\n')] == [{"a": 1}]


def test_a_long_list_is_never_completely_in_memory(tmp_path):
    path = tmp_path / "file.json"
    path.write_text("[" + ", ".join(json.dumps({"text": "x" * 4000, "n": i}) for i in range(5000)) + "]")
    assert path.stat().st_size > 20_000_000
    tracemalloc.start()
    try:
        assert sum(record["n"] for _, record in json_stream.records(path)) == 5000 * 4999 // 2
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 8_000_000
