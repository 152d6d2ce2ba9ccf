"""The table: the same numbers in five formats, best first."""

import csv
import io
import json
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from results import table
from src.runs.run_dir import RunDir
from src.tables import run_arguments

ROOT = Path(__file__).resolve().parents[2]


def print_table(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert table.main([str(a) for a in arguments]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def expected(stride: int) -> list[float]:
    return [stride / 4 + 0.1 * seed + 1 / 3 for seed in range(3)]


def test_json_holds_every_digit_and_the_best_first(runs: Path, capsys: pytest.CaptureFixture[str]):
    best, other = json.loads(print_table(capsys, runs, "--json"))["rows"]
    assert (best["model.stride"], other["model.stride"]) == (1, 2)
    assert best["val_loss"] == statistics.fmean(expected(1))
    assert best["val_loss_std"] == statistics.stdev(expected(1))
    assert (best["val_loss_n"], best["runs"], best["state"], best["step"]) == (3, 3, "done", 4)


def test_another_metric_and_another_end(runs: Path, capsys: pytest.CaptureFixture[str]):
    strides = {}
    for arguments in (["--metric", "em"], ["--metric", "em", "--best", "min"], ["--best", "max"]):
        strides[tuple(arguments)] = [
            row["model.stride"] for row in json.loads(print_table(capsys, runs, "--json", *arguments))["rows"]
        ]
    assert list(strides.values()) == [[2, 1], [1, 2], [2, 1]]


def test_csv_reads_back_exactly(runs: Path, capsys: pytest.CaptureFixture[str]):
    rows = list(csv.DictReader(io.StringIO(print_table(capsys, runs, "--format", "csv", "--scores", "val_loss"))))
    assert list(rows[0]) == ["model.stride", "runs", "state", "step", "val_loss", "val_loss_std", "val_loss_n"]
    assert [float(row["val_loss"]) for row in rows] == [statistics.fmean(expected(1)), statistics.fmean(expected(2))]


def test_markdown(runs: Path, capsys: pytest.CaptureFixture[str]):
    assert print_table(
        capsys, runs, "-e", "tiny", "--format", "markdown", "--scores", "val_loss", "em"
    ).splitlines() == [
        "| stride | runs | state | step | val_loss | em |",
        "| --- | --- | --- | --- | --- | --- |",
        "| 1 | 3 | done | 4 | 0.68 ± 0.10 | 0.25 |",
        "| 2 | 3 | done | 4 | 0.93 ± 0.10 | 0.5 |",
    ]


def test_several_groups_and_where_the_runs_are(
    runs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """The runs of both; the folder stands before -e, or as its last word."""
    for seed in range(3):
        exp = {"recipe": "toy", "seed": seed, "model": {"name": "m", "stride": 7, "kind": "a_b & 50%"}}
        with RunDir.open(runs, exp, exp, facts={"groups": ["late/one"]}) as run:
            run.scores.append({"step": 1, "val_loss": 5.0})
            run.set_status("done")
    for words, strides in (
        ([runs, "-e", "late/one", "tiny"], [1, 2, 7]),
        (["-e", "tiny", "late/one", runs], [1, 2, 7]),
        (["-e", "tiny", "-e", "late/one", runs], [1, 2, 7]),
        (["-e", "tiny", runs], [1, 2]),
        (["--group", "late/one", "--", runs], [7]),
    ):
        result = json.loads(print_table(capsys, "--by", "model.stride", "--json", *words))["rows"]
        assert [row["model.stride"] for row in result] == strides, words
    monkeypatch.setattr(run_arguments, "RUNS", runs)
    assert len(json.loads(print_table(capsys, "-e", "tiny", "late/one", "--by", "model.stride", "--json"))["rows"]) == 3


def test_latex_escapes_what_latex_would_read(runs: Path, capsys: pytest.CaptureFixture[str]):
    text = print_table(capsys, runs, "--format", "latex", "--by", "model.kind", "model.stride", "--scores", "val_loss")
    assert r"kind & stride & runs & state & step & val\_loss \\" in text
    best = " & ".join(rf"\textbf{{{cell}}}" for cell in (r"a\_b \& 50\%", 1, 3, "done", 4, r"0.68 $\pm$ 0.10"))
    assert best + r" \\" in text
    assert r"a\_b \& 50\% & 2 & 3 & done & 4 & 0.93 $\pm$ 0.10 \\" in text
    assert text.count("&") - text.count(r"\&") == 5 * 3
    assert table._escape("\\~^#${}%_&") == r"\textbackslash{}\textasciitilde{}\textasciicircum{}\#\$\{\}\%\_\&"
    assert table._escape("a<b>|c") == r"a\textless{}b\textgreater{}\textbar{}c"


def test_no_row_of_latex_is_read_as_an_option_of_the_line_before():
    lines = table._latex(["list", "loss"], [["[1, 2]", "0.1"], ["*", "0.2"], ["a[1]", "0.3"]], 1).splitlines()
    assert lines[5:8] == [r"{}[1, 2] & 0.1 \\", r"{}* & 0.2 \\", r"a[1] & 0.3 \\"]


def test_no_cell_of_a_csv_file_is_a_formula():
    """Spreadsheets run what begins so; numbers below zero stay numbers."""
    texts = ["=1+1", "+1", "-1", "@SUM(A1)", "\t=1", "a=1"]
    ((*cells, low, lower),) = csv.reader(io.StringIO(table._csv([[*texts, -1, -0.5]])))
    assert cells == [*(f"'{text}" for text in texts[:-1]), "a=1"]
    assert (low, lower) == ("-1", "-0.5")


def test_markdown_escapes_its_bars():
    assert table.markdown(["a|b"], [["c\nd"]]) == "| a\\|b |\n| --- |\n| c d |\n"


def test_rich_cuts_nothing_when_it_is_not_a_terminal(runs: Path):
    command = [sys.executable, "-m", "results.table", str(runs), "--by", "model.stride", "seed", "exp_id"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    assert "…" not in done.stdout
    assert sum(line.startswith("│") for line in done.stdout.splitlines()) == 6
    assert "0.5833" in done.stdout


def test_one_seed_has_no_deviation(runs: Path, capsys: pytest.CaptureFixture[str]):
    text = print_table(capsys, runs, "--by", "model.stride", "seed", "--format", "markdown", "--scores", "val_loss")
    assert "| 1 | 0 | 1 | done | 4 | 0.5833 |" in text
    assert "±" not in text


def test_unfinished_and_unreadable_runs_are_reported_on_stderr(runs: Path, capsys: pytest.CaptureFixture[str]):
    exp = {"recipe": "toy", "seed": 9, "model": {"name": "m", "stride": 1, "kind": "a_b & 50%"}}
    with RunDir.open(runs, exp, exp, facts={"groups": ["tiny"]}) as run:
        run.set_status("failed")
    (runs / ("0" * 32)).mkdir()
    assert table.main([str(runs), "--format", "markdown", "--scores", "em"]) == 0
    captured = capsys.readouterr()
    assert "| 1 | 4 | " in captured.out
    assert "3 done, 1 failed" in captured.out or "1 failed, 3 done" in captured.out
    assert "exp_dict.json: no such file" in captured.err
    assert "1 of 7 runs are not done; the means are over finished runs; --unfinished takes all." in captured.err


def test_runs_that_were_stopped_before_their_first_score_are_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    exp = {"recipe": "toy", "seed": 9}
    with RunDir.open(tmp_path, exp, exp, facts={"groups": ["tiny"]}) as run:
        run.set_status("stopped")
    assert table.main([str(tmp_path)]) == 0
    assert "1 of 1 runs are not done; none has a score yet." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--metric", "val_los"], "unknown score 'val_los'. Did you mean 'val_loss'?"),
        (["--by", "stride"], "unknown key 'stride'."),
        (["-e", "tny"], "unknown group 'tny'. Did you mean 'tiny'?"),
        (["-e", "tiny", "tny"], "unknown group 'tny'. Did you mean 'tiny'?"),
    ],
)
def test_mistakes_are_one_line(runs: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str):
    assert table.main([str(runs), *arguments]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err
    assert captured.err.count("\n") == 1


def test_a_missing_folder_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert table.main([str(tmp_path / "none")]) == 1
    assert "none: no such folder of runs" in capsys.readouterr().err


def test_tables_in_text_load_nothing_heavy():
    heavy = ["torch", "pandas", "numpy", "matplotlib", "rich"]
    code = f"import sys, results.table, results.plot; print([m for m in {heavy} if m in sys.modules])"
    assert (
        subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout.strip()
        == "[]"
    )


def test_only_the_runs_that_answer_a_question(runs: Path, capsys: pytest.CaptureFixture[str]):
    (row,) = json.loads(
        print_table(capsys, runs, "--where", "model.stride > 1 and status == 'done' and seed in [0, 2]", "--json")
    )["rows"]
    assert row["runs"] == 2
    assert row["val_loss"] == statistics.fmean([expected(2)[0], expected(2)[2]])
    (row,) = json.loads(print_table(capsys, runs, "--where", "val_loss < 0.61", "--json"))["rows"]
    assert row["runs"] == 1


def test_a_pivot_in_every_format(runs: Path, capsys: pytest.CaptureFixture[str]):
    pivot = (runs, "--pivot", "model.stride", "model.kind", "--format")
    assert print_table(capsys, *pivot, "markdown").splitlines() == [
        "| stride | kind=a_b & 50% |",
        "| --- | --- |",
        "| 1 | 0.68 ± 0.10 (3) |",
        "| 2 | 0.93 ± 0.10 (3) |",
    ]
    assert r"stride & kind=a\_b \& 50\% \\" in print_table(capsys, *pivot, "latex")
    cells = json.loads(print_table(capsys, *pivot[:-1], "--json"))["rows"]
    assert [(cell["model.stride"], cell["val_loss"]) for cell in cells] == [
        (s, statistics.fmean(expected(s))) for s in (1, 2)
    ]
    lines = list(
        csv.reader(io.StringIO(print_table(capsys, runs, "--pivot", "seed", "model.stride", "--format", "csv")))
    )
    assert lines[0] == ["seed", *(f"model.stride={s}{end}" for s in (1, 2) for end in ("", "_std", "_n"))]
    assert [float(line[1]) for line in lines[1:]] == expected(1)
    assert "stride=1" in print_table(capsys, runs, "--pivot", "seed", "model.stride", "--format", "rich")


def test_the_95_percent_interval(runs: Path, capsys: pytest.CaptureFixture[str]):
    half = 4.302652729911275 * statistics.stdev(expected(1)) / 3**0.5
    text = print_table(capsys, runs, "--interval", "ci95", "--format", "markdown", "--scores", "val_loss")
    assert f"| 1 | 3 | done | 4 | 0.68 ± {half:.2f} |" in text
    row = next(csv.DictReader(io.StringIO(print_table(capsys, runs, "--interval", "ci95", "--format", "csv"))))
    assert float(row["val_loss_ci95"]) == pytest.approx(half, rel=1e-9)
    assert float(row["val_loss_std"]) == statistics.stdev(expected(1))
    assert "95 % interval" in print_table(capsys, runs, "--interval", "ci95")


def test_differences_within_a_mean_are_reported(runs: Path, capsys: pytest.CaptureFixture[str]):
    for seed in range(3, 10):
        exp = {"recipe": "toy", "seed": seed, "model": {"name": "m", "stride": 1, "kind": "a_b & 50%"}}
        with RunDir.open(runs, exp, exp, facts={"groups": ["tiny"]}) as run:
            run.set_status("done")
    assert table.main([str(runs), "--format", "markdown"]) == 0
    assert "model.stride=2: no run with seed 3, 4, 5, 6, 7, 8, 9; other rows have it." in capsys.readouterr().err
    assert table.main([str(runs), "--by", "model.kind", "--format", "markdown"]) == 0
    assert "the means are over different model.stride." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--where", "seed = 1"], "--where, character 6 (at '= 1'): write == to compare."),
        (["--where", "sed == 1"], "--where: unknown name 'sed'. Did you mean 'seed'?"),
        (["--where", "seed == 7"], "--where: 'seed == 7' "),
        (["--pivot", "seed", "stride"], "unknown key 'stride'."),
        (
            ["--pivot", "seed", "model.stride", "--by", "seed"],
            "Remove --by, --scores, --best, --columns and --gpu-hours",
        ),
        (["--pivot", "seed", "model.stride", "--metric", "los"], "unknown score 'los'"),
    ],
)
def test_mistakes_in_questions_and_pivots_are_one_line(
    runs: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
):
    assert table.main([str(runs), *arguments]) == 1
    captured = capsys.readouterr()
    assert (captured.out, captured.err.count("\n")) == ("", 1)
    assert message in captured.err
