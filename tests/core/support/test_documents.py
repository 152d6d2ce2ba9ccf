"""Errors in parts, exit codes, and what goes to standard output with --json."""

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import trainval
from results import note
from src import errors
from src.support import documents
from tests import toy
from tests.core.support.test_errors import BAD_INPUT

KINDS = {name for name, cls in vars(errors).items() if isinstance(cls, type) and issubclass(cls, errors.UserError)}
SENTENCE = re.compile(r"\b(is|are|has|have|cannot|rejects|resets|needs|uses|requires)\b")
"""Words of sentences, which are in no place."""


def messages() -> Iterator[tuple[str, str]]:
    """(file:line, message) of each error that the tree raises, with X for values, if there is a text."""
    files = [
        toy.ROOT / "trainval.py",
        *(path for room in ("src", "results", "data_prep") for path in (toy.ROOT / room).rglob("*.py")),
    ]
    for path in files:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
                text = literal(node.exc.args[0])
                if ast.unparse(node.exc.func) in KINDS and text != "X":
                    yield f"{path.relative_to(toy.ROOT)}:{node.lineno}", text


def literal(node: ast.expr) -> str:
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(map(literal, node.values))
    return literal(node.left) + literal(node.right) if isinstance(node, ast.BinOp) else "X"


def test_messages_have_a_place():
    """93 % of 1,014 when this was written; the rest are checks deep in a training, which their callers complete."""
    parts = {place: documents.mistakes("", text)[0] for place, text in messages()}
    assert len(parts) > 900
    assert sum(error["where"] is not None for error in parts.values()) / len(parts) > 0.93
    assert {place: error["where"] for place, error in parts.items() if SENTENCE.search(error["where"] or "")} == {}


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("a[3].b: unknown key 'c'. Did you mean 'd'?", ("a[3].b", "unknown key 'c'", "Did you mean 'd'?")),
        ("x.json:7: field 'y': expected int, got '1.5'.", ("x.json:7", "field 'y': expected int, got '1.5'", None)),
        ("no replies to compare. Send another message.", (None, "no replies to compare", "Send another message.")),
        ("/a: cannot read... Wait. Then: try again.", ("/a", "cannot read... Wait", "Then: try again.")),
        ("wait. Name one: a, b", (None, "wait", "Name one: a, b")),
    ],
)
def test_parts_of_an_error(message: str, expected: tuple[str | None, ...]):
    (error,) = documents.mistakes("DataError", message)
    assert (error["where"], error["found"], error["advice"]) == expected


@pytest.mark.parametrize("command", ["results.note", "data_prep.t5.prepare_task", "data_prep.assistants.oasst_trees"])
def test_an_error_is_a_document(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    main = __import__(command, fromlist=["main"]).main
    assert main(BAD_INPUT[command]) == main([*BAD_INPUT[command], "--json"]) == 1
    captured = capsys.readouterr()
    document = json.loads(captured.out)
    assert document["schema"] == "error/1"
    assert document["error"]["kind"] in KINDS
    first, second = captured.err.splitlines()
    assert first == second
    assert document["error"]["found"] in first


def test_all_lines_of_an_error_are_in_the_document(capsys: pytest.CaptureFixture[str]):
    @errors.print_errors
    def main(words: list[str]) -> int:
        with documents.parsing(words):
            raise errors.ConfigError("a: one\nb: two")

    assert main(["--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert [document["error"]["where"], *(error["where"] for error in document["more_errors"])] == ["a", "b"]


@pytest.mark.parametrize("main", [note.main, trainval.main])
def test_wrong_arguments_are_a_document(main, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as stop:
        main(["--json", "--none"])
    captured = capsys.readouterr()
    assert stop.value.code == 2
    assert "--none" in captured.err
    error = json.loads(captured.out)["error"]
    assert (error["kind"], error["where"]) == ("UsageError", None)
    assert "--none" in error["found"]


def test_standard_output_is_restored(capsys: pytest.CaptureFixture[str]):
    assert note.main(["none", "--json"]) == 1
    capsys.readouterr()
    assert note.main(["none"]) == 1
    print("text")
    assert capsys.readouterr().out == "text\n"


def test_every_exit_code_is_documented():
    table = (toy.ROOT / "docs" / "machine_readable.md").read_text().partition("## Exit codes")[2]
    rows = dict(re.findall(r"^\| (\d+) \| (.*) \|$", table, re.MULTILINE))
    assert rows.keys() == {"0", "1", "2", "75", "130", "141"}


def test_an_interrupted_command_exits_with_130(capsys: pytest.CaptureFixture[str]):
    @errors.print_errors
    def main(words: list[str]) -> int:
        with documents.parsing(words):
            raise KeyboardInterrupt

    assert main(["--json"]) == 130
    assert json.loads(capsys.readouterr().out)["error"]["kind"] == "KeyboardInterrupt"
