"""JSON documents: every command has one, it fits its schema, and it says the same numbers as the text."""

import ast
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass
from importlib import import_module
from pathlib import Path
from types import UnionType
from typing import Any, Literal, NotRequired, Union, get_args, get_origin, get_type_hints, is_typeddict

import pytest

import trainval
from docs import json_documents, reference
from src.support import documents

ROOT = Path(__file__).resolve().parents[2]
SCALES = (1, 1e-2, 1e3, 1e6, 1e9, 1e12, 2**30)
"""Units of the text: percent, kB, MB or millions, GB, TFLOP, GiB."""
NUMBER = re.compile(r"(?<![\w.])-?\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?(?![\w])")
COMMANDS: dict[str, list[str]] = {
    "results.answers": ["RUNS", "--count", "2"],
    "results.clean": ["RUNS"],
    "results.compare": ["model.stride == 1", "model.stride == 2", "-r", "RUNS"],
    "results.diff": ["FIRST", "SECOND", "-r", "RUNS"],
    "results.lineage": ["RUNS"],
    "results.metadata": ["FIRST", "-r", "RUNS", "-o", "OUT.png"],
    "results.note": ["FIRST", "-r", "RUNS", "--tag", "good", "--note", "42"],
    "results.plot": ["RUNS", "-o", "OUT.png"],
    "results.progress": ["RUNS", "-o", "OUT.png"],
    "results.report": ["RUNS", "-o", "OUT.html"],
    "results.rescore": ["RUNS/FIRST"],
    "results.rollouts": ["FIRST", "-r", "RUNS", "--count", "1"],
    "results.pages.run_page": ["FIRST", "-r", "RUNS", "-o", "OUT.html"],
    "results.share": ["RUNS", "-o", "OUT.zip"],
    "results.table": ["RUNS", "--by", "model.stride"],
    "data_prep.assistants.arithmetic": ["--data_path", "OUT"],
    "data_prep.interleaved.digit_pages": ["--data_path", "OUT", "--pages", "4"],
    "data_prep.metadata.html_folder": ["PAGES", "--url", "u/", "--train", "OUT.train.jsonl", "--val", "OUT.val.jsonl"],
    "data_prep.metadata.wiki_index": ["WIKI", "--output", "OUT.db"],
}
"""Commands with arguments for `run`. Others of data_prep are in `tests/data_prep/test_json.py`."""


@pytest.fixture
def folder(runs: Path, tmp_path: Path) -> Path:
    """The runs of `conftest.py`, the first with answers, rollouts and gains; and sources for commands of data_prep."""
    row = {"question": "q", "context": "c", "answer": "a", "dataset": "d"}
    for exp_id in sorted(path.name for path in runs.iterdir() if path.is_dir()):
        run = runs / exp_id
        scores = {"step": 5, "val_loss": 0.123456, "inference/em": 2 / 3, "reward": 0.25}
        scores |= {"val_gain/url": 0.1234, "val_gain_low/url": 0.1, "val_gain_high/url": 0.2}
        scores |= {"val_text_perplexity_without/url": 9.87, "val_text_perplexity_with/url": 8}
        (run / "scores.jsonl").write_text((run / "scores.jsonl").read_text() + json.dumps(scores) + "\n")
        (run / "inference").mkdir()
        for end in ("", "_wrong_context"):
            answers = (json.dumps(row | {"answer_pred": "a" if i % 3 else "b" + end}) + "\n" for i in range(6))
            (run / "inference" / f"val{end}.jsonl").write_text("".join(answers))
        rollout = {"step": 2, "iteration": 0, "prompt": "p", "answer": "a", "reward": 1 / 3}
        (run / "rollouts.jsonl").write_text(json.dumps(rollout) + "\n")
    (tmp_path / "pages").mkdir()
    for i in range(7):
        (tmp_path / "pages" / f"{i}.html").write_text(f"<p>{i}</p>")
    page = "<page><title>A</title><ns>0</ns><revision><text>Some text.</text></revision></page>"
    (tmp_path / "wiki.xml").write_text(
        f'<mediawiki xmlns="http://www.mediawiki.org/xml/export-0.11/">{page}</mediawiki>'
    )
    return tmp_path


def words_of(command: str, folder: Path, kind: str) -> list[str]:
    """The arguments, with paths; each call of a command writes files of its own."""
    first, second = sorted(path.name for path in (folder / "runs").iterdir() if path.is_dir())[:2]
    places = {"RUNS": str(folder / "runs"), "FIRST": first, "SECOND": second, "PAGES": str(folder / "pages")}
    places |= {"WIKI": str(folder / "wiki.xml"), "OUT": str(folder / kind)}
    return [re.sub("|".join(places), lambda match: places[match[0]], word) for word in COMMANDS[command]]


def numbers_and_texts(value: Any) -> Iterator[float | str]:
    if isinstance(value, dict):
        yield len(value)
        for key, each in value.items():
            yield key
            yield from numbers_and_texts(each)
    elif isinstance(value, list):
        yield len(value)
        for each in value:
            yield from numbers_and_texts(each)
    elif isinstance(value, str | int | float):
        yield value


def is_said(token: str, values: list[float | str]) -> bool:
    """Whether a value is the number `token` of a text, rounded to its digits."""
    plain = token.replace(",", "")
    decimals, digits = (
        len(plain.partition(".")[2].partition("e")[0]),
        len(re.sub(r"\D", "", plain.partition("e")[0]).lstrip("0")),
    )
    for value in values:
        if isinstance(value, str):
            if re.search(rf"(?<!\d){re.escape(token)}(?!\d)", value):
                return True
        elif any(
            float(plain) == float(text)
            for scale in SCALES
            for text in (f"{value / scale:.{decimals}f}", f"{value / scale:.{max(digits, 1)}g}")
        ):
            return True
    return False


def missing_numbers(text: str, document: Any) -> list[str]:
    values = list(numbers_and_texts(document))
    return [token for token in NUMBER.findall(text) if not is_said(token, values)]


def misfits(value: Any, hint: Any, place: str = "document") -> Iterator[str]:
    """The places of a JSON value that are not of a type."""
    origin, arguments = get_origin(hint) or hint, get_args(hint)
    if is_typeddict(hint) or is_dataclass(hint):
        hints = get_type_hints(hint, include_extras=True)
        optional = {name for name, each in hints.items() if get_origin(each) is NotRequired}
        if not isinstance(value, dict) or not hints.keys() - optional <= value.keys() <= hints.keys():
            yield f"{place}: {value}: expected the members {sorted(hints)}"
            return
        for name in value:
            yield from misfits(value[name], get_type_hints(hint)[name], f"{place}.{name}")
    elif origin is Literal:
        yield from [place] * (value not in arguments)
    elif origin in (Union, UnionType):
        yield from [place] * all(any(misfits(value, each)) for each in arguments)
    elif isinstance(origin, type) and issubclass(origin, Mapping):
        yield from [place] * (not isinstance(value, dict))
        for key, each in value.items():
            yield from misfits(each, arguments[1], f"{place}.{key}")
    elif origin in (list, tuple):
        yield from [place] * (not isinstance(value, list))
        for i, each in enumerate(value):
            yield from misfits(each, arguments[0], f"{place}[{i}]")
    elif hint is not Any and not isinstance(value, (int, float) if hint is float else hint):
        yield place


def check_schema(document: dict[str, Any], types: list[type]) -> None:
    """The document is of one of these types."""
    (cls,) = [cls for cls in types if document["schema"] in get_args(get_type_hints(cls)["schema"])]
    assert list(misfits(document, cls)) == []


def test_every_command_prints_json():
    without = [
        line
        for line, parser in reference.commands().items()
        if not line.startswith("python -m src.")
        and not any(documents.OPTION in action.option_strings for action in parser._actions)
        and not line.endswith("oasst_trees")  # its subcommands have the option
    ]
    assert without == []


def test_no_command_takes_abbreviated_options(capsys: pytest.CaptureFixture[str]):
    """`documents.parsing` looks for --json as it is written."""
    assert [line for line, parser in reference.commands().items() if parser.allow_abbrev] == []
    for main, words in ((trainval.main, ["--list", "--jso"]), (import_module("results.table").main, ["--jso"])):
        with pytest.raises(SystemExit) as stop:
            main(words)
        assert stop.value.code == 2
        assert "--jso" in capsys.readouterr().err


def test_every_command_of_results_is_compared():
    commands = {line.split()[2] for line in reference.document_types() if line.startswith("python -m results.")}
    assert commands - {"results.dashboard"} == {name for name in COMMANDS if name.startswith("results.")}


def test_data_prep_prints_only_reports():
    """So every line of text has facts in the document. doctest_examples.py is a worker."""
    calls = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in sorted((ROOT / "data_prep").rglob("*.py"))
        if path.name != "doctest_examples.py"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) in ("print", "sys.stdout.write")
        and not any(keyword.arg == "file" for keyword in node.keywords)
    ]
    assert calls == []


@pytest.mark.parametrize("command", COMMANDS)
def test_json_and_text_say_the_same_numbers(command: str, folder: Path, capsys: pytest.CaptureFixture[str]):
    main = import_module(command).main
    assert main(words_of(command, folder, "text")) == 0
    text = capsys.readouterr().out.replace(str(folder / "text"), "")
    assert main([*words_of(command, folder, "json"), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    line = next(line for line in reference.document_types() if line.startswith(f"python -m {command}"))
    check_schema(document, reference.document_types()[line])
    assert document["error"] is None
    text = re.sub(r"\d+\.\d s\b|\b95 %", "", text.replace(str(folder), ""))  # times differ, 95 % is no result
    assert missing_numbers(text, document) == []


@pytest.mark.parametrize(
    "words",
    [["--list"], ["-e", "crossattn_tiny", "--list"], ["-e", "crossattn_tiny", "--dry-run", "--memory"],
     ["-e", "crossattn_tiny", "--job_option", "status"]],
)  # fmt: skip
def test_trainval_says_the_same_numbers(words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    places = ["-sb", str(tmp_path / "runs"), "--data_path", str(tmp_path)]
    code = trainval.main([*words, *places])
    text = capsys.readouterr().out
    assert trainval.main([*words, *places, "--json"]) == code
    document = json.loads(capsys.readouterr().out)
    check_schema(document, reference.TRAINVAL)
    assert (document["error"] is None) == (code == 0)
    assert NUMBER.search(text)
    lines = [line for line in text.splitlines() if "Parameters in millions" not in line and "40 %" not in line]
    assert missing_numbers("\n".join(lines), document) == []


def test_a_document_that_does_not_fit_is_noticed():
    document = {"schema": "file/1", "path": "x", "error": None, "more_errors": [], "warnings": []}
    assert list(misfits(document, json_documents.File)) == []
    for change in ({"path": 1}, {"more": 1}, {"error": {"kind": "x"}}, {"warnings": [1]}):
        assert len(list(misfits(document | change, json_documents.File))) == 1


def test_a_number_that_only_the_text_says_is_noticed():
    assert missing_numbers("loss 0.333, 12 rows", {"loss": 1 / 3, "rows": 12}) == []
    assert missing_numbers("loss 0.334, 13 rows", {"loss": 1 / 3, "rows": 12}) == ["0.334", "13"]
