"""Duplicates within and between prepared conversations, and questions of evaluation sets in them."""

import csv
import json
from itertools import combinations
from pathlib import Path
from random import Random
from typing import Any

import pytest

from data_prep.assistants import conversation_overlap, prepare_conversations
from data_prep.assistants.conversation_overlap import Texts, find_duplicates, list_runs, split_words

LONG = "owl dog cat hen fox elk bee ant cow pig rat bat emu yak ape eel cod jay kea tit"
WORDS = LONG.split()


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def prepare(folder: Path, name: str, train: list[tuple[str, str]], val: list[tuple[str, str]]) -> None:
    words = ["--form", "completion", "--name", name, "--data_path", str(folder)]
    for split, pairs in (("train", train), ("val", val)):
        rows = [{"prompt": asked, "completion": answer} for asked, answer in pairs]
        words += [f"--{split}", write(folder / f"{name}_{split}.jsonl", rows)]
    assert prepare_conversations.main(words) == 0


def compare(folder: Path, *words: str) -> list[list[str]]:
    out = folder / "overlap.csv"
    assert conversation_overlap.main(["--data_path", str(folder), "--output_path", str(out), *words]) == 0
    return list(csv.reader(out.read_text().splitlines()))[1:]


def test_duplicates_are_found_in_a_set_and_between_sets(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Whatever the case and punctuation; nearly the same with its index; in rows to train on first."""
    prepare(
        tmp_path,
        "a",
        [("Who?", f"{LONG} one"), ("Where?", "There.")],
        [("who", f"{LONG.upper()}, one!"), ("When?", "Now.")],
    )
    prepare(tmp_path, "b", [("Who?", f"{LONG} two"), ("Where?", "There!")], [("How?", "So."), ("Why?", "Well.")])
    found = compare(tmp_path, "a", "b", "a")
    runs = [list_runs(["who", *WORDS, last], 5) for last in ("one", "two")]
    rate = f"{len(runs[0] & runs[1]) / len(runs[0] | runs[1]):.3f}"
    assert found == [
        ["exact", "b/train.jsonl:2", "a/train.jsonl:2", "1.000"],
        ["exact", "a/val.jsonl:1", "a/train.jsonl:1", "1.000"],
        ["near", "b/train.jsonl:1", "a/train.jsonl:1", rate],
    ]
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["a/val.jsonl", "2", "1", "0", "1"] in lines
    assert ["b/train.jsonl", "2", "1", "1", "2"] in lines
    assert compare(tmp_path, "a", "b", "--near", "0.95") == found[:2]


def test_questions_alone_are_compared_if_wanted(tmp_path: Path):
    prepare(tmp_path, "a", [("Who is it?", "An owl."), ("Who was it?", "An owl.")], [("Who is it?", "A dog.")])
    assert compare(tmp_path, "a") == []
    assert compare(tmp_path, "a", "--questions") == [["exact", "a/val.jsonl:1", "a/train.jsonl:1", "1.000"]]


def test_near_duplicates_are_those_of_comparing_all(tmp_path: Path):
    """Of 120 texts, many of which are others with a few words changed."""
    draw = Random(0)
    texts = [" ".join(draw.choices(WORDS, k=60)) for _ in range(40)]
    for text in texts[:]:
        for changes in (1, 3):
            words = text.split()
            for place in draw.sample(range(60), changes):
                words[place] = "new"
            texts.append(" ".join(words))
    prepare(tmp_path, "a", [(text, "Yes.") for text in texts], [("Who?", "Me.")])
    read = Texts(tmp_path, ["a"])
    runs = [list_runs(read.words(row), 5) for row in range(len(texts))]
    pairs = [
        (a, b) for a, b in combinations(range(len(texts)), 2) if len(runs[a] & runs[b]) / len(runs[a] | runs[b]) >= 0.8
    ]
    found = {each.row: each.other for each in find_duplicates(read, 0.8)}
    assert len(pairs) > 30
    assert found == {b: min(a for a, other in pairs if other == b) for _, b in pairs}


def test_questions_of_evaluation_sets_are_found_in_rows_to_train_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Half of a long one is enough; of a short one all, and one of four words never is."""
    asked = [
        f"{LONG} end",
        " ".join(WORDS[:14] + ["other"] * 10),
        " ".join(WORDS[:8] + ["other"] * 12),
        "is this the one here",
        "so it is now",
        "Is it?",
    ]
    prepare(
        tmp_path,
        "a",
        [("What?", f"Well: {LONG}"), ("Is this the one? Here!", "So it is now.")],
        [("Never?", LONG[::-1])],
    )
    found = compare(tmp_path, "a", "--against", write(tmp_path / "eval.jsonl", [{"question": text} for text in asked]))
    assert [row[1:] for row in found] == [
        [f"{tmp_path / 'eval.jsonl'}:1", "a/train.jsonl:1", f"{8 / 9:.3f}"],
        [f"{tmp_path / 'eval.jsonl'}:4", "a/train.jsonl:2", "1.000"],
    ]
    assert "2 of 6 questions stand in rows to train on" in capsys.readouterr().out


def test_evaluation_sets_may_be_prepared_ones(tmp_path: Path):
    prepare(tmp_path, "a", [("What?", f"Well: {LONG}")], [("Never?", "No.")])
    prepare(tmp_path, "b", [("Who?", "Me.")], [(LONG, "Yes.")])
    assert [row[0] for row in compare(tmp_path, "a", "--against", "b")] == ["b"]
    turns = write(tmp_path / "turns.json", [{"turns": ["First?", LONG]}])
    assert len(compare(tmp_path, "a", "--against", turns)) == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["b"], "b: no such data set"),
        (["a", "--near", "1"], "--near: expected a number between 0 and 1, got 1."),
        (["a", "--against", "none.jsonl"], "none.jsonl: no such file."),
        (
            ["a", "--against", "rows.jsonl"],
            "no messages, and no column question, prompt, instruction, input, text, turns; the row has x.",
        ),
    ],
)
def test_mistakes_are_told(
    tmp_path: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    prepare(tmp_path, "a", [("What?", "That.")], [("Never?", "No.")])
    write(tmp_path / "rows.jsonl", [{"x": 1}])
    assert conversation_overlap.main(["--data_path", str(tmp_path), *words]) == 1
    assert message in capsys.readouterr().err
    assert not (tmp_path / "overlap.csv").exists()


def test_words_are_those_of_any_language():
    assert split_words("Größe, НЕТ — 你好 it's") == ["grösse", "нет", "你好", "it", "s"]
