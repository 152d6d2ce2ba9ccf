"""Scores of inferences without their models: the same numbers as in the run, over chosen rows."""

import json
from pathlib import Path

import pytest

from results import rescore


def write(path: Path, *rows: dict[str, object]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def row(prediction: str, answer: str, dataset: str = "nq", question: str = "who", **more: object) -> dict[str, object]:
    return {
        "context": "c",
        "question": question,
        "answer": answer,
        "dataset": dataset,
        "answer_pred": prediction,
        **more,
    }


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Four answers: right, right for the second of two references, wrong, and half right."""
    return write(
        tmp_path / "run" / "inference" / "val.jsonl",
        row("Łódź", "łódź"),
        row("The cat", "dog", answers=["dog", "cat"], question="what"),
        row("x", "y", dataset="squad"),
        row("y z", "y", dataset="squad", kind="hard"),
    )


def scores(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, dict[str, dict[str, float]]]:
    assert rescore.main([*map(str, arguments), "--json"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return json.loads(captured.out)["files"]


def test_overall_and_by_source(file: Path, capsys: pytest.CaptureFixture[str]):
    result = scores(capsys, file)[str(file)]
    assert {source: (part["rows"], part["em"], part["f1"]) for source, part in result.items()} == {
        "all": (4, 1 / 2, pytest.approx((2 + 2 / 3) / 4)),
        "nq": (2, 1, 1),
        "squad": (1, 0, 0),
        "squad_hard": (1, 0, pytest.approx(2 / 3)),
    }
    assert scores(capsys, file.parents[1]) == {str(file): result}, "the save directory leads to its inference"
    assert scores(capsys, file.parent) == {str(file): result}


def test_chosen_rows(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    index = tmp_path / "hard.txt"
    index.write_text("3\n\n0\n")
    result = scores(capsys, file, "--index_file", index, "--metrics", "squad")[str(file)]
    assert (result["all"]["rows"], result["all"]["em"]) == (2, 1 / 2)
    result = scores(capsys, file, "--datasets", "squad", "squad_hard")[str(file)]
    assert (result["all"]["rows"], result["all"]["em"], set(result)) == (2, 0, {"all", "squad", "squad_hard"})


def test_the_best_of_rows_that_ask_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = write(tmp_path / "a.jsonl", row("x", "a"), row("b", "a"), row("x", "b"), row("x", "a", question="when"))
    assert scores(capsys, file)[str(file)]["all"]["em"] == 0
    assert scores(capsys, file, "--best_answer")[str(file)]["all"]["em"] == 1 / 2


def test_every_metric_with_its_options(file: Path, capsys: pytest.CaptureFixture[str]):
    metrics = ["squad", '{"name": "rouge", "stemmer": true}', "bleu", "meteor", "knowledge"]
    result = scores(capsys, file, "--metrics", *metrics)[str(file)]["all"]
    assert {"em", "rougeLsum", "bleu", "meteor", "k_precision", "k_f1_plus_plus"} <= result.keys()


def test_tables(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert rescore.main([str(file), "--markdown"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "| source | rows | em | f1 | precision | recall |",
        "| --- | --- | --- | --- | --- | --- |",
        "| all | 4 | 0.5 | 0.6667 | 0.625 | 0.75 |",
        "| nq | 2 | 1 | 1 | 1 | 1 |",
        "| squad | 1 | 0 | 0 | 0 | 0 |",
        "| squad_hard | 1 | 0 | 0.6667 | 0.5 | 1 |",
    ]
    other = write(tmp_path / "other.jsonl", row("a", "a"))
    assert rescore.main([str(file), str(other)]) == 0
    output = capsys.readouterr().out
    assert str(file) in output
    assert str(other) in output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--metrics", "rogue"],
            "unknown metric 'rogue'. Did you mean 'rouge'? Known: bleu, ",
        ),
        (
            ["--metrics", '{"name": "rouge", "stemer": true}'],
            "--metrics: unknown key 'stemer'. Did you mean 'stemmer'?",
        ),
        (["--metrics", "{"], "--metrics {: not valid JSON"),
        (
            ["--datasets", "sqad"],
            "val.jsonl: --datasets: unknown source 'sqad'. Did you mean 'squad'? Known: nq, squad, squad_hard.",
        ),
        (["--index_file", "nowhere.txt"], "nowhere.txt: no such file."),
        (["--index_file", "FOLDER/far.txt"], "--index_file: row 4 is out of range, expected 0 to 3."),
        (["--index_file", "FOLDER/twice.txt"], "--index_file: row 1 is listed 2 times, expected once."),
        (["--index_file", "FOLDER/word.txt"], "word.txt:2: expected a row number, counted from 0, got '-1'."),
        (["--index_file", "FOLDER/zero.txt", "--datasets", "squad"], "val.jsonl: none of 4 rows is selected."),
    ],
)
def test_mistakes_are_one_line(file: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str):
    for name, text in (("far", "4\n"), ("twice", "1\n2\n1\n"), ("word", "1\n-1\n"), ("zero", "0\n")):
        (file.parent / f"{name}.txt").write_text(text)
    assert rescore.main([str(file), *(word.replace("FOLDER", str(file.parent)) for word in arguments)]) == 1
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "empty. It should have one JSON object on each line."),
        ("{\n", "val.jsonl:1: not valid JSON"),
        ("[]\n", "val.jsonl:1: expected a JSON object, got '[]'."),
        (
            '{"question": "q", "context": "c", "answer": "a", "dataset": "d"}\n',
            "val.jsonl:1: field 'answer_pred': expected str, got None.",
        ),
        (
            '{"question": "q", "answer": "a", "dataset": "d", "answer_pred": ""}\n',
            "val.jsonl:1: field 'context': expected str, got None.",
        ),
        (
            json.dumps(row("a", "b", answers="b")) + "\n",
            "val.jsonl:1: field 'answers': expected a list of str, got 'b'.",
        ),
    ],
)
def test_malformed_files(file: Path, capsys: pytest.CaptureFixture[str], content: str, message: str):
    file.write_text(content)
    assert rescore.main([str(file)]) == 1
    assert message in capsys.readouterr().err


def test_nothing_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert rescore.main([str(tmp_path / "x.jsonl")]) == 1
    assert "x.jsonl: no such file." in capsys.readouterr().err
    assert rescore.main([str(tmp_path)]) == 1
    assert "no inference in this folder. Name the save directory of a finished run" in capsys.readouterr().err
