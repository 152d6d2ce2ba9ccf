"""The JSON reader, and reads of files that are not regular."""

import ast
import os
import socket
from pathlib import Path

import pytest

from src import files
from src.errors import DataError, RunError, print_errors
from src.runs import jsonl_records, lease
from src.runs.history import journal
from src.support import parsing
from tests.conftest import ROOT

HERE = {
    "src/support/parsing.py",  # the reader
    "src/data/text/tokenizers.py",  # what the library tokenizers writes
    "src/experiments/grid.py",  # --set: text that is not JSON is a string
    "src/systems/assistants/rewards/isolated.py",  # both are inside the sandbox, which has no other module
    "src/systems/assistants/rewards/isolated_peer.py",
    "src/systems/interleaved/streaming/remote/downloads.py",  # pipes between our own processes
    "src/systems/interleaved/streaming/remote/objects.py",
    "src/evaluation/metrics/math.py",
    "src/systems/assistants/rewards/python.py",
    "src/systems/assistants/rewards/sandbox.py",
    "src/systems/t5/denoising/words.py",  # a tokenizer in memory
    "src/systems/interleaved/streaming/texts.py",
    "src/runs/run_dir.py",  # json.loads(json.dumps(...))
    "src/systems/assistants/serving/triton/backend.py",
    "src/tables/curves.py",  # a cache with checksums
    "src/tables/scan.py",
    "src/runs/scores.py",  # orjson; falls back to the reader
}
"""Modules that parse JSON which no user, file or server can damage."""


@pytest.mark.parametrize(
    "text", ["[" * 100_000, "[" * 600 + "]" * 600, '{"a":' * 300 + "1" + "}" * 300, '[{"a":' * 150 + "1" + "}]" * 150]
)
def test_deeply_nested_json_is_refused(text: str, tmp_path: Path):
    with pytest.raises(DataError, match=r"^place: "):
        files.parse_json(text, "place", DataError)
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(RunError, match=r"a\.json"):
        files.read_json(tmp_path / "a.json", RunError)
    assert jsonl_records.parse_object(text.encode()) is None
    assert journal.step_of(text.encode()) is None


def test_many_brackets_without_depth_are_accepted():
    value = {"text": "[{" * 5_000, "ids": [[i] for i in range(1_000)]}
    assert files.parse_json(str(value).replace("'", '"'), "place", DataError) == value
    deepest = "[" * parsing.MAX_DEPTH + "]" * parsing.MAX_DEPTH
    files.parse_json(deepest, "place", DataError)
    with pytest.raises(DataError):
        files.parse_json(f"[{deepest}]", "place", DataError)


@pytest.mark.parametrize(
    ("content", "where"),
    [(b"{\n1}", ":2: "), (b"\xff", "byte 0"), (b"1" * 5_000, "a.json: "), (b"", ":1: "), (b"[1", ":1: ")],
)
def test_malformed_json_names_the_file_and_the_line(content: bytes, where: str, tmp_path: Path):
    path = tmp_path / "a.json"
    path.write_bytes(content)
    with pytest.raises(DataError) as error_info:
        files.read_json(path, DataError)
    assert str(error_info.value).startswith(str(path))
    assert where in str(error_info.value)
    assert "\n" not in str(error_info.value)


def test_a_deeply_nested_lease_has_no_known_holder(tmp_path: Path):
    (tmp_path / lease.LEASE).write_text("[" * 100_000)
    assert lease.holder_of(tmp_path).is_dead is None
    assert lease.holder_of(tmp_path).host == ""


@pytest.mark.parametrize("kind", ["FIFO", "socket", "device"])
def test_special_files_are_refused_without_blocking(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)  # the path of a socket is short
    path = tmp_path / "a.jsonl"
    if kind == "FIFO":
        os.mkfifo(path)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as server:
            server.bind("a.jsonl")
    else:
        path.symlink_to("/dev/zero")
    for read in (
        lambda: files.read_json(path, RunError),
        lambda: files.read_json(path, RunError, missing=None),
        lambda: files.read_bytes(path),
        lambda: jsonl_records.rows(path),
        lambda: list(jsonl_records.lines_from_end(path)),
        lambda: jsonl_records.read_appended(path),
        *[lambda: jsonl_records.append(path, [{"step": 1}])] * (kind != "device"),
    ):
        with pytest.raises(RunError, match=rf"a\.jsonl: a {kind}"):
            read()


def test_pipes_in_dev_are_accepted():
    reader, writer = os.pipe()
    os.write(writer, b"[1]")
    os.close(writer)
    assert files.read_json(Path(f"/dev/fd/{reader}"), RunError) == [1]
    os.close(reader)


@pytest.mark.parametrize("path", ["a" * 300, "/".join(["b" * 200] * 25)])
def test_a_path_that_is_too_long_is_one_line(path: str, capsys: pytest.CaptureFixture[str]):
    assert print_errors(lambda: int(Path("/tmp", path).exists()))() == 1
    error = capsys.readouterr().err
    assert error.startswith("error: /tmp/")
    assert error.count("\n") == 1
    assert len(error) < 300


def test_every_module_uses_the_json_reader():
    calls = set()
    for path in [*(ROOT / "src").rglob("*.py"), *(ROOT / "results").glob("*.py"), ROOT / "trainval.py"]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            parts = ast.unparse(node).split(".") if isinstance(node, ast.Attribute) else []
            if len(parts) == 2 and parts[0] in ("json", "orjson") and parts[1] in ("load", "loads"):
                calls.add(path.relative_to(ROOT).as_posix())
    assert calls - HERE == set()
