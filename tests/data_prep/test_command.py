"""The skeleton of the commands: a new one is its own work and a few lines."""

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from data_prep import command, sources
from src.errors import DataError, RunError

COMMAND = "python -m data_prep.toy"


def prepare(data_path: Path, name: str, words: list[str]) -> dict[str, Any] | None:
    def fill(partial_folder: Path) -> dict[str, Any]:
        (partial_folder / "train.jsonl").write_text("".join(json.dumps({"text": word}) + "\n" for word in words))
        if "bad" in words:
            raise DataError("--words: bad.")
        return {"counts": {"train": len(words)}}

    return command.make_folder(data_path / name, COMMAND, {"words": words}, fill)


def add_options(parser: argparse.ArgumentParser) -> None:
    command.add_data_path(parser)
    parser.add_argument("--name", required=True)
    parser.add_argument("--words", nargs="+")


EXAMPLES = ["python -m data_prep.toy --name a", "python -m data_prep.toy --name b --words c"]
main = command.main_of(
    COMMAND, "\n".join(["How it is called.", "", *EXAMPLES, "", "What it does."]), add_options, prepare
)


def test_a_command_makes_a_folder_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    words = ["--data_path", str(tmp_path), "--name", "toy", "--words", "a", "b"]
    assert main(words) == 0
    assert capsys.readouterr().out.endswith(" s\n")
    manifest = json.loads((tmp_path / "toy" / "manifest.json").read_text())
    assert (manifest["command"], manifest["made_from"], manifest["counts"]) == (
        COMMAND,
        {"words": ["a", "b"]},
        {"train": 2},
    )
    assert main(words) == 0
    assert "toy: complete and made from these sources with these options: nothing to do." in capsys.readouterr().out
    (tmp_path / "toy" / "train.jsonl").write_text('{"text": "x"}\n{"text": "b"}\n')
    assert main(words) == 0
    assert (tmp_path / "toy" / "train.jsonl").read_text().startswith('{"text": "a"}'), "what was altered is made again"


def test_a_folder_of_other_sources_is_replaced_with_a_remark(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    words = ["--data_path", str(tmp_path), "--name", "toy", "--words"]
    for word, remark in (("a", ""), ("b", " in place of an older folder")):
        assert main([*words, word]) == 0
        assert capsys.readouterr().out.endswith(f" s{remark}\n")
        assert json.loads((tmp_path / "toy" / "train.jsonl").read_text()) == {"text": word}


def test_a_failed_command_leaves_the_older_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    words = ["--data_path", str(tmp_path), "--name", "toy", "--words", "a"]
    assert main(words) == 0
    assert main([*words, "bad"]) == 1
    assert capsys.readouterr().err == "error: --words: bad.\n"
    assert [path.name for path in tmp_path.iterdir()] == ["toy"]
    assert (tmp_path / "toy" / "train.jsonl").read_text() == '{"text": "a"}\n'


def test_the_help_describes_the_command(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "usage: python -m data_prep.toy " in (output := capsys.readouterr().out)
    assert "What it does." in output
    assert not {*EXAMPLES} - {*output.splitlines()}, "they can be copied"


def test_a_locked_folder_is_refused(tmp_path: Path):
    with (
        command.exclusive_lock(tmp_path / "made", "here: another process makes it."),
        pytest.raises(RunError, match=r"^here: another process makes it\. Wait until it ends\.$"),
        command.exclusive_lock(tmp_path / "made", "here: another process makes it."),
    ):
        pass
    with command.exclusive_lock(tmp_path / "made", ""):
        pass


def test_scripts_and_sources_are_distinguished_by_content(tmp_path: Path):
    for name, text in (("a", "1"), ("b", "2"), ("c", "1")):
        (tmp_path / name).write_text(text)
    one, two, three = (sources.identify(str(tmp_path / name)) for name in "abc")
    sources.require_distinct([("--train a", one), ("--val b", two)])
    with pytest.raises(DataError, match=r"^--val c: same data as --train a\."):
        sources.require_distinct([("--train a", one), ("--train b", two), ("--val c", three)])
    assert (
        command.digest_files([tmp_path / "a"])
        == command.digest_files([tmp_path / "c"])
        != command.digest_files([tmp_path / "b"])
    )


@pytest.mark.parametrize(
    ("source", "expected"),
    [("hub:a/b", ("a/b", None, "")), ("hub:glue@rte", ("glue", "rte", "")), ("hub:a/b@c#d", ("a/b", "c", "d"))],
)
def test_names_of_sets_of_the_hub(source: str, expected: tuple[str, str | None, str]):
    assert sources.hub_id(source) == expected


@pytest.mark.parametrize("name", ["", ".", "other", "toy", "file"])
def test_only_files_of_the_command_are_replaced(tmp_path: Path, name: str):
    (tmp_path / "other" / "inner").mkdir(parents=True)
    (tmp_path / "file").touch()
    prepare(tmp_path, "toy", ["a"])
    paths = [tmp_path / "other" / "inner" / "notes.txt", tmp_path / "toy" / "notes.txt"]
    for path in paths:
        path.touch()
    with pytest.raises(DataError) as error:
        prepare(tmp_path, name, ["b"])
    assert str(error.value).startswith(f"{tmp_path / name}: ")
    assert all(path.exists() for path in paths)
    assert json.loads((tmp_path / "toy" / "train.jsonl").read_text()) == {"text": "a"}


def test_an_empty_or_damaged_folder_is_replaced(tmp_path: Path):
    """Also with the hidden index that training leaves in it."""
    (tmp_path / "empty").mkdir()
    prepare(tmp_path, "toy", ["a"])
    (tmp_path / "toy" / ".train.jsonl.0.index").touch()
    (tmp_path / "toy" / "train.jsonl").unlink()
    for name in ("empty", "toy"):
        prepare(tmp_path, name, ["b"])
        assert json.loads((tmp_path / name / "train.jsonl").read_text()) == {"text": "b"}
