"""Counts of prepared conversations: by mode, for names, groups and all that is there."""

import csv
import json
from pathlib import Path

import pytest

from data_prep.assistants import check_dataset_counts, conversation_table, prepare_conversations
from src.systems.assistants import presets


def prepare(folder: Path, name: str, form: str, train: list[dict[str, object]], val: list[dict[str, object]]) -> None:
    words = ["--form", form, "--name", name, "--data_path", str(folder / "data")]
    for split, rows in (("train", train), ("val", val)):
        path = folder / f"{name}_{split}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        words += [f"--{split}", str(path)]
    assert prepare_conversations.main(words) == 0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three data sets: 3 and 1 answers; 2 and 1 pairs and a tie; texts of another command."""
    answers = [{"prompt": f"q{i}", "completion": "a"} for i in range(4)]
    prepare(tmp_path, "answers", "completion", answers[:3], answers[3:])
    questions = [{"messages": [{"role": "user", "content": f"q{i}", "lang": "de"}]} for i in range(4)]
    ranks = [[{"content": "a", "rank": 0}, {"content": "b", "rank": rank}] for rank in (1, 1, 0, 1)]
    ranked_rows = [{**row, "replies": replies} for row, replies in zip(questions, ranks, strict=True)]
    prepare(tmp_path, "ranked", "ranked", ranked_rows[:3], ranked_rows[3:])
    return tmp_path


def count(folder: Path, *words: str) -> list[list[str]]:
    out = folder / "counts.csv"
    assert check_dataset_counts.main(["--data_path", str(folder / "data"), "--output_path", str(out), *words]) == 0
    return read(out)


def read(path: Path) -> list[list[str]]:
    return list(csv.reader(path.read_text().splitlines()))


HEADER = ["dataset_name", "train_counts", "eval_counts", "total_counts"]


def test_counts_of_each_mode(folder: Path, capsys: pytest.CaptureFixture[str]):
    """A tie counts for answers, not for ranks; a set that is named twice stands there once. (Of the reference, "all"
    raised, of a list with commas the last name counted, mode rm had no sets, and counts went to other sets than theirs,
    B7.)"""
    answers, ranked_counts = ["answers", "3", "1", "4"], ["ranked", "3", "1", "4"]
    assert count(folder, "--datasets", "ranked", "answers,ranked", "answers", "--mode", "sft") == [
        HEADER,
        ranked_counts,
        answers,
    ]
    assert "ranked        3             1            4" in capsys.readouterr().out
    assert count(folder, "--datasets", "all", "--mode", "rm") == [HEADER, ["ranked", "2", "1", "3"]]
    assert count(folder, "--datasets", "all") == [HEADER, answers, ranked_counts]


def test_counts_of_the_data_of_a_group(folder: Path, monkeypatch: pytest.MonkeyPatch):
    mixture = {"data": {"name": "mixture", "parts": [{"data": {"corpus": "answers"}}, {"data": {"corpus": "ranked"}}]}}
    monkeypatch.setitem(check_dataset_counts.GROUPS, "mixed", [mixture])
    assert [row[0] for row in count(folder, "--datasets", "mixed")[1:]] == ["answers", "ranked"]


def test_languages_are_counted_by_label(folder: Path):
    count(folder, "--datasets", "all", "--languages", str(folder / "languages.csv"))
    rows = read(folder / "languages.csv")
    assert rows == [
        ["dataset_name", "language", "messages"],
        ["answers", "untold", "8"],
        ["ranked", "de", "4"],
        ["ranked", "untold", "4"],
    ]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["answers", "anwsers"], "anwsers: no such data set"),
        (["answers", "--mode", "rm"], "answers: no rows for --mode rm."),
        (["joke", "--prepare"], "--train: missing."),
    ],
)
def test_missing_data_is_an_error(folder: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]):
    out = folder / "counts.csv"
    command = ["--data_path", str(folder / "data"), "--output_path", str(out), "--datasets", *words]
    assert check_dataset_counts.main(command) == 1
    assert message in capsys.readouterr().err
    assert not out.exists()


def test_the_data_of_published_settings_are_releases():
    """So that --prepare, or data_prep.assistants.prepare_conversations --name, makes what they name."""
    data = [experiment["data"] for group in presets.GROUPS.values() for experiment in group]
    corpora = {corpus for each in data for corpus in check_dataset_counts.list_corpora(each)}
    assert len(corpora) > 20
    for corpus in corpora:
        assert conversation_table.find(corpus)
