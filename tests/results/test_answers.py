"""Answered questions of the best run, printed with their contexts."""

import json
import re
from pathlib import Path

import pytest

from results import answers
from src.experiments.identity import exp_id
from src.runs.run_dir import RunDir


@pytest.fixture
def runs_with_answers(tmp_path: Path) -> Path:
    """Two runs that answered four questions; the better one was asked with wrong contexts, too."""
    for seed, right in ((0, 2), (1, 3)):
        exp = {"recipe": "toy", "seed": seed}
        with RunDir.open(tmp_path / "runs", exp, exp, facts={"groups": ["demo"]}) as run:
            run.scores.append({"step": 1, "val_loss": 1.0, "inference/em": right / 4})
            run.set_status("done")
        write(run.path / "inference" / "val.jsonl", seed, right)
        if seed == 1:
            write(run.path / "inference" / "val_wrong_context.jsonl", seed, 0)
    return tmp_path / "runs"


def write(path: Path, seed: int, right: int) -> None:
    path.parent.mkdir(exist_ok=True)
    rows = [
        {"question": f"q{i} of {seed}", "context": f"def f{i}():\n    pass", "answer": f"a{i}", "dataset": "d"}
        for i in range(4)
    ]
    path.write_text(
        "".join(
            json.dumps(row | {"answer_pred": row["answer"] if i < right else "no"}) + "\n" for i, row in enumerate(rows)
        )
    )


def print_answers(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert answers.main([*map(str, arguments)]) == 0
    return capsys.readouterr().out


def test_questions_of_the_best_run_are_printed_evenly_spread(
    runs_with_answers: Path, capsys: pytest.CaptureFixture[str]
):
    text = print_answers(capsys, runs_with_answers, "--count", "2")
    assert "inference/val.jsonl: inference/em 0.75, the best of 2 runs" in text
    assert [line for line in text.splitlines() if line.startswith("question")] == [
        "question    q0 of 1",
        "question    q2 of 1",
    ]
    assert text.count("\n  |     pass\n") == 2
    assert text.count("(right)\nwith another question's context: no\n") == 2


def test_the_difference_to_wrong_contexts_has_an_interval(runs_with_answers: Path, capsys: pytest.CaptureFixture[str]):
    # Differences 1, 1, 1, 0: mean 0.75, standard deviation 0.433, and 1.96 * 0.433 / 2 = 0.424.
    text = print_answers(capsys, runs_with_answers)
    assert re.search(
        r"^em 0\.75, 0 with .* 0\.75 \(95 % interval 0\.3256 to 1\.174\) over 4 questions", text, re.MULTILINE
    )
    assert "em 0.75: 3 of 4 questions" in text


def test_only_wrong_answers(runs_with_answers: Path, capsys: pytest.CaptureFixture[str]):
    text = print_answers(capsys, runs_with_answers, "--wrong")
    assert "question    q3 of 1\n" in text
    assert "truth       a3\nanswer      no   (wrong)\n" in text
    assert text.count("question  ") == 1


def test_an_answer_is_right_as_the_metrics_of_its_experiment_say(tmp_path: Path):
    run = tmp_path / "runs" / "x"
    exps = [
        {"recipe": "toy", "inference": {"metrics": metrics}}
        for metrics in ([{"name": "rouge"}], [{"name": "gone"}], [])
    ]
    for exp, first in zip(exps, ("rouge1", "em", "em"), strict=True):
        with RunDir.open(tmp_path / "runs", exp, exp) as run_dir:
            run = run_dir.path
        write(run / "inference" / "val.jsonl", 0, 4)
        (entries,) = answers.samples(run).values()
        assert next(iter(entries[0].scores)) == first
        assert [sample.is_right for sample in entries] == [True] * 4
        (run / "inference" / "val.jsonl").write_text(
            (run / "inference" / "val.jsonl").read_text().replace('"answer_pred": "a3"', '"answer_pred": "A3."')
        )
        (entries,) = answers.samples(run).values()
        assert entries[3].answer.text == "A3.", "a file that changed is read again"
        assert entries[3].is_right


def test_the_questions_of_one_run(runs_with_answers: Path, capsys: pytest.CaptureFixture[str]):
    first = exp_id({"recipe": "toy", "seed": 0})
    assert "q0 of 0" in print_answers(capsys, runs_with_answers, "--exp_id", first[:6])


def test_runs_without_answers_are_refused(runs: Path, capsys: pytest.CaptureFixture[str]):
    assert answers.main([str(runs)]) == 1
    assert "no run has saved answers. `answers` and `sampled` only score" in capsys.readouterr().err
